"""Dot-product attention.

Example:
    >>> from jaxlm.core.precision_config import PrecisionConfig
    >>> from jaxlm.ops.masks import causal
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attention(x, x, x, causal(4), Precision.of(PrecisionConfig()), scale=1.0).shape
    (1, 4, 2, 8)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlm.core import backend
from jaxlm.core.nearest import divisors
from jaxlm.core.precision import Precision
from jaxlm.ops.cudnn import cudnn
from jaxlm.ops.flash import (
    blockwise,
    by_head,
    by_token,
    product,
    query_product,
    ring_attention,
)
from jaxlm.ops.kernels import PLATFORMS, Kernel
from jaxlm.ops.masks import HIDDEN, Mask
from jaxlm.ops.matmul import transposed
from jaxlm.parallel import context
from jaxlm.parallel.rules import constrain

FIGURES_BLOCK = 128  # most queries whose scores `attention_figures` holds at a time


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask,
    precision: Precision,
    *,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    kernel: Kernel = "reference",
) -> Float[Array, "B T N U"]:
    """Return softmax(softcap(scale x Q K^T) + bias + mask) V; a key head serves N / K query heads.

    Scores and softmax are float32.

    Args:
      mask: visibility of the keys, and the bias.
      precision: the operands of both products are in its `compute`.
      scale: of the scores.
      softcap: softcap: scores become softcap tanh(scores / softcap).
      dropout: rate for the attention weights.
      dropout_key: None disables dropout.
      kernel: reference builds the [B, N, T, S] scores: 4 B N T S bytes and 2 B T S N (H + U)
        FLOPs. blockwise and ring are flash attention, see `ops.flash`: over whole rows, and over
        devices among which the mesh splits rows (the other kernels gather keys first). splash and
        cudnn are kernels of TPUs and NVIDIA GPUs for whole rows; they need vectors of one size, so
        the shorter of H and U is padded with zeros.

    Raises ValueError if the kernel cannot compute this; only the reference has dropout and a bias.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; grouped heads arXiv:2305.13245;
    softcap arXiv:2408.00118, section 2.
    """
    # A cache is whole on every device.
    is_split = context.context_size() > 1 and query.shape[1] == key.shape[1]
    if kernel != "reference" and dropout and dropout_key is not None:
        raise ValueError(f"{kernel} has no attention dropout")
    if kernel != "reference" and mask.bias is not None:
        raise ValueError(f"{kernel} has no bias of scores")
    if mask.leading and context.context_size() > 1:
        raise ValueError("leading keys need whole rows, and context splits them")
    if kernel in PLATFORMS and is_split:
        raise ValueError(f"{kernel} attention needs whole rows, and context splits them")
    if backend.name() != PLATFORMS.get(kernel, backend.name()):
        raise ValueError(f"{kernel} attention does not run on a {backend.name()}")
    low = precision.compute
    if is_split and kernel == "ring":
        return ring_attention(query, key, value, mask, low, scale=scale, softcap=softcap)
    if is_split:
        key, value = (constrain(x, "batch", None, "kv_heads", "head_dim") for x in (key, value))
    elif kernel == "blockwise":
        return blockwise(query, key, value, mask, low, scale=scale, softcap=softcap)
    elif kernel in PLATFORMS:
        q, k, v = _pad_heads(query, key, value)
        if kernel == "splash":
            from jaxlm.ops.splash import splash  # importing Pallas takes a tenth of a second

            out = splash(q, k, v, mask, low, scale=scale, softcap=softcap)
        elif softcap is not None:
            raise ValueError("cudnn attention has no softcap")
        else:
            out = cudnn(q, k, v, mask, low, scale=scale)
        return out[..., : value.shape[-1]]
    q_bkgth = by_head((query * scale).astype(low), key)
    k_bksh, v_bksu = (jnp.swapaxes(x, 1, 2).astype(low) for x in (key, value))
    scores_bkgts = _product(q_bkgth, transposed(k_bksh))
    if softcap is not None:
        scores_bkgts = softcap * jnp.tanh(scores_bkgts / softcap)
    if mask.bias is not None:
        rows = mask.bias.shape[0]
        scores_bkgts = scores_bkgts + mask.bias.reshape(rows, *scores_bkgts.shape[1:])
    visible = mask.materialize()[:, None, None]
    weights_bkgts = _softmax(jnp.where(visible, scores_bkgts, HIDDEN))
    if dropout and dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout, weights_bkgts.shape)
        weights_bkgts = jnp.where(keep, weights_bkgts / (1.0 - dropout), 0.0)
    return by_token(_product(weights_bkgts.astype(low), v_bksu), query)


@jax.custom_vjp
def _product(x: Float[Array, "B K G T C"], y: Float[Array, "B K C S"]) -> Float[Array, "B K G T S"]:
    """Return x y in float32; gradients are products of operands in the same low dtype.

    JAX's own transpose would multiply the float32 cotangent.
    """
    return query_product("bkgtc,bkcs->bkgts", x, y)


def _product_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, y = residuals
    low = grad.astype(x.dtype)
    if context.context_size() > 1:
        # A merged dimension of groups x queries would have to be gathered, and scores with it.
        y_grad = product("bkgtc,bkgts->bkcs", x, low)
    else:
        rows = x.reshape(*x.shape[:2], -1, x.shape[-1])  # all queries of a key head
        grads = low.reshape(*rows.shape[:3], -1)
        y_grad = product("bkcr,bkrs->bkcs", transposed(rows), grads)
    return _product(low, transposed(y)).astype(x.dtype), y_grad.astype(y.dtype)


_product.defvjp(lambda *inputs: (_product(*inputs), inputs), _product_backward)


def _pad_heads(query: Array, key: Array, value: Array) -> list[Array]:
    """Pad heads with zeros to one size: scores stay the same, and outputs end in zeros."""
    size = max(query.shape[-1], value.shape[-1])
    return [jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),)) for x in (query, key, value)]


@jax.custom_vjp
def _softmax(x: Float[Array, "*N S"]) -> Float[Array, "*N S"]:
    """Return the softmax, storing only the result y: dx = y (g - sum y g).

    JAX would store x and its exponentials too.
    """
    return jax.nn.softmax(x, axis=-1)


def _softmax_backward(y: Array, grad: Array) -> tuple[Array]:
    weighted = y * grad
    return (weighted - y * weighted.sum(-1, keepdims=True),)


_softmax.defvjp(lambda x: (_softmax(x),) * 2, _softmax_backward)


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B N T S"]:
    """Return the weight of every key for each query and head, as `attention` computes it.

    4 B N T S bytes, without gradients: to look at, not to train.

    Args: as in `attention`.
    """
    query, key = lax.stop_gradient((query, key))
    batch, length, heads, _ = query.shape
    scores = _scores(_grouped(query * scale, key), key, compute)
    weights = _weights(scores, mask.materialize()[:, None, None], mask.bias, softcap)
    return weights.reshape(batch, heads, length, key.shape[1])


def _grouped(query: Float[Array, "B T N H"], key: Array) -> Float[Array, "B T K G H"]:
    """Return queries with an axis for the heads that share a key."""
    *leading, heads, size = query.shape
    return query.reshape(*leading, key.shape[2], heads // key.shape[2], size)


def _scores(
    query: Float[Array, "B T K G H"], key: Float[Array, "B S K H"], compute: jnp.dtype
) -> Float[Array, "B K G T S"]:
    return product("btkgh,bskh->bkgts", query.astype(compute), key.astype(compute))


def _weights(
    scores: Float[Array, "B K G T S"],
    visible: Array,
    bias: Float[Array, "b N T S"] | None,
    softcap: float | None,
) -> Float[Array, "B K G T S"]:
    """Return the softmax of scaled scores over visible keys."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
    return jax.nn.softmax(jnp.where(visible, scores, HIDDEN), axis=-1)


