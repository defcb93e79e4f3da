"""Advantages of sampled answers: rewards less a baseline, or less values that a model predicts.

Example:
    >>> rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    >>> advantages(rewards, baseline="group", scale="none").tolist()[0]
    [0.5, -0.5, -0.5, 0.5]
    >>> is_dead(rewards).tolist()
    [False, True]
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

Baseline = Literal["none", "batch", "group", "leave_one_out"]
Scale = Literal["none", "batch", "group"]
EPSILON = 1e-4  # added to a deviation, as TRL does


def advantages(
    rewards: Float[np.ndarray, "P S"], *, baseline: Baseline, scale: Scale
) -> Float[np.ndarray, "P S"]:
    """Return the advantage of each of S answers to each of P prompts; 0 for a reward of NaN.

    A reward of NaN is of an answer that could not be scored, and is in no mean.

        group           A = R - mean over the prompt's answers
        leave_one_out   A = R - mean over the prompt's other answers = S / (S - 1) (R - mean)
        batch           A = R - mean over all answers
        none            A = R

    A scale divides by the standard deviation (with n - 1) of the same rewards, plus `EPSILON`.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (group, with its scale); Ahmadian et
    al. 2024, arXiv:2402.14740, equation 9 (leave one out); Liu et al. 2025, arXiv:2503.20783,
    section 3.2 (no scale).
    """
    is_scored = ~np.isnan(rewards)
    values = np.where(is_scored, rewards, 0.0).astype(np.float64)
    group_count, group_mean = _mean(values, is_scored, axis=1)
    batch_count, batch_mean = _mean(values, is_scored, axis=None)
    out = values
    match baseline:
        case "group":
            out = values - group_mean
        case "leave_one_out":
            out = group_count / np.maximum(group_count - 1, 1) * (values - group_mean)
        case "batch":
            out = values - batch_mean
    match scale:
        case "group":
            out = out / (_deviation(values - group_mean, is_scored, group_count, 1) + EPSILON)
        case "batch":
            out = out / (_deviation(values - batch_mean, is_scored, batch_count, None) + EPSILON)
    return np.where(is_scored, out, 0.0)


def is_dead(rewards: Float[np.ndarray, "P S"]) -> Bool[np.ndarray, "P"]:
    """Return the prompts whose scored answers have equal rewards; a single one has them too.

    Such a group has no gradient with a baseline of its own.
    """
    is_scored = ~np.isnan(rewards)
    high = np.where(is_scored, rewards, -np.inf).max(1)
    low = np.where(is_scored, rewards, np.inf).min(1)
    return high <= low


def gae(
    rewards: Float[np.ndarray, "B T"],
    values: Float[np.ndarray, "B T"],
    is_drawn: Bool[np.ndarray, "B T"],
    *,
    gamma: float,
    lam: float,
) -> Float[np.ndarray, "B T"]:
    """Return the generalized advantage estimate of each drawn token, float64; 0 elsewhere.

        d_t = r_t + gamma V_{t+1} - V_t
        A_t = d_t + gamma lam A_{t+1}

    t + 1 is the next drawn token of the row; tokens that are not drawn between two are skipped.
    V and A after the last one are 0: an answer ends there, also if a limit of tokens cut it.
    With lam = 1 this is the discounted return less the value, and with lam = 0 it is d_t.

    Args:
      rewards: of each token, given after it was drawn.
      values: prediction of the rewards from each token on, before it is drawn.
      is_drawn: the tokens of the answer.
      gamma: discount by token.
      lam: weight of later errors.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.
    """
    out = np.zeros(rewards.shape, np.float64)
    following, advantage = np.zeros((2, len(rewards)))
    for slot in reversed(range(rewards.shape[1])):
        here, value = is_drawn[:, slot], values[:, slot].astype(np.float64)
        error = rewards[:, slot] + gamma * following - value
        advantage = np.where(here, error + gamma * lam * advantage, advantage)
        following = np.where(here, value, following)
        out[:, slot] = np.where(here, advantage, 0.0)
    return out


def whitened(
    advantages: Float[np.ndarray, "B T"], is_drawn: Bool[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T"]:
    """Return the advantages with mean 0 and deviation 1 over the drawn tokens; 0 elsewhere."""
    known = advantages[is_drawn]
    if not known.size:
        return advantages
    deviation = known.std(ddof=1) if known.size > 1 else 0.0
    return np.where(is_drawn, (advantages - known.mean()) / (deviation + EPSILON), 0.0)


def _mean(
    values: np.ndarray, is_scored: np.ndarray, axis: int | None
) -> tuple[np.ndarray, np.ndarray]:
    count = np.maximum(is_scored.sum(axis, keepdims=True), 1)
    return count, values.sum(axis, keepdims=True) / count


def _deviation(
    centered: np.ndarray, is_scored: np.ndarray, count: np.ndarray, axis: int | None
) -> np.ndarray:
    squares = np.where(is_scored, centered**2, 0.0).sum(axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))
