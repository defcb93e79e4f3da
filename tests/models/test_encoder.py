"""Laws that every encoder satisfies; tests/parity compares each with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.bert import BERT
from jaxlm.models.families.modernbert import ModernBERT
from tests.models.parameters import draw_params
from tests.models.test_laws import dot_flops

LENGTH, VOCAB, WINDOW = 14, 50, 2
LOCAL = ModernBERT(
    vocab=VOCAB, width=16, depth=2, heads=2, hidden=24, window=WINDOW, tied=False
).build()
# A layer that sees all, one with a window, and all that can be added to the embedding.
CONFIG = dataclasses.replace(LOCAL, positions=LENGTH, first_position=3, token_types=2)


@pytest.fixture(scope="module")
def built():
    blueprint = Blueprint(CONFIG, Precision.float32())
    params = draw_params(blueprint)

    # Away from the initial ones and zeros, so that every scale and bias matters.
    def away(path, leaf):
        noise = np.random.default_rng([1, *path.encode()])
        return leaf + 0.1 * noise.standard_normal(leaf.shape, np.float32)

    return blueprint, tree.map_with_path(away, params)


@pytest.fixture(scope="module")
def logits(built):
    blueprint, params = built

    @jax.jit
    def run(tokens, positions, segments, types):
        model = blueprint.merge(params)
        hidden = model.hidden(tokens, positions=positions, segments=segments, types=types)
        return model.logits(hidden.values)

    return run


def row():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH)).astype(np.int32)
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    return tokens, positions, np.ones_like(tokens), np.zeros_like(tokens)


def reached(logits, slot, tokens, positions, segments, types):
    """The slots whose scores change with the token at `slot`.

    Args:
      logits: returns the scores of the inputs.
      slot: the changed slot.
      tokens, positions, segments, types: the inputs.
    """
    other = tokens.copy()
    other[0, slot] = (tokens[0, slot] + 1) % VOCAB
    change = logits(other, positions, segments, types) - logits(tokens, positions, segments, types)
    return np.flatnonzero(np.abs(change[0]).max(-1) > 0).tolist()


def test_every_token_sees_its_document_both_ways_and_nothing_of_another(logits):
    tokens, positions, segments, types = row()
    assert reached(logits, 6, tokens, positions, segments, types) == list(range(LENGTH))
    cut = 5
    segments[0, cut:] = 2
    positions[0, cut:] -= cut
    assert reached(logits, 6, tokens, positions, segments, types) == list(range(cut, LENGTH))
    segments[0, -3:] = 0
    assert reached(logits, 6, tokens, positions, segments, types) == list(range(cut, LENGTH - 3))
    assert np.isfinite(logits(tokens, positions, segments, types)).all()


def test_a_window_reaches_as_far_to_either_side():
    local = dataclasses.replace(LOCAL, depth=1, prefix=(), pattern=LOCAL.pattern[:1])
    blueprint = Blueprint(local, Precision.float32())
    params = draw_params(blueprint)

    @jax.jit
    def run(tokens, positions, segments, types):
        model = blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=positions, segments=segments).values)

    near = list(range(6 - WINDOW, 6 + WINDOW + 1))
    assert reached(run, 6, *row()) == near
    keys = sum(min(n + WINDOW + 1, LENGTH) - max(n - WINDOW, 0) for n in range(LENGTH)) / LENGTH
    attention = 12 * 2 * 8 * keys
    expected = 6 * model_cost.matmul_parameters(local) + attention
    assert model_cost.flops_per_token(local, LENGTH, causal=True) == pytest.approx(
        expected, rel=1e-12
    )


def test_a_batch_is_read_as_it_says_and_types_and_positions_count(built, logits):
    blueprint, params = built
    tokens, positions, segments, types = row()
    plain = logits(tokens, positions, segments, types)
    batch = Tokens(tokens, tokens, np.ones_like(tokens, np.float32), segments, positions)
    model = blueprint.merge(params)
    read = jax.jit(lambda batch: model.logits(model.read(batch, key=None).values))(batch)
    np.testing.assert_allclose(read, plain, rtol=1e-5, atol=1e-6)
    types[0, 4] = 1
    assert np.abs(logits(tokens, positions, segments, types) - plain).max() > 1e-3
    assert np.abs(logits(tokens, positions[:, ::-1], segments, types * 0) - plain).max() > 1e-3


def test_the_closed_form_counts_every_parameter_and_product(built):
    blueprint, params = built
    axes = tree.leaves(blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    assert {each.path: (each.shape, each.axes) for each in tensors(CONFIG)} == {
        path: (leaf.shape, axes[path]) for path, leaf in tree.leaves(params).items()
    }
    whole = BERT(vocab=VOCAB, width=16, depth=2, heads=2, max_positions=LENGTH).build()
    blueprint = Blueprint(whole, Precision.float32())

    def logits(params, tokens, positions):
        model = blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=positions).values)

    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    program = jax.make_jaxpr(logits)(blueprint.shapes, tokens, tokens)
    counted = 3 * dot_flops(program.jaxpr) / LENGTH
    assert counted == model_cost.flops_per_token(whole, LENGTH, causal=True)
    assert counted == model_cost.flops_per_token(whole, LENGTH, causal=False)
