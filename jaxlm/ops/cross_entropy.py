"""Negative log-likelihood of tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def token_nll(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """(-log softmax(logits)[target], log sum exp(logits)), both float32.

    The target's score is picked by comparing with an iota, forward and backward, so a vocabulary that is split over
    devices is never gathered and the backward pass has no scatter.
    """
    return _forward(logits, targets)[0]


def _forward(logits: Array, targets: Array) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    score = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    return (log_z - score, log_z), (logits, targets, log_z)


def _backward(kept: tuple[Array, Array, Array], grads: tuple[Array, Array]) -> tuple[Array, None]:
    logits, targets, log_z = kept
    nll_grad, log_z_grad = grads
    probability = jnp.exp(logits - log_z[..., None])
    chosen = jnp.where(_is_target(logits, targets), nll_grad[..., None], 0.0)
    return probability * (nll_grad + log_z_grad)[..., None] - chosen, None


token_nll.defvjp(_forward, _backward)


def _is_target(logits: Array, targets: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def chunked(
    function: Callable[..., Array], length: int, chunk: int | None, *rows: Float[Array, "B T ..."]
) -> Float[Array, "B T ..."]:
    """`function(*rows)` over pieces of at most `chunk` positions of each row, its results computed again in the backward pass.

    With the unembedding inside `function`, no more than `chunk` of the T logits of a row exist at a time. A length
    that `chunk` does not divide is cut into the next smaller equal pieces.
    """
    size = length if chunk is None else next(n for n in range(min(chunk, length), 0, -1) if length % n == 0)
    if size == length:
        return function(*rows)

    def pieces(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0], length // size, size, *x.shape[2:]), 0, 1)

    out = jax.lax.map(lambda parts: jax.checkpoint(function)(*parts), tuple(pieces(x) for x in rows))
    return jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1).reshape(y.shape[1], length, *y.shape[3:]), out)
