"""Means of evaluated items with their intervals, and differences of two runs on the same items.

Items of one group, such as questions about one text, are not independent: standard errors add up
the residuals of a group before they are squared. Each item is a group unless groups are named.

Example:
  >>> right = estimate([1.0, 1.0, 0.0, 1.0])
  >>> right.mean, round(right.low, 2), round(right.high, 2)
  (0.75, 0.3, 0.95)
  >>> difference([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]).p_value
  0.25
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxlm.core import wilson

CONFIDENCE = 0.95
ROUNDING = 1e-9  # standard error over the mean of equal differences, by float64 alone
POWER = 0.8  # probability with which a smallest detectable difference is detected
Values = Sequence[float] | Float[np.ndarray, "n"]


class Estimate(NamedTuple):
    """A mean, its standard error and its 95% interval; None if there is a single group.

    The interval is also None if all values are equal, which have no spread, and are no shares.
    """

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of run B minus that of run A on the same items.

    Args:
      mean, standard_error, low, high: as of `Estimate`.
      p_value: of no difference; exact McNemar for ungrouped yes or no, else of the t-test, or of
        the signs of equal differences.
      smallest: difference that this number of items detects with a probability of 80%.
      items, groups: numbers of them.
      rises, falls: numbers of items whose value is higher in B, and lower.
    """

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None
    p_value: float | None
    smallest: float | None
    items: int
    groups: int
    rises: int
    falls: int


def estimate(
    values: Values,
    weights: Values | None = None,
    groups: Sequence[Any] | None = None,
    *,
    is_share: bool = False,
) -> Estimate:
    """Return the weighted mean of items, its clustered standard error and its 95% interval.

    The interval of values 0 and 1, and of other shares, is Wilson's, which stays inside [0, 1] and
    has a width even if all values are equal; with groups, weights or values between 0 and 1 its
    number of items is the effective one, p (1 - p) / se^2. Other values have the interval of
    Student's t with groups - 1 degrees of freedom, and none if all are equal.

    Args:
      values: those of the items.
      weights: those of the items; all equal without them.
      groups: the name of the group of each item.
      is_share: the values are from 0 to 1 by their definition, as the half of a tie or an F1.

    Raises ValueError without items or without weight.

    Source: Miller 2024, Adding Error Bars to Evals, arXiv:2411.00640, equation 4 (clusters); Korn
    and Graubard 1998, Confidence intervals for proportions with small expected numbers of positive
    counts estimated from survey data (effective number of items).
    """
    value_n, weight_n, index_n = _checked(values, weights, groups)
    mean, error = _clustered(value_n, weight_n, index_n)
    count = int(index_n.max()) + 1
    if error is None and len(value_n) > 1:
        return Estimate(mean, None, None, None)
    is_simple = count == len(value_n) and np.ptp(weight_n) == 0
    is_binary = bool(np.isin(value_n, (0.0, 1.0)).all())
    has_spread = error is not None and error > ROUNDING * abs(mean)
    if is_binary or (is_share and _are_shares(value_n)):
        share, size = min(max(mean, 0.0), 1.0), float(count)
        if error is not None and has_spread and not (is_simple and is_binary):
            size = share * (1 - share) / error**2
            size = min(size, len(value_n)) if is_binary else size
        is_normal = count < 2 or (is_simple and is_binary)
        score = wilson.SCORE if is_normal else _student(count - 1)
        return Estimate(mean, error, *wilson.interval(share, size, score))
    if error is None or not has_spread:
        return Estimate(mean, error, None, None)
    reach = _student(count - 1) * error
    return Estimate(mean, error, mean - reach, mean + reach)


