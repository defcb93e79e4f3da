"""Attention of whole rows, one block of keys after another: memory grows with the row, not with its square."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlm.ops.blocks import (
    S_AXIS,
    T_AXIS,
    Residuals,
    Slice,
    Softmax,
    StaticArgs,
    by_head,
    by_token,
    gradients,
    online_softmax_update,
    operands,
)
from jaxlm.ops.kernels import BLOCK
from jaxlm.ops.masks import Mask


def blockwise(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    cap: float | None = None,
    block: int = BLOCK,
) -> Float[Array, "B T N U"]:
    """softmax(cap(scale x Q K^T) + mask) V, `block` queries meeting `block` keys at a time.

    At most B N block^2 scores exist, forward and backward, which makes them again from the saved normalizers. Blocks that
    causality or a window hides are left out: half of the products of a causal row. Of queries with a reach, each block
    goes as far as the furthest of them in any row. A row that is no multiple of `block` is filled up with slots that nobody
    sees.

    Raises:
      ValueError: where the mask is not that of whole rows.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B.2; its order of loops as in Rabe and Staats
    2021, arXiv:2112.05682.
    """
    if not mask.is_whole:
        raise ValueError("blockwise attention of other than whole rows")
    terms = StaticArgs.of(mask, compute, scale=scale, cap=cap)
    length = query.shape[1]
    block = min(block, length)
    count = -(-length // block)
    slots = jnp.arange(count * block, dtype=jnp.int32)[None]

    segments = mask.query_segments
    if segments is None and not mask.causal:
        segments = jnp.zeros((1, length), jnp.int32)

    def filled(x: Array, fill: int = 0) -> Array:
        rest = ((0, 0),) * (x.ndim - 2)
        added = (0, count * block - length)
        return jnp.pad(x, ((0, 0), added, *rest), constant_values=fill)

    # No segment has this number, not even padding, which sees itself.
    held = slots, None if segments is None else filled(segments, -1)
    reach = None if mask.query_reach is None else filled(mask.query_reach)
    if reach is not None:
        reach = jnp.maximum(reach, slots)  # what fills up the row sees itself
    out = _blockwise(terms, block, *map(filled, (query, key, value)), (*held, reach))
    return out[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(
    terms: StaticArgs, block: int, query: Array, key: Array, value: Array, asking: Any
) -> Array:
    return _forward(terms, block, query, key, value, asking)[0]


def _forward(
    terms: StaticArgs, block: int, query: Array, key: Array, value: Array, asking: Any
) -> tuple[Array, Any]:
    queries, keys = operands(terms, query, key, value, asking, asking[:2])
    count = query.shape[1] // block

    def row(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        own = Slice(T_AXIS, i * block, block).of(queries)

        def meet(j: Array, seen: Softmax) -> Softmax:
            return online_softmax_update(terms, own, Slice(S_AXIS, j * block, block).of(keys), seen)

        bounds = _seen(terms, block, count, i, own.reach)
        seen = lax.fori_loop(*bounds, meet, Softmax.of_none(own, value.shape[-1]))
        return None, (seen.out / seen.total[..., None], seen.peak + jnp.log(seen.total))

    _, (out, log_normalizer) = lax.scan(row, None, jnp.arange(count))
    out, log_normalizer = by_token(_joined(out), query), _joined(log_normalizer)
    return out, (query, key, value, asking, out, log_normalizer)


def _backward(terms: StaticArgs, block: int, kept: Any, out_grad: Array) -> tuple[Any, ...]:
    query, key, value, asking, out, log_normalizer = kept
    queries, keys = operands(terms, query, key, value, asking, asking[:2])
    wide = by_head(out_grad.astype(jnp.float32), key)
    mean = (wide * by_head(out.astype(jnp.float32), key)).sum(-1)
    known = Residuals(wide.astype(terms.compute), log_normalizer, mean)
    count = query.shape[1] // block

    def row(grads: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        cut = Slice(T_AXIS, i * block, block)
        own, of_own = cut.of(queries), cut.of(known)

        def meet(j: Array, carry: tuple[Array, tuple[Array, Array]]) -> Any:
            q_grad, grads = carry
            at = Slice(S_AXIS, j * block, block)
            one, *two = gradients(terms, own, at.of(keys), of_own)
            added = jax.tree.map(jnp.add, at.of(grads), tuple(two))
            return q_grad + one, at.into(grads, added)

        begun = jnp.zeros(own.q.shape, jnp.float32), grads
        q_grad, grads = lax.fori_loop(*_seen(terms, block, count, i, own.reach), meet, begun)
        return grads, q_grad

    nothing = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    (k_grad, v_grad), q_grad = lax.scan(row, nothing, jnp.arange(count))
    return (
        by_token(_joined(q_grad) * terms.scale, query),
        k_grad.astype(key.dtype),
        v_grad.astype(value.dtype),
        None,
    )


_blockwise.defvjp(_forward, _backward)


def _seen(
    terms: StaticArgs, block: int, count: int, i: Array, reach: Array | None = None
) -> tuple[Array | int, Array | int]:
    """The first block of keys that the i-th block of queries may see, and the one after the last."""
    first: Array | int = 0
    if terms.window is not None:
        first = jnp.maximum(0, (i * block - terms.window + 1) // block)
    if reach is not None:
        return first, reach.max() // block + 1
    return first, i + 1 if terms.causal else count


def _joined(blocks: Array) -> Array:
    """[blocks, B, K, G, T, ...] as [B, K, G, blocks x T, ...]."""
    moved = jnp.moveaxis(blocks, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])
