"""Every family through transformers: logits and gradients, both ways. JAXLM_WRITE_GOLDENS=1 writes what the fast tests compare with:

JAXLM_WRITE_GOLDENS=1 .venv-parity/bin/python -m pytest -m parity tests/parity
"""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import Decoder
from jaxlm.models.families.t5 import T5
from jaxlm.recipes import importing
from tests.parity import weights

pytestmark = pytest.mark.parity
GOLDENS = Path(__file__).parents[1] / "golden/transformers"


def read_by_transformers(folder):
    """The model of a folder in float64, and what of it transformers did not find or did not know."""
    import torch
    import transformers

    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )


def apart(gradients):
    """Gradients by the names in files, where each expert has matrices of its own, and its gate and up."""
    found = {}
    for name, gradient in gradients.items():
        stem, _, fused = name.rpartition(".experts.")
        if not stem:
            found[name] = gradient
            continue
        for number, own in enumerate(gradient):
            parts = {"down_proj": own}
            if fused == "gate_up_proj":
                gate, up = np.split(own, 2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, value in parts.items():
                found[f"{stem}.experts.{number}.{part}.weight"] = value
    return found


OLDER = {
    "gpt_neox": {"lm_head.": "embed_out."},
    "mixtral": {
        ".mlp.": ".block_sparse_moe.",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
}


def by_files(family, gradients):
    """The same under the older names that files have."""
    found = {}
    for name, gradient in gradients.items():
        for new, old in OLDER.get(family.HUB.model_type, {}).items():
            name = name.replace(new, old)
        found[name] = gradient
    return found


@pytest.fixture(scope="module", params=weights.FAMILIES)
def both(request, tmp_path_factory):
    import torch

    family = weights.FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("ours")
    weights.write(folder, family)
    model, told = read_by_transformers(folder)
    assert not any(told.values()), told
    model = model.eval()
    ids = torch.from_numpy(weights.tokens()).long()
    if isinstance(family, T5):
        source = torch.from_numpy(weights.source()).long()
        logits = model(source, decoder_input_ids=ids).logits
    else:
        logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, weights.VOCAB), ids[:, 1:].reshape(-1)
    )
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    gradients = by_files(family, apart(gradients))
    return request.param, model, logits.detach().numpy(), loss.item(), gradients


def blueprint_of(name):
    return Blueprint(weights.FAMILIES[name].build(), Precision.float32())


def our_loss(blueprint, family, params):
    ids = weights.tokens()
    logits = weights.forward(blueprint.merge(params), family)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    picked = jax.numpy.take_along_axis(log_p, ids[:, 1:, None], axis=-1)
    return -picked.mean(), logits


def test_logits_loss_and_gradients_are_those_of_transformers(both, record_property):
    name, _, logits, loss, gradients = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    params = weights.params(family, blueprint.shapes)
    step = jax.jit(jax.value_and_grad(lambda p: our_loss(blueprint, family, p), has_aux=True))
    (ours, our_logits), gradient = step(params)
    assert np.abs(logits).max() > 0.5
    np.testing.assert_allclose(our_logits, logits, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(ours, loss, rtol=1e-6)
    mine = weights.gradients(family, gradient)
    assert mine.keys() == gradients.keys()
    worst, largest = 0.0, max(np.abs(gradient).max() for gradient in gradients.values())
    for key, gradient in gradients.items():
        size = np.abs(gradient).max()
        assert size > 0, key
        if weights.is_nothing(size, largest):
            assert key.endswith("key.bias")
            assert np.abs(mine[key]).max() < 1e-7 * largest
            continue
        np.testing.assert_allclose(mine[key], gradient, rtol=1e-3, atol=2e-5 * size, err_msg=key)
        worst = max(worst, float(np.abs(mine[key] - gradient).max() / size))
    far = np.abs(our_logits - logits).max() / np.abs(logits).max()
    assert max(worst, far) < 1e-4
    record_property("table", f"{name:28} logits {far:.1e}  gradients {worst:.1e}")


def test_padded_packed_and_cached_rows_are_those_of_transformers(both):
    import torch

    name, model, *_ = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    if not isinstance(blueprint.config, Decoder):
        pytest.skip("no decoder alone")
    params, ids = weights.params(family, blueprint.shapes), weights.tokens()
    lengths = (11, 6)
    there = np.arange(11) < np.array(lengths)[:, None]
    theirs = torch.from_numpy(ids).long()
    with torch.no_grad():  # each by itself: beside padding, its windows give it no numbers
        alone = [
            model(theirs[row : row + 1, :length]).logits[0] for row, length in enumerate(lengths)
        ]
    wanted = torch.cat(alone).numpy()

    @jax.jit
    def run(params, tokens, **rest):
        model = blueprint.merge(params)
        hidden = model(tokens, **rest)
        return model.logits(hidden.values), hidden.cache

    def check(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)

    places = np.broadcast_to(np.arange(11, dtype=np.int32), there.shape)
    padded, _ = run(params, ids[:, :11], positions=places, segments=there.astype(np.int32))
    check(padded[there], wanted)
    packed, _ = run(
        params, ids[:, :11][there][None], positions=places[there][None],
        segments=np.repeat([1, 2], lengths)[None].astype(np.int32),
    )  # fmt: skip
    check(packed[0], wanted)
    known = None
    cache = blueprint.merge(params).empty_cache(2, 11)
    for start, stop in ((0, 8), (8, 9), (9, 10), (10, 11)):
        with torch.no_grad():
            out = model(theirs[:, start:stop], past_key_values=known, use_cache=True)
        known = out.past_key_values
        found, cache = run(params, ids[:, start:stop], positions=places[:, start:stop], cache=cache)
        cache = cache._replace(length=cache.length + stop - start)
        check(found, out.logits.numpy())


def test_what_transformers_writes_is_read_as_it_was(both, tmp_path):
    name, model, *_ = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    model.float().save_pretrained(tmp_path)
    model.double()
    folder = Folder(tmp_path)
    read, _ = importing.described(folder, lambda _: None)
    assert read.build() == family.build()
    tensors = weights.tensors(read)
    ignored = importing.compare(tensors, folder, read.HUB, is_tied=family.build().tied)
    assert not [each for each in ignored if "head" in each]
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        ),
        blueprint.shapes,
    )
    with folder.opened() as fetch:
        params = importing.load(tensors, fetch, placed)
    expected = weights.params(family, blueprint.shapes)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_goldens_are_what_transformers_says_today(both):
    name, _, logits, loss, gradients = both
    found = {
        "made by": "tests/parity/test_transformers.py, transformers in float64",
        "loss": loss,
        "logits": logits[:, ::8].tolist(),
        "gradient_norms": {key: float(np.linalg.norm(g)) for key, g in gradients.items()},
    }
    path = GOLDENS / f"{name}.json"
    if os.environ.get("JAXLM_WRITE_GOLDENS"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(path.read_text())
    np.testing.assert_allclose(found["loss"], golden["loss"], rtol=1e-9)
    np.testing.assert_allclose(found["logits"], golden["logits"], rtol=1e-7, atol=1e-9)
