"""Dot-product attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.core.precision import Precision
from jaxlm.ops.masks import Mask

HIDDEN = -1e30  # finite, so that a query that sees nothing gets an average and not NaN


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Mask,
    precision: Precision,
    *,
    scale: float,
    cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(scale x Q K^T) + mask) V, each key head serving N / K query heads.

    Scores and softmax are float32; both products take operands in `precision.compute`. Builds the [B, N, T, S] scores:
    4 B N T S bytes, and 4 B T S N H FLOPs.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; grouped heads arXiv:2305.13245; cap
    arXiv:2408.00118, section 2.
    """
    batch, length, heads, size = query.shape
    kv_heads = key.shape[2]
    q_btkgh = (
        (query * scale)
        .astype(precision.compute)
        .reshape(batch, length, kv_heads, heads // kv_heads, size)
    )
    scores_bkgts = jnp.einsum(
        "btkgh,bskh->bkgts",
        q_btkgh,
        key.astype(precision.compute),
        preferred_element_type=jnp.float32,
    )
    if cap is not None:
        scores_bkgts = cap * jnp.tanh(scores_bkgts / cap)
    seen = mask.materialise()[:, None, None]
    weights_bkgts = jax.nn.softmax(jnp.where(seen, scores_bkgts, HIDDEN), axis=-1)
    if dropout and dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout, weights_bkgts.shape)
        weights_bkgts = jnp.where(kept, weights_bkgts / (1.0 - dropout), 0.0)
    out_btkgh = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights_bkgts.astype(precision.compute),
        value.astype(precision.compute),
        preferred_element_type=jnp.float32,
    )
    return out_btkgh.reshape(batch, length, heads, size).astype(query.dtype)
