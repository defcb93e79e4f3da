"""Losses of preferences: functions of the log-probabilities of answers, or of their rewards.

`gap` is the log-ratio of the chosen answer minus that of the rejected one; a log-ratio is the
log-probability of an answer under the model minus that under the reference.

Example:
    >>> round(float(dpo(jnp.array(0.0), beta=0.1)), 4)  # log 2, if the model is the reference
    0.6931
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Noise = Literal["conservative", "robust"]


def dpo(
    gap: Float[Array, "*N"],
    *,
    beta: float,
    smoothing: float = 0.0,
    noise: Noise = "conservative",
) -> Float[Array, "*N"]:
    """Return -log sig(beta gap), with e = `smoothing` the share of labels that are wrong.

    `conservative` returns -(1 - e) log sig(beta gap) - e log sig(-beta gap). `robust` returns
    (-(1 - e) log sig(beta gap) + e log sig(-beta gap)) / (1 - 2 e), whose mean over flipped labels
    is the loss of the true ones.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; Chowdhury et al. 2024,
    arXiv:2403.00409, section 3 (both forms of smoothing).
    """
    right, wrong = -jax.nn.log_sigmoid(beta * gap), -jax.nn.log_sigmoid(-beta * gap)
    if noise == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def ipo(gap: Float[Array, "*N"], *, beta: float) -> Float[Array, "*N"]:
    """Return (gap - 1 / (2 beta))^2.

    The paper writes tau for beta, and log-probabilities of whole answers. Its authors confirmed to
    TRL that they averaged over the tokens of an answer, which is the gap to give here.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17.
    """
    return jnp.square(gap - 1 / (2 * beta))


def hinge(gap: Float[Array, "*N"], *, beta: float) -> Float[Array, "*N"]:
    """Return max(0, 1 - beta gap).

    Source: Zhao et al. 2023, arXiv:2305.10425, equation 9 (SLiC-HF), with log-ratios to a reference
    as in Liu et al. 2023, arXiv:2309.06657, equation 11.
    """
    return jax.nn.relu(1 - beta * gap)


def kto(
    ratio: Float[Array, "*N"],
    is_desirable: Bool[Array, "*N"],
    *,
    beta: float,
    anchor: Float[Array, ""] | float = 0.0,
) -> Float[Array, "*N"]:
    """Return 1 - sig(beta (ratio - z)) of desirable answers, 1 - sig(beta (z - ratio)) of others.

    `ratio` is the log-ratio of each answer, and z = `anchor` the divergence from the reference,
    which has no gradient.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8, with both weights 1.
    """
    value = beta * (ratio - jax.lax.stop_gradient(jnp.asarray(anchor, ratio.dtype)))
    return jax.nn.sigmoid(jnp.where(is_desirable, -value, value))


def orpo(
    chosen: Float[Array, "*N"], rejected: Float[Array, "*N"], *, beta: float
) -> Float[Array, "*N"]:
    """Return -beta log sig(log odds of chosen - log odds of rejected), the odds-ratio term alone.

    `chosen` and `rejected` are mean log-probabilities of a token, and odds are p / (1 - p). The
    paper writes lambda for beta and adds the negative log-likelihood of the chosen answer.

    Source: Hong et al. 2024, arXiv:2403.07691, equations 6 and 7.
    """
    odds = chosen - rejected - (_log_complement(chosen) - _log_complement(rejected))
    return -beta * jax.nn.log_sigmoid(odds)


def simpo(gap: Float[Array, "*N"], *, beta: float, gamma: float) -> Float[Array, "*N"]:
    """Return -log sig(beta gap - gamma), with the gap of mean log-probabilities, not of ratios.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6. Its code and its tables name the margin
    by gamma / beta.
    """
    return -jax.nn.log_sigmoid(beta * gap - gamma)


def reward(
    chosen: Float[Array, "*N"],
    rejected: Float[Array, "*N"],
    *,
    margin: Float[Array, "*N"] | float = 0.0,
    center: float = 0.0,
) -> Float[Array, "*N"]:
    """Return -log sig(chosen - rejected - margin) + center (chosen + rejected)^2 of two rewards.

    The second term keeps rewards near zero, since the first has only their difference.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1 (Bradley-Terry); Touvron et al. 2023,
    arXiv:2307.09288, equation 2 (margin); Eisenstein et al. 2023, arXiv:2312.09244, section 2
    (center).
    """
    loss = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return loss + center * jnp.square(chosen + rejected) if center else loss


def process(score: Float[Array, "*N"], is_right: Bool[Array, "*N"]) -> Float[Array, "*N"]:
    """Return -log sig(score) of steps that are right, -log sig(-score) of the others.

    Source: Lightman et al. 2023, arXiv:2305.20050, section 2.6, without the neutral label.
    """
    return -jax.nn.log_sigmoid(jnp.where(is_right, score, -score))


def _log_complement(log_p: Array) -> Array:
    """Return log(1 - exp(log_p)), finite also for a probability that is 1 in float32."""
    log_p = jnp.minimum(log_p, -jnp.finfo(log_p.dtype).eps)
    return jnp.where(
        log_p > -0.6931472,
        jnp.log(-jnp.expm1(jnp.maximum(log_p, -0.6931472))),
        jnp.log1p(-jnp.exp(jnp.minimum(log_p, -0.6931472))),
    )
