"""Scales of groups of numbers that leave the smallest weighted square error. Free of JAX.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c (`make_qx_quants`,
`make_qkx2_quants`, `make_qkx3_quants`, `make_qp_quants`), whose results differ only by the order of
float32 sums.
"""

import numpy as np
from jaxtyping import Float

TINY = 1e-15  # a group without a larger magnitude is all 0
COARSE = tuple(-1 + 0.1 * n for n in range(21))
FINE = tuple(-0.9 + 0.05 * n for n in range(37))


def scale(
    x: Float[np.ndarray, "G N"], weights: Float[np.ndarray, "G N"], half: int
) -> Float[np.ndarray, "G"]:
    """Return the scale of groups with the smallest weighted square error.

    Codes -`half` to `half` - 1 of 19 scales are tried, each with its best scale.
    """
    place = np.abs(x).argmax(1)[:, None]
    largest = np.take_along_axis(x, place, 1)
    result, best = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for nudge in (0, *range(-9, 0), *range(1, 10)):
        codes = np.clip(np.rint(-np.float32(half + 0.1 * nudge) / largest * x), -half, half - 1)
        weighted = weights * codes
        mixed, second = (weighted * x).sum(1), (weighted * codes).sum(1)
        is_better = (second > 0) & (mixed * mixed > best * second)
        result = np.where(is_better, mixed / second, result)
        best = np.where(is_better, result * mixed, best)
    return np.where(np.abs(largest[:, 0]) < TINY, 0, result)


def scale_and_low(
    x: Float[np.ndarray, "G N"],
    weights: Float[np.ndarray, "G N"],
    top: int,
    nudges: tuple[float, ...],
) -> tuple[Float[np.ndarray, "G"], Float[np.ndarray, "G"]]:
    """Return scale and minimum of groups, negated, that give the smallest weighted square error.

    Codes 0 to `top` of scales are tried, each with its best scale and minimum, at most 0: the range
    of a group over `top`, and over `top` and each of `nudges`.
    """
    low, most = np.minimum(x.min(1), 0), x.max(1)
    is_flat = most == low
    sums, sums_x = weights.sum(1), (weights * x).sum(1)
    result = (most - low) / np.float32(top)
    error = np.full(len(x), np.inf, np.float32)
    for nudge in (None, *nudges):
        # From the best minimum so far, as llama.cpp does.
        tried = np.float32(top + (nudge or 0)) / (most - low)
        codes = np.clip(np.rint(tried[:, None] * (x - low[:, None])), 0, top)
        weighted = weights * codes
        first, second, mixed = weighted.sum(1), (weighted * codes).sum(1), (weighted * x).sum(1)
        if nudge is None:
            new, start = result, low
            is_better = np.ones(len(x), bool)
        else:
            spread = sums * second - first * first
            new = (sums * mixed - sums_x * first) / spread
            start = (second * sums_x - first * mixed) / spread
            new = np.where(start > 0, mixed / second, new)
            start = np.minimum(start, 0)
            is_better = spread > 0
        total = (weights * (new[:, None] * codes + start[:, None] - x) ** 2).sum(1)
        is_better &= total < error
        is_better &= ~is_flat
        result, low = np.where(is_better, new, result), np.where(is_better, start, low)
        error = np.where(is_better, total, error)
    return np.where(is_flat, 0, result), -low
