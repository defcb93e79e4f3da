"""Activation memory of attention kernels in closed form, against what JAX saves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.cost import activations
from jaxlm.models.cost.activations import DeviceShare
from jaxlm.models.families.llama import Llama
from jaxlm.ops import masks
from jaxlm.ops.cudnn import cudnn
from jaxlm.ops.splash import splash

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 256, 4, 2, 16
SHARE = DeviceShare(
    rows=ROWS, length=LENGTH, keys=LENGTH, sizes={}, stream_bytes=2, compute_bytes=2
)
CONFIG = Llama(vocab=64, width=HEADS * SIZE, depth=1, heads=HEADS, kv_heads=KV_HEADS).build()


def with_kernel(kernel):
    (block,) = CONFIG.pattern
    attention = dataclasses.replace(block.attention, kernel=kernel)
    return dataclasses.replace(CONFIG, pattern=(dataclasses.replace(block, attention=attention),))


def kept(kernel, policy="none"):
    config = with_kernel(kernel)
    return activations.saved_bytes(config, config.pattern[0], SHARE, policy)


def test_splash_keeps_its_operands_its_result_and_a_number_for_each_query_and_head():
    """And its result once more, in the layout of the product that follows."""
    shapes = [
        jax.ShapeDtypeStruct((ROWS, LENGTH, heads, SIZE), jnp.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    run = functools.partial(splash, compute=jnp.bfloat16, scale=0.5, interpret=True)

    def backward(query, key, value):
        return jax.vjp(lambda *x: run(*x, masks.causal(LENGTH)), query, key, value)[1]

    leaves = jax.tree.leaves(jax.eval_shape(backward, *shapes))
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim > 2)
    numbers = ROWS * LENGTH * SIZE * (HEADS + 2 * KV_HEADS + HEADS)
    small = 2048  # which blocks are seen
    assert 0 <= actual - (2 * numbers + 4 * ROWS * LENGTH * HEADS) < small
    operands = 2 * ROWS * LENGTH * HEADS * SIZE
    assert kept("splash") - kept("blockwise") == operands
    assert kept("reference") - kept("blockwise") > operands
    assert kept("cudnn") == kept("blockwise")
    assert kept("splash", "full") == kept("blockwise", "full")


@pytest.mark.parametrize("is_packed", [False, True])
def test_cudnn_is_given_a_mask_of_the_size_that_is_planned(is_packed):
    query = jnp.ones((ROWS, LENGTH, HEADS, SIZE), jnp.bfloat16)
    mask = masks.causal(LENGTH, np.ones((ROWS, LENGTH), np.int32) if is_packed else None)
    program = jax.make_jaxpr(
        lambda q: cudnn(q, q, q, mask, jnp.bfloat16, scale=1.0, implementation="xla")
    )(query)
    assert (f"bool[{ROWS},1,{LENGTH},{LENGTH}]" in str(program)) == is_packed
    # In the compute dtype, and its gradient.
    assert activations.attention_workspace(with_kernel("cudnn"), SHARE) == 2 * 2 * ROWS * LENGTH**2


def test_splash_writes_a_normalizer_once_for_every_lane():
    shape = jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS, SIZE), jnp.bfloat16)
    run = functools.partial(splash, compute=jnp.bfloat16, scale=0.5, interpret=True)
    program = jax.make_jaxpr(
        jax.grad(lambda x: run(x, x, x, masks.causal(LENGTH)).astype(jnp.float32).sum())
    )(shape)
    assert f"f32[{ROWS},{HEADS},{LENGTH},128]" in str(program)
    assert (
        activations.attention_workspace(with_kernel("splash"), SHARE)
        == 4 * ROWS * HEADS * LENGTH * 128
    )
    assert activations.attention_workspace(with_kernel("reference"), SHARE) == 0
