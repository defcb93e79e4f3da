"""Attention over a KV cache in blocks: an online softmax over as many blocks as have tokens."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.core.precision import Precision
from jaxlm.ops.flash import by_head, by_token, query_product
from jaxlm.ops.masks import HIDDEN, Mask

# Keys [B, S, K, H], values [B, S, K, U] and indices [1, S] of a block, by its number.
ReadBlock = Callable[[int], tuple[Array, Array, Array]]
State = tuple[Array, Array, Array]  # weighted sum of values, peak of the scores, sum of weights


def blocked_attention(
    query: Float[Array, "B T N H"],
    read: ReadBlock,
    starts: Sequence[int],
    reach: Int[Array, ""],
    mask: Mask,
    precision: Precision,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N U"]:
    """Return what `ops.attention` does, of the keys of all blocks that start below `reach`.

    The bits of a row do not depend on `reach`, if it is beyond the row's own keys: a block whose
    keys are all hidden leaves the peak, multiplies the sums by exp(0) and adds zeros. Each block
    has products of a static shape, since XLA selects its kernel by the size of a product.

    Args:
      query: queries.
      read: reads a block; values of hidden keys must be finite.
      starts: index of the first key of each block, from 0 on.
      reach: first index that no query of interest sees.
      mask: visibility; each block sets the indices of the keys. Key 0 is visible to all queries.
      precision: the operands of both products are in its `compute`.
      scale: of the scores.
      softcap: softcap: scores become softcap tanh(scores / softcap).
    """
    low = precision.compute

    def attend(number: int, state: State | None) -> State:
        key, value, index = read(number)
        q_bkgth = by_head((query * scale).astype(low), key)
        k_bksh, v_bksu = (jnp.swapaxes(x, 1, 2).astype(low) for x in (key, value))
        scores_bkgts = query_product("bkgth,bksh->bkgts", q_bkgth, k_bksh)
        if softcap is not None:
            scores_bkgts = softcap * jnp.tanh(scores_bkgts / softcap)
        visible = dataclasses.replace(mask, key_index=index).materialize()[:, None, None]
        scores_bkgts = jnp.where(visible, scores_bkgts, HIDDEN)
        peak_bkgt = scores_bkgts.max(-1)
        if state is not None:
            peak_bkgt = jnp.maximum(state[1], peak_bkgt)
        weights_bkgts = jnp.exp(scores_bkgts - peak_bkgt[..., None])
        out = query_product("bkgts,bksu->bkgtu", weights_bkgts.astype(low), v_bksu)
        total = weights_bkgts.sum(-1)
        if state is not None:
            decay = jnp.exp(state[1] - peak_bkgt)
            out, total = state[0] * decay[..., None] + out, state[2] * decay + total
        return out, peak_bkgt, total

    state = attend(0, None)
    for number, start in enumerate(starts[1:], 1):
        state = jax.lax.cond(
            start < reach, functools.partial(attend, number), lambda before: before, state
        )
    out, _, total = state
    return by_token(out / total[..., None], query)
