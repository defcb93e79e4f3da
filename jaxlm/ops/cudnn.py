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
    """softmax(scale x Q K^T + mask) V; operands in `compute`, float16 or bfloat16, scores and softmax in float32.

    Causality and a window are the kernel's own. Segments, and a reach, are a mask that it adds to the scores of every
    head, T^2 numbers a row of the dtype of `compute`: JAX's function has no other argument for them. If the mask of all
    rows is larger than `kernels.MASK_BYTES`, the kernel is called for a few rows at a time, and each mask is made again
    for the backward pass instead of kept. On the ambient mesh each device computes its own rows and heads.
    `implementation` may name another of `jax.nn.dot_product_attention` for the same call.

    Raises:
      ValueError: where the mask is not that of whole rows.
      NotImplementedError: from JAX, where cuDNN has no kernel for these operands.

    Source: `jax.nn.dot_product_attention`.
    """
    if not mask.is_whole:
        raise ValueError("cudnn attention of other than whole rows")
    run = functools.partial(_own, mask=mask, scale=scale, implementation=implementation)
    low = (x.astype(compute) for x in (query, key, value))
    slots = {"segments": mask.query_segments, "reach": mask.query_reach}
    return context.of_rows(run)(*low, slots).astype(query.dtype)


def _own(
    query: Array,
    key: Array,
    value: Array,
    of_slots: dict[str, Array | None],
    **how: Any,
) -> Array:
    """Attend in the rows and heads that a device has, a few rows at a time if their mask is large."""
    rows, length = query.shape[:2]
    group = rows_at_a_time(rows, length, query.dtype.itemsize)
    attend: Callable[..., Array] = functools.partial(_of_group, **how)
    if group == rows or all(slots is None for slots in of_slots.values()):
        return attend(query, key, value, of_slots)

    def is_kept(_: Any, *operands: Any, **params: Any) -> bool:
        # The results of the kernel, which reads queries; not the mask, which would be kept for all groups.
        return any(operand.shape == (group, *query.shape[1:]) for operand in operands)

    attend = jax.checkpoint(attend, policy=is_kept, prevent_cse=False)
    groups = jax.tree.map(
        lambda x: x.reshape(-1, group, *x.shape[1:]), (query, key, value, of_slots)
    )
    out: Array = jax.lax.map(lambda each: attend(*each), groups)
    return out.reshape(query.shape)


def _of_group(
    query: Array,
    key: Array,
    value: Array,
    of_slots: dict[str, Array | None],
    *,
    mask: Mask,
    **how: Any,
) -> Array:
    slots = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    own = Mask(
        query_index=slots,
        key_index=slots,
        query_segments=of_slots["segments"],
        key_segments=of_slots["segments"],
        query_reach=of_slots["reach"],
        causal=mask.causal,
        window=mask.window,
    )
    return jax.nn.dot_product_attention(query, key, value, **_seen(own), **how)


def _seen(mask: Mask) -> dict[str, Any]:
    """The arguments that say what a query sees.

    A window goes into the mask where there is one: cuDNN before 9.10.2 has no kernel for both.
    """
    windowed, length = mask.window is not None, mask.query_index.shape[1]
    if mask.query_reach is not None:
        return {"is_causal": False, "mask": mask.materialise()[:, None]}
    if mask.query_segments is None and (mask.causal or not windowed):
        # To the left of a query, and itself.
        local = (min(mask.window, length) - 1, 0) if mask.window is not None else None
        return {"is_causal": mask.causal, "local_window_size": local}
    return {"is_causal": mask.causal, "mask": mask.materialise()[:, None]}
