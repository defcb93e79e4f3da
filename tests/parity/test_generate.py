"""Generation against transformers, on a tiny model: penalties, cuts and beams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.generate import beam, sampling
from jaxlm.generate.sampling import History, Penalties
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.t5 import T5
from jaxlm.recipes.exchange import import_model
from tests.parity import weights

pytestmark = pytest.mark.parity
BENCH = Path(__file__).parents[2] / "scripts/bench_generate.py"
DTYPES = "float32", "bfloat16"
VOCAB, END, PAD, LENGTH = 40, 2, 0, 8
PROMPT = [5, 6, 7, 8]


def test_penalties_and_cuts_are_those_of_its_processors():
    import torch
    from transformers.generation import logits_process as theirs

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    ids = rng.integers(0, VOCAB, (4, 6)).astype(np.int32)
    history = History.of(jnp.asarray(ids), jnp.full((4,), 6), VOCAB)
    chain = theirs.LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.4),
            theirs.TemperatureLogitsWarper(0.7),
            theirs.TopKLogitsWarper(20),
            theirs.TopPLogitsWarper(0.95),
            theirs.MinPLogitsWarper(0.02),
        ]
    )
    expected = chain(torch.tensor(ids, dtype=torch.long), torch.tensor(logits)).numpy()
    actual = Penalties(repetition=1.4)(jnp.asarray(logits), history) / 0.7
    actual = np.asarray(sampling.filter_logits(actual, top_k=20, top_p=0.95, min_p=0.02))
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    assert 0 < np.isfinite(actual).sum() < 4 * 20
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("beams", "penalty"), [(3, 1.0), (4, 0.0), (2, 2.0)])
def test_beams_find_what_its_search_finds(tmp_path, beams, penalty):
    import torch
    import transformers

    family = Llama(vocab=VOCAB, width=32, depth=2, heads=4, kv_heads=2, hidden=48, max_positions=64)
    weights.write(tmp_path, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    out = model.generate(
        torch.tensor([PROMPT]),
        num_beams=beams,
        length_penalty=penalty,
        max_new_tokens=LENGTH,
        do_sample=False,
        early_stopping=False,
        eos_token_id=END,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    actual, score = searched(tmp_path, family, beams, penalty)
    assert actual == out.sequences[0, len(PROMPT) :].tolist()
    np.testing.assert_allclose(score, float(out.sequences_scores[0]), rtol=1e-4)


@pytest.mark.parametrize(("beams", "penalty"), [(3, 1.0), (2, 0.0)])
def test_beams_of_an_encoder_decoder_find_what_its_search_finds(tmp_path, beams, penalty):
    import torch
    import transformers

    family = T5(
        vocab=VOCAB,
        width=32,
        depth=2,
        decoder_depth=1,
        heads=4,
        hidden=48,
        buckets=8,
        max_distance=12,
    )
    weights.write(tmp_path, family)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32)
    out = model.generate(
        torch.tensor([PROMPT]),
        num_beams=beams,
        length_penalty=penalty,
        max_new_tokens=LENGTH,
        do_sample=False,
        early_stopping=False,
        eos_token_id=END,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    actual, score = searched(tmp_path, family, beams, penalty)
    assert actual == out.sequences[0, 1:].tolist()
    np.testing.assert_allclose(score, float(out.sequences_scores[0]), rtol=1e-4)


def searched(folder, family, beams, penalty):
    """The ids that our search finds with the weights of a folder, and their score."""
    decoder = family.build()
    blueprint = Blueprint(decoder, Precision.float32())
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), blueprint.shapes
    )
    with Folder(folder).opened() as fetch:
        params = import_model.load(layout(decoder, family.HUB), fetch, placed)
    run = beam.build(
        blueprint.merge, beams=beams, length_penalty=penalty, max_tokens=LENGTH, ends=[END], pad=PAD
    )
    actual = jax.jit(run)(params, jnp.asarray([PROMPT]), jnp.array([len(PROMPT)]), None)
    count = int(actual.length[0])
    score = float(actual.log_probabilities[0, :count].sum()) / count**penalty
    return actual.ids[0, :count].tolist(), score


@pytest.mark.timeout(600)
def test_eight_prompts_go_on_faster_than_its_generate_does():
    """A model of 110M, each side in its better way.

    Twice as fast in float32 on an AMD, in bfloat16 on an Intel without units for it, and in w8a8
    over transformers in bfloat16. Wants the machine for itself.
    """
    clean = os.environ | {"XLA_FLAGS": "", "JAX_NUMPY_RANK_PROMOTION": "allow"}
    words = [sys.executable, str(BENCH), "--turns=2"]
    done = subprocess.run(words, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = (
        max(actual[f"{side} {d}"] for d in DTYPES) for side in ("jaxlm", "transformers")
    )
    assert ours > 1.2 * theirs
    if not backend.is_intel():
        assert actual["jaxlm float32"] >= 2 * actual["transformers float32"]
    if not backend.cpu_units():
        assert actual["jaxlm bfloat16"] >= 2 * actual["transformers bfloat16"]
    assert actual["jaxlm w8a8"] >= 2 * actual["transformers bfloat16"]
    assert actual["same ids, jaxlm float32"] == 1


def test_the_benchmark_beside_its_generate_runs_and_both_give_the_same_text():
    sizes = dict(turns=1, batch=2, prompt=8, new=6, width=64, depth=2, vocab=100)
    done = subprocess.run(
        [sys.executable, str(BENCH), *(f"--{name}={size}" for name, size in sizes.items())],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": "", "JAX_NUMPY_RANK_PROMOTION": "allow"},
    )
    assert done.returncode == 0, done.stderr
    *turns, last = done.stdout.splitlines()
    actual = json.loads(last)
    assert len(turns) == 5
    for dtype in DTYPES:
        rates = [actual[f"{side} {dtype}"] for side in ("jaxlm", "transformers")]
        assert actual[f"times as fast, jaxlm {dtype}"] == pytest.approx(rates[0] / rates[1])
    if backend.AMX not in backend.cpu_units():
        assert actual["jaxlm float32"] >= 2 * actual["transformers float32"]
    assert actual["same ids, jaxlm float32"] == 1
