"""Attention of whole rows by JAX's splash kernel, on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
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
    softcap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Return softmax(softcap(scale x Q K^T) + mask) V, in blocks that stay in a core's own memory.

    The kernel computes causality and windows, skips the blocks that they hide, and compares
    segments. Scores and softmax are float32. On the ambient mesh each device computes its own rows
    and heads: the compiler cannot split a kernel.

    Args: as in `ops.attention.attention`; `interpret` runs on any platform, slowly.

    Raises ValueError if the mask is not one of whole rows, or has `visible_until` or leading keys,
    or the row length is not a multiple of 128.

    Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
    """
    if not mask.is_whole:
        raise ValueError("splash attention needs a mask of whole rows")
    if mask.visible_until is not None:
        raise ValueError("splash attention has no bidirectional segments")
    if mask.prefix_segments is not None:
        raise ValueError("splash attention has no prefix segments")
    if mask.leading:
        raise ValueError("splash attention has no leading keys")
    if query.shape[1] % LANES:
        raise ValueError(f"splash attention of {query.shape[1]} tokens, no multiple of {LANES}")
    options: dict[str, Any] = {"attn_logits_soft_cap": softcap, "interpret": interpret}
    run = functools.partial(_local_rows, mask=mask, **options)
    low = ((query * scale).astype(compute), key.astype(compute), value.astype(compute))
    out = context.of_rows(run)(*low, mask.query_segments)
    return out.astype(query.dtype)


def _local_rows(
    query: Array, key: Array, value: Array, segments: Array | None, *, mask: Mask, **options: Any
) -> Array:
    """Attend in the rows and heads of a device."""
    _, length, heads, _ = query.shape
    block = next(size for size in BLOCKS if length % size == 0)
    shape = (length, length)
    visible: masks.Mask = masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
    if mask.window is not None:
        visible = masks.LocalMask(shape, (mask.window - 1, 0 if mask.causal else None), 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(names, block)
    kernel = splash_attention.make_splash_mha(
        masks.MultiHeadMask([visible] * heads),
        block_sizes=splash_attention.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        **options,
    )
    ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
    by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(jax.vmap(kernel)(*by_head, ids), 1, 2)
