"""Attention of whole rows by cuDNN's flash kernel, on NVIDIA GPUs."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.ops.kernels import rows_at_a_time
from jaxlm.ops.masks import Mask
from jaxlm.parallel import context

Slots = tuple[Array | None, ...]  # `query_segments`, `visible_until`, `prefix_segments` of a `Mask`


def cudnn(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
    """Return softmax(scale x Q K^T + mask) V; scores and softmax are float32.

    Causality and a window are the kernel's own. Segments and `visible_until` become a mask that
    is added to the scores of every head, T^2 numbers a row in the dtype of `compute`: JAX's
    function has no other argument. If the mask of all rows exceeds `kernels.MASK_BYTES`, the
    kernel runs for a few rows at a time, and the backward pass computes each mask again. On the
    ambient mesh each device computes its own rows and heads.

    Args: as in `ops.attention.attention`; `compute` is float16 or bfloat16, and `implementation`
      selects another of `jax.nn.dot_product_attention`, the source of this kernel.

    Raises ValueError if the mask is not one of whole rows or has leading keys; NotImplementedError
    from JAX, if cuDNN has no kernel for these operands.
    """
    if not mask.is_whole:
        raise ValueError("cudnn attention needs a mask of whole rows")
    if mask.leading:
        raise ValueError("cudnn attention has no leading keys")
    run = functools.partial(_local_rows, mask=mask, scale=scale, implementation=implementation)
    low = (x.astype(compute) for x in (query, key, value))
    slots = (mask.query_segments, mask.visible_until, mask.prefix_segments)
    return context.of_rows(run)(*low, slots).astype(query.dtype)


def _local_rows(query: Array, key: Array, value: Array, slots: Slots, **options: Any) -> Array:
    """Attend in the rows and heads of a device, a few rows at a time if their mask is large."""
    rows, length = query.shape[:2]
    group = rows_at_a_time(rows, length, query.dtype.itemsize)
    attend: Callable[..., Array] = functools.partial(_attend, **options)
    if group == rows or all(each is None for each in slots):
        return attend(query, key, value, slots)

    def is_saved(_: Any, *operands: Any, **params: Any) -> bool:
        # The results of the kernel, which reads queries; not the masks of all groups.
        return any(operand.shape == (group, *query.shape[1:]) for operand in operands)

    recomputed = jax.checkpoint(attend, policy=is_saved, prevent_cse=False)
    groups = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), (query, key, value, slots))
    out: Array = jax.lax.map(lambda each: recomputed(*each), groups)
    return out.reshape(query.shape)


def _attend(
    query: Array, key: Array, value: Array, slots: Slots, *, mask: Mask, **options: Any
) -> Array:
    index = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    local = Mask(
        query_index=index,
        key_index=index,
        query_segments=slots[0],
        key_segments=slots[0],
        visible_until=slots[1],
        prefix_segments=slots[2],
        causal=mask.causal,
        window=mask.window,
    )
    return jax.nn.dot_product_attention(query, key, value, **_visibility(local), **options)


def _visibility(mask: Mask) -> dict[str, Any]:
    """Return the kernel's arguments for a mask.

    If there is an array, it includes the window: cuDNN before 9.10.2 has no kernel for both.
    """
    is_windowed, length = mask.window is not None, mask.query_index.shape[1]
    if mask.visible_until is not None:
        return {"is_causal": False, "mask": mask.materialize()[:, None]}
    if mask.query_segments is None and (mask.causal or not is_windowed):
        # Keys before a query, without the query's own.
        local = (min(mask.window, length) - 1, 0) if mask.window is not None else None
        return {"is_causal": mask.causal, "local_window_size": local}
    return {"is_causal": mask.causal, "mask": mask.materialize()[:, None]}
