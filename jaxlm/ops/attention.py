"""Dot-product attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.ops.blocks import by_head, by_token
from jaxlm.ops.blockwise import blockwise
from jaxlm.ops.cudnn import cudnn
from jaxlm.ops.kernels import PLATFORMS, Kernel
from jaxlm.ops.layouts import turned
from jaxlm.ops.masks import HIDDEN, Mask
from jaxlm.ops.ring import ring_attention
from jaxlm.parallel import context
from jaxlm.parallel.rules import constrain


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask,
    precision: Precision,
    *,
    scale: float,
    cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    kernel: Kernel = "reference",
) -> Float[Array, "B T N U"]:
    """softmax(cap(scale x Q K^T) + bias + mask) V, each key head serving N / K query heads.

    Scores and softmax are float32; both products take operands in `precision.compute`. By `kernel`:

    - reference builds the [B, N, T, S] scores: 4 B N T S bytes, and 2 B T S N (H + U) FLOPs.
    - blockwise meets one block of keys after another, see `blockwise.blockwise`; for whole rows only.
    - ring lets keys go round the devices among which the ambient mesh splits rows, see `ring.ring`. The others gather
      keys before.
    - splash and cudnn are kernels of TPUs and of NVIDIA GPUs, see `splash.splash` and `cudnn.cudnn`; for whole rows only.
      They take vectors of one size: the shorter of H and U are filled up with zeros.

    Raises:
      ValueError: where the kernel cannot compute this; only the reference drops weights, or adds the mask's bias.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; grouped heads arXiv:2305.13245; cap
    arXiv:2408.00118, section 2.
    """
    is_split = (
        context.context_size() > 1 and query.shape[1] == key.shape[1]
    )  # a cache is whole everywhere
    if kernel != "reference" and dropout and dropout_key is not None:
        raise ValueError(f"attention dropout in {kernel}")
    if kernel != "reference" and mask.bias is not None:
        raise ValueError(f"a bias of scores in {kernel}")
    if kernel in PLATFORMS and is_split:
        raise ValueError(f"{kernel} attention of rows that are split")
    if backend.name() != PLATFORMS.get(kernel, backend.name()):
        raise ValueError(f"{kernel} attention on a {backend.name()}")
    if is_split and kernel == "ring":
        return ring_attention(query, key, value, mask, precision.compute, scale=scale, cap=cap)
    if is_split:
        key, value = (constrain(x, "batch", None, "kv_heads", "head_dim") for x in (key, value))
    elif kernel == "blockwise":
        return blockwise(query, key, value, mask, precision.compute, scale=scale, cap=cap)
    elif kernel in PLATFORMS:
        alike = _filled(query, key, value)
        if kernel == "splash":
            from jaxlm.ops.splash import (
                splash,  # Pallas is a tenth of a second of a start, for TPUs
            )

            out = splash(*alike, mask, precision.compute, scale=scale, cap=cap)
        elif cap is not None:
            raise ValueError("cudnn attention with a cap")
        else:
            out = cudnn(*alike, mask, precision.compute, scale=scale)
        return out[..., : value.shape[-1]]
    low = precision.compute
    q_bkgth = by_head((query * scale).astype(low), key)
    k_bksh, v_bksu = (jnp.swapaxes(x, 1, 2).astype(low) for x in (key, value))
    scores_bkgts = _product(q_bkgth, turned(k_bksh))
    if cap is not None:
        scores_bkgts = cap * jnp.tanh(scores_bkgts / cap)
    if mask.bias is not None:
        rows = mask.bias.shape[0]
        scores_bkgts = scores_bkgts + mask.bias.reshape(rows, *scores_bkgts.shape[1:])
    seen = mask.materialise()[:, None, None]
    weights_bkgts = _softmax(jnp.where(seen, scores_bkgts, HIDDEN))
    if dropout and dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout, weights_bkgts.shape)
        weights_bkgts = jnp.where(kept, weights_bkgts / (1.0 - dropout), 0.0)
    return by_token(_product(weights_bkgts.astype(low), v_bksu), query)


@jax.custom_vjp
def _product(x: Float[Array, "B K G T C"], y: Float[Array, "B K C S"]) -> Float[Array, "B K G T S"]:
    """x y in float32, whose gradients are products of operands in the same dtype: JAX would take the float32 cotangent for one."""
    return jnp.einsum("bkgtc,bkcs->bkgts", x, y, preferred_element_type=jnp.float32)


def _product_forward(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, y), (x, y)


def _product_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, y = kept
    low = grad.astype(x.dtype)
    if context.context_size() > 1:
        # One dimension of groups x queries would have to be gathered, and the scores with it.
        y_grad = jnp.einsum("bkgtc,bkgts->bkcs", x, low, preferred_element_type=jnp.float32)
    else:
        rows = x.reshape(*x.shape[:2], -1, x.shape[-1])  # of all queries of a key
        y_grad = jnp.einsum(
            "bkcr,bkrs->bkcs",
            turned(rows),
            low.reshape(*rows.shape[:3], -1),
            preferred_element_type=jnp.float32,
        )
    return _product(low, turned(y)).astype(x.dtype), y_grad.astype(y.dtype)


_product.defvjp(_product_forward, _product_backward)


def _filled(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """With zeros up to the longest: a score is what it was, and what comes of a value ends in zeros."""
    size = max(query.shape[-1], value.shape[-1])

    def filled(x: Array) -> Array:
        return jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),))

    return filled(query), filled(key), filled(value)


@jax.custom_vjp
def _softmax(x: Float[Array, "*N S"]) -> Float[Array, "*N S"]:
    """Of which the backward pass keeps the result alone: dx = y (g - sum y g). JAX would keep x and its exponentials too."""
    return jax.nn.softmax(x, axis=-1)


def _softmax_forward(x: Array) -> tuple[Array, Array]:
    y = _softmax(x)
    return y, y


def _softmax_backward(y: Array, grad: Array) -> tuple[Array]:
    weighed = y * grad
    return (weighed - y * weighed.sum(-1, keepdims=True),)


_softmax.defvjp(_softmax_forward, _softmax_backward)
