"""How sharp attention is, measured beside whatever kernel computes it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlm.core.divisors import divisors
from jaxlm.ops.masks import HIDDEN, Mask

BLOCK = 128  # most queries whose scores are held at a time


def attention_figures(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    cap: float | None = None,
    entropy: bool = True,
) -> tuple[Float[Array, "N"], Float[Array, "N"] | None, Float[Array, ""]]:
    """By head: the largest score scale q k (before a cap and a bias), and the sum of -sum_s w log w over queries; and their number.

    Queries that are padding do not count. 2 B T S N H FLOPs, and 4 B N S bytes for each query of a block. Kernels keep no
    scores, so they are made again; nothing is differentiated.
    """
    query, key = lax.stop_gradient((query, key))
    batch, length, heads, size = query.shape
    kv_heads = key.shape[2]
    block = max(n for n in divisors(length) if n <= BLOCK)
    counted = (
        jnp.ones((batch, length), bool) if mask.query_segments is None else mask.query_segments > 0
    )
    q = (query * scale).astype(compute)
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    bias = None if mask.bias is None else jnp.moveaxis(mask.bias, 2, 1)
    asking = (q, counted, mask.query_index, mask.query_segments, mask.query_reach, bias)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], length // block, block, *x.shape[2:]), 1, 0)

    def meet(carry: tuple[Array, Array], part: Any) -> tuple[tuple[Array, Array], None]:
        q, counted, index, segments, reach, bias_btns = part
        own = dataclasses.replace(
            mask, query_index=index, query_segments=segments, query_reach=reach
        )
        scores_bkgts = jnp.einsum(
            "btkgh,bskh->bkgts", q, key.astype(compute), preferred_element_type=jnp.float32
        )
        seen = own.materialise()[:, None, None]
        counts = counted[:, None, None, :]
        heard = jnp.where(seen & counts[..., None], scores_bkgts, -jnp.inf)
        peak, spread = carry[0], carry[1]
        peak = jnp.maximum(peak, heard.max((0, 3, 4)))
        if entropy:
            if cap is not None:
                scores_bkgts = cap * jnp.tanh(scores_bkgts / cap)
            if bias_btns is not None:
                rows = bias_btns.shape[0]
                bias = jnp.moveaxis(bias_btns, 1, 2)
                scores_bkgts = scores_bkgts + bias.reshape(rows, *scores_bkgts.shape[1:])
            weights = jax.nn.softmax(jnp.where(seen, scores_bkgts, HIDDEN), axis=-1)
            each = -jax.scipy.special.xlogy(weights, weights).sum(-1)
            spread = spread + jnp.where(counts, each, 0.0).sum((0, 3))
        return (peak, spread), None

    shape = (kv_heads, heads // kv_heads)
    begun = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    (peak, spread), _ = lax.scan(meet, begun, jax.tree.map(cut, asking))
    return (
        peak.reshape(heads),
        spread.reshape(heads) if entropy else None,
        counted.sum(dtype=jnp.float32),
    )
