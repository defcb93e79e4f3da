"""The same weights through transformers: logits and gradients. JAXLM_WRITE_GOLDENS=1 writes what the fast tests compare with:

JAXLM_WRITE_GOLDENS=1 .venv-parity/bin/python -m pytest -m parity tests/parity
"""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from tests.parity import weights

pytestmark = pytest.mark.parity
GOLDENS = Path(__file__).parents[1] / "golden/transformers"


def oracle(family):
    """transformers' tiny model in float64, with our weights."""
    import torch
    import transformers

    shared = {"vocab_size": weights.VOCAB, "attn_implementation": "eager"}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=weights.WIDTH, n_layer=weights.DEPTH, n_head=weights.HEADS, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        shared |= dict(
            hidden_size=weights.WIDTH, num_hidden_layers=weights.DEPTH, num_attention_heads=weights.HEADS,
            num_key_value_heads=2, intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=False,
            max_position_embeddings=64, rope_theta=10_000.0,
        )  # fmt: skip
        if family == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
        elif family == "mixtral":
            config = transformers.MixtralConfig(
                num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager",
                output_router_logits=False, **shared,
            )  # fmt: skip
            model = transformers.MixtralForCausalLM(config)
        else:
            config = transformers.Qwen3Config(head_dim=12, **shared)
            model = transformers.Qwen3ForCausalLM(config)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights.weight(name, tuple(parameter.shape))))
    return model


def run_oracle(family):
    import torch

    model = oracle(family)
    ids = torch.from_numpy(weights.tokens()).long()
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, weights.VOCAB), ids[:, 1:].reshape(-1)
    )
    loss.backward()
    named = {name: p.detach().float().numpy() for name, p in model.named_parameters()}
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return named, logits.detach().numpy(), loss.item(), gradients


@pytest.fixture(scope="module", params=weights.FAMILIES)
def both(request):
    family = request.param
    named, logits, loss, gradients = run_oracle(family)
    blueprint = Blueprint(weights.FAMILIES[family].build(), Precision.float32())
    params = weights.ours(family, blueprint.shapes, named)
    return family, blueprint, params, logits, loss, gradients


def our_loss(blueprint, params):
    ids = weights.tokens()
    model = blueprint.merge(params)
    positions = np.broadcast_to(np.arange(weights.LENGTH, dtype=np.int32), ids.shape)
    logits = model.logits(model(ids, positions=positions).values)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    picked = jax.numpy.take_along_axis(log_p, ids[:, 1:, None], axis=-1)
    return -picked.mean(), logits


def test_logits_and_loss_are_those_of_transformers(both):
    _, blueprint, params, logits, loss, _ = both
    ours, our_logits = our_loss(blueprint, params)
    assert np.abs(logits).max() > 0.5
    np.testing.assert_allclose(our_logits, logits, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(ours, loss, rtol=1e-6)


def test_every_gradient_is_that_of_transformers(both):
    family, blueprint, params, _, _, gradients = both
    ours = jax.grad(lambda p: our_loss(blueprint, p)[0])(params)
    mine = weights.theirs(family, ours)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        size = np.abs(gradient).max()
        assert size > 0
        np.testing.assert_allclose(mine[name], gradient, rtol=1e-3, atol=2e-5 * size, err_msg=name)


def test_the_goldens_are_what_transformers_says_today(both):
    family, _, _, logits, loss, gradients = both
    found = {
        "made by": "tests/parity/test_transformers.py, transformers in float64",
        "loss": loss,
        "logits": logits[:, ::4].tolist(),
        "gradient_norms": {name: float(np.linalg.norm(g)) for name, g in gradients.items()},
    }
    path = GOLDENS / f"{family}.json"
    if os.environ.get("JAXLM_WRITE_GOLDENS"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(path.read_text())
    np.testing.assert_allclose(found["loss"], golden["loss"], rtol=1e-9)
    np.testing.assert_allclose(found["logits"], golden["logits"], rtol=1e-7, atol=1e-9)
