"""Attention of whole rows by JAX's splash kernel, on TPUs."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jaxtyping import Array, Float

from jaxlm.ops.kernels import LANES
from jaxlm.ops.masks import Mask
from jaxlm.parallel import context

BLOCKS = (4 * LANES, 3 * LANES, 2 * LANES, LANES)  # the largest that divides a row is taken


def splash(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(scale x Q K^T) + mask) V, in blocks that stay in a core's own memory.

    Causality and windows are computed in the kernel, which leaves out the blocks that they hide; segments are compared
    there. Operands are in `compute`, scores and softmax in float32. On the ambient mesh each device computes its own rows
    and heads: the compiler cannot split a kernel. With `interpret`, it runs on any platform, slowly.

    Raises:
      ValueError: where the mask is not that of whole rows, or has a reach, or they are no multiple of 128.

    Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
    """
    if not mask.is_whole:
        raise ValueError("splash attention of other than whole rows")
    if mask.query_reach is not None:
        raise ValueError("splash attention of rows that are read both ways")
    if query.shape[1] % LANES:
        raise ValueError(f"splash attention of {query.shape[1]} tokens, no multiple of {LANES}")
    run = functools.partial(
        _own, causal=mask.causal, window=mask.window, cap=cap, interpret=interpret
    )
    low = ((query * scale).astype(compute), key.astype(compute), value.astype(compute))
    out = context.of_rows(run)(*low, mask.query_segments)
    return out.astype(query.dtype)


def _own(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    *,
    causal: bool,
    window: int | None,
    cap: float | None,
    interpret: bool,
) -> Array:
    """Of the rows and heads that a device has."""
    _, length, heads, _ = query.shape
    block = next(size for size in BLOCKS if length % size == 0)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([_seen(length, causal, window)] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )
    ids = None if segments is None else kernels.SegmentIds(segments, segments)
    by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    out = jax.vmap(kernel)(*by_head, ids)
    return jnp.swapaxes(out, 1, 2)


def _seen(length: int, causal: bool, window: int | None) -> masks.Mask:
    """As `Mask` has it, by slots: whole rows lie in their order."""
    shape = (length, length)
    if window is not None:
        return masks.LocalMask(shape, (window - 1, 0 if causal else None), 0)
    return masks.CausalMask(shape) if causal else masks.FullMask(shape)
