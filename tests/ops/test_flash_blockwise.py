"""Attention by blocks is attention: outputs and gradients against float64.

Masks, groups, lengths and dtypes vary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops import flash, masks
from jaxlm.ops.attention import attention
from jaxlm.ops.cudnn import cudnn
from jaxlm.ops.splash import splash
from jaxlm.parallel import hlo, mesh, rules
from jaxlm.parallel.config import MeshConfig
from tests.ops.float64 import SCALE, exact, operands, reach_of, segments_of

BLOCK = 8
FULL = Precision.float32()


def by_blocks(
    length, heads, kv_heads, *, causal, window, softcap, segments, reach=None, precision=FULL
):
    query, key, value, weights = operands(length, heads, kv_heads)
    mask = dataclasses.replace(masks.causal(length, segments, reach), causal=causal, window=window)

    def weighed(query, key, value):
        out = flash.blockwise(
            query, key, value, mask, precision.compute, scale=SCALE, softcap=softcap, block=BLOCK
        )
        return (out * weights).sum(), out

    run = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = run(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)))
    return out, *grads


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "causal", "window", "softcap", "is_packed"),
    [
        (8, 1, 1, True, None, None, False),  # one block
        (24, 4, 2, True, None, None, True),
        (29, 4, 1, True, None, 2.0, True),  # a block that is not full
        (40, 2, 2, True, 5, None, False),  # a window within a block
        (40, 4, 2, True, 17, 2.0, True),  # and over three
        (27, 2, 1, False, None, None, False),  # both ways, with slots that are visible to none
        (27, 4, 2, False, 6, None, True),
        (5, 2, 2, True, None, None, False),  # a row shorter than a block
    ],
)
def test_outputs_and_gradients_are_those_of_float64(
    length, heads, kv_heads, causal, window, softcap, is_packed
):
    segments = segments_of(length) if is_packed else None
    terms = dict(causal=causal, window=window, softcap=softcap, segments=segments)
    expected = exact(*operands(length, heads, kv_heads), **terms)
    got = by_blocks(length, heads, kv_heads, **terms)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * np.abs(one).max())


@pytest.mark.slow
def test_values_may_be_of_another_size_than_keys():
    """Outputs of the first features of values do not depend on the other features.

    The same holds for their gradients.
    """
    query, key, value, weights = (jnp.asarray(x, jnp.float32) for x in operands(24, 4, 2))
    mask = masks.causal(24, segments_of(24))

    def summed(query, key, value, weights):
        out = flash.blockwise(query, key, value, mask, FULL.compute, scale=SCALE, block=BLOCK)
        return (out * weights).sum(), out

    run = jax.jit(jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True))
    (_, short), grads = run(query, key, value[..., :5], weights[..., :5])
    (_, whole), gradients = run(query, key, value, weights.at[..., 5:].set(0.0))
    np.testing.assert_allclose(short, whole[..., :5], rtol=1e-5, atol=1e-6)
    for one, other in zip(grads[:2], gradients[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[2], gradients[2][..., :5], rtol=1e-4, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("length", "window", "softcap", "is_packed"), [(29, None, 2.0, True), (24, 5, None, False)]
)
def test_queries_with_a_reach_see_what_comes_after_them(length, window, softcap, is_packed):
    segments = segments_of(length) if is_packed else None
    terms = dict(
        causal=True, window=window, softcap=softcap, segments=segments, reach=reach_of(length)
    )
    expected = exact(*operands(length, 4, 2), **terms)
    got = by_blocks(length, 4, 2, **terms)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize("kernel", ["blockwise", "cudnn"])
def test_texts_of_a_shared_prefix_give_what_the_reference_gives(kernel):
    draw = np.random.default_rng(0)
    segments = np.sort(draw.integers(1, 9, (2, 29)), axis=1).astype(np.int32)
    prefixes = np.where(segments > 4, 5, 1).astype(np.int32)
    mask = masks.causal(29, segments, prefix_segments=prefixes)
    *qkv, weights = (jnp.asarray(x, jnp.float32) for x in operands(29, 4, 2))

    def weighed(kernel, *qkv):
        if kernel == "reference":
            out = attention(*qkv, mask, FULL, scale=SCALE)
        elif kernel == "cudnn":
            out = cudnn(*qkv, mask, FULL.compute, scale=SCALE, implementation="xla")
        else:
            out = flash.blockwise(*qkv, mask, FULL.compute, scale=SCALE, block=BLOCK)
        return (out * weights).sum(), out

    run = jax.jit(jax.value_and_grad(weighed, (1, 2, 3), True), static_argnums=0)
    (_, expected), gradients = run("reference", *qkv)
    (_, out), grads = run(kernel, *qkv)
    for one, other in zip((expected, *gradients), (out, *grads), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("length", "window", "has_reach", "is_queried"),
    [(29, None, False, False), (24, 5, False, True), (27, None, True, False)],
)
def test_keys_before_the_row_give_what_the_reference_gives(length, window, has_reach, is_queried):
    leading = 3
    mask = masks.causal(length, segments_of(length), reach_of(length) if has_reach else None)
    mask = dataclasses.replace(mask, window=window).preceded(leading, is_queried=is_queried)
    operand = (jnp.asarray(x, jnp.float32) for x in operands(length + leading, 4, 2))
    query, key, value, weights = operand
    first = 0 if is_queried else leading
    query, weights = query[:, first:], weights[:, first:]

    def weighed(kernel, *qkv):
        if kernel == "reference":
            out = attention(*qkv, mask, FULL, scale=SCALE)
        else:
            out = flash.blockwise(*qkv, mask, FULL.compute, scale=SCALE, block=BLOCK)
        return (out * weights).sum(), out

    run = jax.jit(jax.value_and_grad(weighed, (1, 2, 3), True), static_argnums=0)
    (_, expected), gradients = run("reference", query, key, value)
    (_, out), grads = run("blockwise", query, key, value)
    for one, other in zip((expected, *gradients), (out, *grads), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_in_low_precision_it_is_as_near_to_float64_as_the_reference():
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    terms = dict(causal=True, window=None, softcap=None, segments=None)
    expected = exact(*operands(40, 4, 2), **terms)
    near = by_blocks(40, 4, 2, precision=precision, **terms)
    query, key, value, weights = (jnp.asarray(x, jnp.float32) for x in operands(40, 4, 2))

    def weighed(query, key, value):
        out = attention(query, key, value, masks.causal(40), precision, scale=SCALE)
        return (out * weights).sum(), out

    (_, out), grads = jax.value_and_grad(weighed, argnums=(0, 1, 2), has_aux=True)(
        query, key, value
    )
    for exactly, blocks, whole in zip(expected, near, (out, *grads), strict=True):
        error, known = (np.abs(np.asarray(x) - exactly).max() for x in (blocks, whole))
        assert 0 < error <= 2 * known


def test_memory_grows_with_the_row_and_not_with_its_square():
    def held(length, kernel):
        shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

        def loss(query, key, value):
            mask = masks.causal(length)
            return attention(query, key, value, mask, FULL, scale=1.0, kernel=kernel).sum()

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert held(4096, "reference") > 3 * held(2048, "reference")
    assert held(4096, "blockwise") < 2.2 * held(2048, "blockwise")
    assert held(2048, "blockwise") < held(2048, "reference") / 10


def test_blocks_that_nothing_is_seen_of_are_not_computed():
    """Half of a causal row, and little of one with a window.

    The time shows it in long rows, the bounds in short ones.
    """

    def seen(window, count=6):
        static = flash.StaticArgs(True, window, False, jnp.float32, 1.0, None, BLOCK)
        bounds = [flash._visible_blocks(static, count, jnp.asarray(i)) for i in range(count)]
        return sum(int(stop) - int(start) for start, stop in bounds)

    assert seen(None) == 6 * 7 // 2
    assert seen(1) == 6
    assert seen(BLOCK) == 6 + 5
    assert seen(BLOCK + 2) == 6 + 5 + 4
    static = flash.StaticArgs(True, None, False, jnp.float32, 1.0, None, BLOCK)
    until = jnp.array([[3 * BLOCK + 1] + [BLOCK - 1] * (BLOCK - 1)])
    assert flash._visible_blocks(static, 6, jnp.asarray(0), until) == (0, 4)


def test_what_the_kernels_cannot_do_is_refused():
    query, key, value, _ = (jnp.asarray(x, jnp.float32) for x in operands(16, 2, 2))
    cache = masks.Mask(query_index=jnp.arange(16)[None], key_index=jnp.arange(16)[None])
    with pytest.raises(ValueError, match="needs a mask of whole rows"):
        attention(query, key, value, cache, FULL, scale=1.0, kernel="blockwise")
    with pytest.raises(ValueError, match="blockwise has no attention dropout"):
        attention(
            query, key, value, masks.causal(16), FULL, scale=1.0, kernel="blockwise",
            dropout=0.1, dropout_key=jax.random.key(0),
        )  # fmt: skip
    leading = masks.causal(12).preceded(4, is_queried=True)
    for kernel in (splash, cudnn):
        with pytest.raises(ValueError, match="has no leading keys"):
            kernel(*(x.repeat(8, 1) for x in (query, key, value)), leading, jnp.bfloat16, scale=1.0)


def test_on_a_mesh_rows_and_heads_stay_where_they_are():
    shapes = [(8, 40, heads, 4) for heads in (4, 2, 2)]
    query, key, value = (
        jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes)
    )
    segments = jnp.asarray(np.repeat(segments_of(40), 4, axis=0))

    def loss(query, key, value):
        query, key, value = (
            rules.constrain(x, "batch", "length", "heads", "head_dim") for x in (query, key, value)
        )
        mask = masks.causal(40, segments)
        out = flash.blockwise(query, key, value, mask, jnp.float32, scale=SCALE, block=BLOCK)
        return jnp.square(rules.constrain(out, "batch", "length", "heads", "head_dim")).sum()

    alone = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)
    grid = mesh.build(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(grid):
        place = NamedSharding(grid, rules.spec(("batch", "length", "heads", "head_dim")))
        arrays = [jax.device_put(x, place) for x in (query, key, value)]
        program = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), out_shardings=(None, (place,) * 3))
            .lower(*arrays)
            .compile()
        )
        split = program(*arrays)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    sent = [each for each in hlo.read_collectives(program.as_text()) if each.shapes[0].elements > 1]
    assert not sent, "only the loss is summed over devices"
