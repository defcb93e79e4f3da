"""Laws of encoder-decoders; tests/parity compares each with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.t5 import T5
from jaxlm.nn.attention import bucket
from jaxlm.nn.config import RelativeBias
from tests.models.parameters import draw_params
from tests.models.test_laws import dot_flops

LENGTH, READ, VOCAB = 7, 9, 50
CONFIG = T5(
    vocab=VOCAB, width=16, depth=2, decoder_depth=1, heads=2, buckets=8, max_distance=12, gated=True
).build()


@pytest.fixture(scope="module")
def built():
    blueprint = Blueprint(CONFIG, Precision.float32())
    return blueprint, draw_params(blueprint)


@pytest.fixture(scope="module")
def logits(built):
    blueprint, params = built

    @jax.jit
    def run(source, tokens, source_segments, segments):
        model = blueprint.merge(params)
        hidden = model.hidden(
            tokens,
            positions=tokens,
            source=source,
            segments=segments,
            source_segments=source_segments,
        )
        return model.logits(hidden.values)

    return run


def rows():
    draw = np.random.default_rng(0)
    source = draw.integers(0, VOCAB, (1, READ)).astype(np.int32)
    tokens = draw.integers(0, VOCAB, (1, LENGTH)).astype(np.int32)
    return source, tokens, np.ones_like(source), np.ones_like(tokens)


def reached(logits, which, slot, arrays):
    """The decoder slots whose scores change with a token of the source (0) or decoder (1)."""
    other = [each.copy() for each in arrays]
    other[which][0, slot] = (arrays[which][0, slot] + 1) % VOCAB
    change = logits(*other) - logits(*arrays)
    return np.flatnonzero(np.abs(change[0]).max(-1) > 0).tolist()


def test_a_token_depends_on_its_source_and_on_those_before_it_and_on_no_other_document(logits):
    arrays = rows()
    assert reached(logits, 0, READ - 1, arrays) == list(range(LENGTH))
    assert reached(logits, 1, 3, arrays) == [3, 4, 5, 6]
    arrays[2][0, 5:], arrays[3][0, 4:] = 2, 2
    assert reached(logits, 0, 4, arrays) == [0, 1, 2, 3]
    assert reached(logits, 0, 5, arrays) == [4, 5, 6]
    assert reached(logits, 1, 2, arrays) == [2, 3]
    packed = logits(*arrays)
    alone = logits(arrays[0][:, 5:], arrays[1][:, 4:], None, None)
    np.testing.assert_allclose(packed[:, 4:], alone, rtol=1e-4, atol=1e-5)


def test_tokens_that_come_one_by_one_score_as_all_at_once(built, logits):
    blueprint, params = built
    source, tokens, segments, _ = (np.repeat(each, 2, axis=0) for each in rows())
    segments[1, 6:] = 0  # a shorter source, padded

    @jax.jit
    def one_by_one(tokens):
        model = blueprint.merge(params)
        cache = model.init_cache(source, segments, LENGTH)

        def step(cache, token):
            hidden = model.hidden(token[:, None], positions=cache.length[:, None], cache=cache)
            cache = hidden.cache._replace(length=cache.length + 1)
            return cache, model.logits(hidden.values)[:, 0]

        _, actual = jax.lax.scan(step, cache, tokens.T)
        return actual.swapaxes(0, 1)

    actual = one_by_one(jnp.asarray(tokens))
    whole = logits(source, tokens, segments, np.ones_like(tokens))
    np.testing.assert_allclose(actual, whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="either a source or a cache"):
        blueprint.merge(params).hidden(tokens, positions=tokens)


def test_a_decoder_that_attends_to_no_encoder_and_mixed_biases_are_refused():
    with pytest.raises(ValueError, match="cross attention in every layer"):
        dataclasses.replace(CONFIG, decoder=CONFIG.encoder)
    (block,) = CONFIG.encoder.pattern
    bare = dataclasses.replace(block, attention=dataclasses.replace(block.attention, relative=None))
    with pytest.raises(ValueError, match="the same relative bias"):
        dataclasses.replace(CONFIG.encoder, pattern=(block, bare))
    with pytest.raises(ValueError, match="wired as post"):
        dataclasses.replace(CONFIG.decoder.pattern[0], residual="post")


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_bucket_is_that_of_the_paper(both_ways):
    config = RelativeBias(buckets=32, max_distance=128, both_ways=both_ways)
    actual = bucket(jnp.arange(-300, 301), config)
    count, first = (16, 16) if both_ways else (32, 0)
    for distance, number in zip(range(-300, 301), actual.tolist(), strict=True):
        far = abs(distance) if both_ways else max(-distance, 0)
        near = count // 2
        wide = near
        while wide < count - 1 and far >= near * (128 / near) ** (
            (wide + 1 - near) / (count - near)
        ):
            wide += 1
        expected = far if far < near else wide
        assert number == expected + (first if distance > 0 else 0), distance


def test_the_closed_form_counts_every_parameter_and_product(built):
    blueprint, params = built
    axes = tree.leaves(blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    assert {each.path: (each.shape, each.axes) for each in tensors(CONFIG)} == {
        path: (leaf.shape, axes[path]) for path, leaf in tree.leaves(params).items()
    }
    assert model_cost.parameters(CONFIG) == tree.count(params)

    def logits(params, source, tokens):
        model = blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=tokens, source=source).values)

    source, tokens = (jnp.zeros((1, size), jnp.int32) for size in (READ, LENGTH))
    program = jax.make_jaxpr(logits)(blueprint.shapes, source, tokens)
    counted = 3 * dot_flops(program.jaxpr) / READ
    assert counted == pytest.approx(
        model_cost.flops_per_token(CONFIG, READ, causal=False, targets=LENGTH), rel=1e-12
    )
    assert counted > model_cost.flops_per_token(CONFIG, READ, causal=True, targets=LENGTH)