def pass_at_k(passed: Int[np.ndarray, "n"], samples: int, k: int) -> float:
    """Return the mean probability that one of k samples of an item passes, without bias.

    `passed` is the number of the item's `samples` that passed.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    failing = [math.comb(samples - int(count), k) / math.comb(samples, k) for count in passed]
    return 1 - sum(failing) / len(failing)


def difference(
    first: Values,
    second: Values,
    weights: Values | None = None,
    groups: Sequence[Any] | None = None,
) -> Difference:
    """Return the difference of two runs, B minus A, on items of the same order.

    Ungrouped values 0 and 1 with equal weights have Agresti and Min's interval: half an item is
    added to each cell of the table of both runs. Other values have that of the paired t-test,
    clustered by group. Differences of the same size in all groups have no spread, and are tested by
    their signs: fewer than 6 groups have no interval.

    Raises ValueError without items or without weight.

    Source: McNemar 1947, exact by the binomial distribution; Agresti and Min 2005, Simple improved
    confidence intervals for comparing matched proportions.
    """
    first_n, second_n = np.asarray(first, np.float64), np.asarray(second, np.float64)
    value_n, weight_n, index_n = _checked(second_n - first_n, weights, groups)
    mean, error = _clustered(value_n, weight_n, index_n)
    count = int(index_n.max()) + 1
    rises, falls = int((value_n > 0).sum()), int((value_n < 0).sum())
    low = high = p_value = smallest = None
    powered = float(_special().ndtri(0.5 + CONFIDENCE / 2) + _special().ndtri(POWER))
    is_binary = np.isin(first_n, (0.0, 1.0)).all() and np.isin(second_n, (0.0, 1.0)).all()
    if is_binary and count == len(value_n) and np.ptp(weight_n) == 0:
        low, high, adjusted = _agresti_min(rises, falls, count)
        p_value = mcnemar(rises, falls)
        # Fewer items that all change in one direction are no evidence.
        least = math.ceil(-math.log2((1 - CONFIDENCE) / 2))
        smallest = min(max(powered * adjusted, least / count), 1.0)
    elif error is not None:
        has_spread = error > ROUNDING * abs(mean)
        p_value = _t_test(mean, error, count - 1) if has_spread else _sign_test(mean, count)
        if has_spread or not mean or p_value < 1 - CONFIDENCE:
            reach = _student(count - 1) * error
            low, high = mean - reach, mean + reach
            smallest = powered * error
    return Difference(
        mean=mean,
        standard_error=error,
        low=low,
        high=high,
        p_value=p_value,
        smallest=smallest,
        items=len(value_n),
        groups=count,
        rises=rises,
        falls=falls,
    )


def mcnemar(rises: int, falls: int) -> float:
    """Return the exact two-sided p-value of McNemar's test for the two numbers of changed items."""
    return min(1.0, 2 * float(_special().bdtr(min(rises, falls), rises + falls, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in the same order.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted.tolist()


def _are_shares(value_n: Float[np.ndarray, "n"]) -> bool:
    """Return whether all values are from 0 to 1, up to rounding."""
    return bool((np.abs(value_n - 0.5) <= 0.5 + ROUNDING).all())


def _checked(
    values: Values, weights: Values | None, groups: Sequence[Any] | None
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """Return values, weights and group numbers as arrays."""
    value_n = np.asarray(values, np.float64)
    weight_n = np.ones(len(value_n)) if weights is None else np.asarray(weights, np.float64)
    if not len(value_n) or weight_n.sum() <= 0:
        raise ValueError("a mean needs an item with a weight")
    if groups is None:
        return value_n, weight_n, np.arange(len(value_n))
    return value_n, weight_n, np.unique(np.asarray(groups), return_inverse=True)[1]


def _clustered(
    value_n: Float[np.ndarray, "n"], weight_n: Float[np.ndarray, "n"], index_n: Int[np.ndarray, "n"]
) -> tuple[float, float | None]:
    """Return the weighted mean and its clustered standard error, None for a single group."""
    total = weight_n.sum()
    mean = float(value_n @ weight_n / total)
    residual_g = np.bincount(index_n, (value_n - mean) * weight_n)
    count = len(residual_g)
    if count < 2:
        return mean, None
    return mean, float(np.sqrt(count / (count - 1) * (residual_g**2).sum()) / total)


def _agresti_min(rises: int, falls: int, items: int) -> tuple[float, float, float]:
    """Return the interval of a difference of paired shares, and its standard error."""
    size, changed = items + 2, rises + falls + 1
    center = (rises - falls) / size
    error = math.sqrt(changed - (rises - falls) ** 2 / size) / size
    reach = float(_special().ndtri(0.5 + CONFIDENCE / 2)) * error
    return max(center - reach, -1.0), min(center + reach, 1.0), error


def _special() -> Any:
    """Return `scipy.special`, imported late: a training run does not need it."""
    from scipy import special

    return special


def _student(freedom: int) -> float:
    return float(_special().stdtrit(freedom, 0.5 + CONFIDENCE / 2))


def _t_test(mean: float, error: float, freedom: int) -> float:
    """Return the two-sided p-value of a mean."""
    return 2 * float(_special().stdtr(freedom, -abs(mean) / error))


def _sign_test(mean: float, groups: int) -> float:
    """Return the two-sided p-value of groups with the same difference; 1 if it is 0."""
    return 2.0 ** (1 - groups) if mean else 1.0