def attention_figures(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    softcap: float | None = None,
    entropy: bool = True,
) -> tuple[Float[Array, "N"], Float[Array, "N"] | None, Float[Array, ""]]:
    """Measure how sharp attention is: largest score and entropy of each head, number of queries.

    The score is scale q k, before softcap and bias; the entropy -sum_s w log w is summed over
    queries. Padding is not counted. 2 B T S N H FLOPs, and 4 B N S bytes for each query of a
    block: kernels store no scores, so they are computed again, without gradients.

    Args: as in `attention`; `entropy` false leaves the entropy out.
    """
    query, key = lax.stop_gradient((query, key))
    batch, length, heads, _ = query.shape
    block = max(n for n in divisors(length) if n <= FIGURES_BLOCK)
    segments = mask.query_segments
    counted = jnp.ones((batch, length), bool) if segments is None else segments > 0
    q = _grouped(query * scale, key)
    bias = None if mask.bias is None else jnp.moveaxis(mask.bias, 2, 1)
    slots = (mask.query_index, segments, mask.visible_until, mask.prefix_segments)
    by_query = (q, counted, slots, bias)

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], length // block, block, *x.shape[2:]), 1, 0)

    def update(carry: tuple[Array, Array], part: Any) -> tuple[tuple[Array, Array], None]:
        q, counted, (index, segments, until, prefix), bias_btns = part
        block_mask = dataclasses.replace(
            mask,
            query_index=index,
            query_segments=segments,
            visible_until=until,
            prefix_segments=prefix,
        )
        scores_bkgts = _scores(q, key, compute)
        visible = block_mask.materialize()[:, None, None]
        is_query = counted[:, None, None, :]
        peak, spread = carry
        scored = jnp.where(visible & is_query[..., None], scores_bkgts, -jnp.inf)
        peak = jnp.maximum(peak, scored.max((0, 3, 4)))
        if entropy:
            bias = None if bias_btns is None else jnp.moveaxis(bias_btns, 1, 2)
            weights = _weights(scores_bkgts, visible, bias, softcap)
            each = -jax.scipy.special.xlogy(weights, weights).sum(-1)
            spread = spread + jnp.where(is_query, each, 0.0).sum((0, 3))
        return (peak, spread), None

    shape = q.shape[2:4]
    start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    (peak, spread), _ = lax.scan(update, start, jax.tree.map(blocks, by_query))
    entropies = spread.reshape(heads) if entropy else None
    return peak.reshape(heads), entropies, counted.sum(dtype=jnp.float32)
