"""Losses of a policy gradient and of a value at each token, and estimates of a KL divergence.

`ratio` is p / p_old: the probability of the sampled token under the model over that under the
distribution it was drawn from.

Example:
    >>> loss = clipped(jnp.array([1.0, 1.5]), jnp.array([2.0, 2.0]), low=0.2, high=0.2)
    >>> [round(float(each), 2) for each in loss]
    [-2.0, -2.4]
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def clipped(
    ratio: Float[Array, "*N"], advantage: Float[Array, "*N"], *, low: float, high: float
) -> Float[Array, "*N"]:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; Yu et al. 2025, arXiv:2503.14476,
    equation 10 (two limits).
    """
    limited = jnp.clip(ratio, 1 - low, 1 + high)
    return -jnp.minimum(ratio * advantage, limited * advantage)


def is_clipped(
    ratio: Float[Array, "*N"], advantage: Float[Array, "*N"], *, low: float, high: float
) -> Bool[Array, "*N"]:
    """Return the tokens whose loss `clipped` has no gradient."""
    return jnp.where(advantage > 0, ratio > 1 + high, (advantage < 0) & (ratio < 1 - low))


def weighted(
    log_p: Float[Array, "*N"],
    ratio: Float[Array, "*N"],
    advantage: Float[Array, "*N"],
    *,
    high: float,
) -> Float[Array, "*N"]:
    """Return -min(r, 1 + high) A log p, in which the ratio has no gradient.

    Source: MiniMax 2025, arXiv:2506.13585, equation 4 (CISPO).
    """
    return -jax.lax.stop_gradient(jnp.minimum(ratio, 1 + high)) * advantage * log_p


def value_error(
    value: Float[Array, "*N"],
    old: Float[Array, "*N"],
    returns: Float[Array, "*N"],
    *,
    clip: float | None,
) -> Float[Array, "*N"]:
    """Return half the larger of (V - R)^2 and (V' - R)^2, V' within `clip` of the old value.

    Source: Schulman et al. 2016 as in openai/baselines, ppo2/model.py.
    """
    error = jnp.square(value - returns)
    if clip is not None:
        limited = jnp.clip(value, old - clip, old + clip)
        error = jnp.maximum(error, jnp.square(limited - returns))
    return 0.5 * error


def sequence_log_ratio(
    log_ratio: Float[Array, "B T"], is_drawn: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the mean log-ratio of the drawn tokens of each row, at each of its slots.

    Source: Zheng et al. 2025, arXiv:2507.18071, equation 7 (GSPO).
    """
    count = jnp.maximum(is_drawn.sum(1, keepdims=True), 1)
    mean = jnp.where(is_drawn, log_ratio, 0.0).sum(1, keepdims=True) / count
    return jnp.broadcast_to(mean, log_ratio.shape)


def k3(log_p: Float[Array, "*N"], reference: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Return q / p - 1 - log(q / p), whose mean over samples of p is KL(p, q); never negative.

    `log_p` are log-probabilities of samples under p, and `reference` those under q.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    difference = reference - log_p
    return jnp.expm1(difference) - difference


def k1_to_go(
    log_p: Float[Array, "B T"], reference: Float[Array, "B T"], is_drawn: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the sum of log p - log q over the drawn tokens of a row from each slot on.

    Subtracted from the advantages, beta times this makes the gradient that of beta KL(p, q) of
    whole answers, in expectation over samples of p.
    """
    k1 = jnp.where(is_drawn, log_p - reference, 0.0)
    return jnp.cumsum(k1[:, ::-1], axis=1)[:, ::-1]
