"""Drawing the next token."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

EXCLUDED = -jnp.inf


def draw(
    logits: Float[Array, "B V"],
    keys: Array,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, "B"]:
    """One id a row, from softmax(logits / temperature) cut as `filtered` says; temperature 0 is the likeliest.

    Row b draws with keys[b], and so the same whatever rows are beside it.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The likeliest at zero: a temperature near zero then sends the others to minus infinity, and none to NaN.
    below = logits.astype(jnp.float32) - jnp.max(logits, axis=-1, keepdims=True)
    tempered = below / max(temperature, float(jnp.finfo(jnp.float32).tiny))
    cut = filtered(tempered, top_k=top_k, top_p=top_p, min_p=min_p)
    return jax.vmap(jax.random.categorical)(keys, cut).astype(jnp.int32)


def filtered(
    logits: Float[Array, "B V"],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Array, "B V"]:
    """Logits with the excluded ids at minus infinity.

    `top_k` keeps the k largest. `top_p` then keeps the smallest set of likeliest ids whose probabilities, renormalised,
    reach p (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, section 3.1). Both keep what equals the smallest
    that they keep. `min_p` keeps those whose probability is at least that share of the likeliest's (Nguyen et al. 2024,
    arXiv:2407.01082, section 3).
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, EXCLUDED, logits)
    if top_p is not None and top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ranked, axis=-1)
        before = (
            jnp.cumsum(probability, axis=-1) - probability
        )  # of the likelier ids; the likeliest always stays
        least = jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, EXCLUDED, logits)
    if min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits < least, EXCLUDED, logits)
    return logits
