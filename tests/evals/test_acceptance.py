"""Acceptance of a draft, against a computation in float64."""

import jax
import numpy as np
import pytest
import scipy.special

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.evals import acceptance, loss, means
from jaxlm.generate.config import GUESSES
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")
SIZES = dict(vocab=32, heads=2, kv_heads=2, hidden=32)
LENGTH = 24
SIZE_OF_EACH = np.arange(32) % 5  # bytes of the ids
SUMMED = loss.sums_function(SIZE_OF_EACH)


@pytest.fixture(scope="module")
def models():
    """A draft and a target whose distributions are far from even."""
    families = Llama(width=16, depth=1, **SIZES), Llama(width=32, depth=2, **SIZES)
    blueprints = [Blueprint(each.build(), Precision.float32()) for each in families]
    return [(each, draw_params(each, seed, std=0.3)) for seed, each in enumerate(blueprints)]


def rows():
    """Two rows; in the second are two texts and padding."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 32, (2, LENGTH)).astype(np.int32)
    segments = np.ones((2, LENGTH), np.int32)
    segments[1, 10:], segments[1, 20:] = 2, 0
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), segments.shape).copy()
    positions[1, 10:] -= 10
    weights = (segments > 0).astype(np.float32)
    fields = tokens, np.roll(tokens, -1, 1), weights, segments, positions
    return Tokens(*fields)


def test_the_means_are_those_of_a_loop_over_tokens(models):
    batch = rows()
    probabilities = []
    for blueprint, params in models:

        @jax.jit
        def logits(params, blueprint=blueprint):
            model = blueprint.merge(params)
            hidden = model.hidden(batch.tokens, segments=batch.segments, positions=batch.positions)
            return model.logits(hidden.values)

        probabilities.append(scipy.special.softmax(np.float64(logits(params)), -1))
    first, second = probabilities
    stands = {
        "greedy": (first.argmax(-1) == second.argmax(-1)).astype(np.float64),
        "sampled": np.minimum(first, second).sum(-1),
    }
    assert 0 < stands["greedy"].mean() < 1
    segments = np.asarray(batch.segments)
    expected = {}
    for name, agree in stands.items():
        shares, tokens = [], []
        for row, slot in zip(*np.nonzero(segments), strict=True):
            shares.append(agree[row, slot])
            texts = segments[row, slot : slot + GUESSES]
            if len(texts) == GUESSES and (texts == texts[0]).all():
                tokens.append(1 + np.cumprod(agree[row, slot : slot + GUESSES]).sum())
        expected |= {f"draft_{name}": np.mean(shares), f"draft_{name}_tokens": np.mean(tokens)}
    (draft, small), (target, large) = models
    alone = jax.jit(loss.build(draft.merge, SIZE_OF_EACH))(small, batch)
    for parts in ({}, {"chunk": 8, "microbatches": 2}):
        sums, agreement = jax.jit(acceptance.build(draft.merge, target.merge, SUMMED, **parts))(
            small, large, batch
        )
        assert means.figures(means.added([agreement, agreement])) == pytest.approx(
            expected, rel=1e-5
        )
        for one, other in zip(sums, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_accepts_all_of_its_own_guesses(models):
    (_, (target, params)) = models
    step = jax.jit(acceptance.build(target.merge, target.merge, SUMMED))
    figures = means.figures(means.added([step(params, params, rows())[1]]))
    assert figures["draft_greedy"] == 1
    assert figures["draft_sampled"] == pytest.approx(1)
    assert figures["draft_greedy_tokens"] == 1 + GUESSES
