"""Integers of four bits for a weight whose inputs are known: searched scales, GPTQ and AWQ.

All of it is NumPy on one weight: no array here is larger than a few times that weight or the Gram
matrix x^T x of its inputs x.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float

from jaxlm.ops.weight_codes import WeightFormat

Matrix = Float[np.ndarray, "I O"]
Gram = Float[np.ndarray, "I I"]

RATIOS = np.linspace(1.0, 0.5, 11)  # of the largest number of a block that is still a code
DAMPING = 0.01  # of the mean of the Gram matrix's diagonal, added to it
COLUMNS = 128  # inputs whose errors are spread over the later ones in one product
POWERS = np.linspace(0.0, 0.95, 20)  # of the magnitudes of inputs
LEAST = 1e-4  # of the largest magnitude of an input


class Grid(NamedTuple):
    """The values that codes 0 to 15 of each block stand for: (code - zero) scale."""

    scales: Float[np.ndarray, "G O"]
    zeros: Float[np.ndarray, "G O"]

    def rows(self, rows: slice | int, block: int) -> "Grid":
        """Return the scale and zero of inputs of a weight."""
        numbers = np.arange(rows.stop)[rows] if isinstance(rows, slice) else np.array(rows)
        return Grid(self.scales[numbers // block], self.zeros[numbers // block])

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Return the codes nearest to values; the grid has a row for each of them."""
        unit = values / np.where(self.scales == 0, 1.0, self.scales)
        return np.clip(np.round(unit) + self.zeros, 0, 15)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of codes."""
        return (codes - self.zeros) * self.scales


class Codes(NamedTuple):
    """A weight as codes, and its grid."""

    codes: Float[np.ndarray, "I O"]
    grid: Grid
    block: int

    @property
    def values(self) -> Matrix:
        """The weight that the codes stand for."""
        rows = self.grid.rows(slice(0, len(self.codes)), self.block)
        return rows.values(self.codes)

    def leaves(self, format: WeightFormat) -> dict[str, np.ndarray]:
        """Return what `WeightFormat.quantize` returns."""
        codes = self.codes.astype(np.uint8)
        pairs = np.pad(codes, [(0, len(codes) % 2), (0, 0)]).reshape(-1, 2, codes.shape[1])
        leaves = {"codes": pairs[:, 0] | (pairs[:, 1] << 4), "scales": self.grid.scales}
        if format.base == "int4_zero":
            leaves["zeros"] = self.grid.zeros.astype(np.uint8)
        return leaves


def fitted(weight: Matrix, format: WeightFormat, ratio: float = 1.0) -> Grid:
    """Return the grid of `WeightFormat.quantize`, of blocks whose largest number is times ratio."""
    size, count = _blocks(weight, format)
    weight = weight.astype(np.float32) * np.float32(ratio)
    parts = [weight[n * size : (n + 1) * size] for n in range(count)]
    if format.base == "int4":
        largest = np.stack([np.abs(part).max(0) for part in parts])
        return Grid(largest / np.float32(7), np.full(largest.shape, 8, np.float32))
    least = np.stack([np.minimum(part.min(0), 0) for part in parts])
    most = np.stack([np.maximum(part.max(0), 0) for part in parts])
    scales = (most - least) / np.float32(15)
    return Grid(scales, np.round(-least / np.where(scales == 0, 1, scales)))


def nearest(weight: Matrix, grid: Grid, format: WeightFormat) -> Codes:
    """Return the codes of a weight rounded to nearest."""
    size, _ = _blocks(weight, format)
    rows = grid.rows(slice(0, len(weight)), size)
    return Codes(rows.codes(weight.astype(np.float32)), grid, size)


def searched(weight: Matrix, gram: Gram, format: WeightFormat) -> Grid:
    """Return the grid of the ratio in RATIOS with the least error |x (W - W')|^2 of each block."""
    size, count = _blocks(weight, format)
    best = fitted(weight, format)
    least = np.full(best.scales.shape, np.inf)
    for ratio in RATIOS:
        grid = fitted(weight, format, ratio)
        wrong = nearest(weight, grid, format).values - weight
        for n in range(count):
            rows = slice(n * size, min((n + 1) * size, len(weight)))
            error = np.sum(wrong[rows] * (gram[rows, rows] @ wrong[rows]), 0)
            is_less = error < least[n]
            least[n] = np.where(is_less, error, least[n])
            for chosen, tried in zip(best, grid, strict=True):
                chosen[n] = np.where(is_less, tried[n], chosen[n])
    return best


def error(codes: Codes, weight: Matrix, gram: Gram) -> Float[np.ndarray, "O"]:
    """Return |x (W - W')|^2 of each output, summed over the inputs x of the Gram matrix."""
    wrong = codes.values - weight
    return np.sum(wrong * (gram @ wrong), 0)


def gptq(weight: Matrix, gram: Gram, format: WeightFormat) -> Codes:
    """Return codes whose outputs x W' are near x W: each input's error is spread over later ones.

    Inputs are rounded in the order of their squares, on the grid of `searched`. An input that is
    always 0 is rounded to nearest. An output for which rounding to nearest has the smaller error
    has the codes of that.

    Args:
      weight: [I, O].
      gram: x^T x of its inputs; its dtype is that of the arithmetic.
      format: int4 or int4_zero.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; the order is that of its code.
    """
    size, _ = _blocks(weight, format)
    diagonal = np.diag(gram)
    order = np.argsort(-diagonal, kind="stable")
    factor = _inverse_factor(gram[np.ix_(order, order)])
    grid = searched(weight, gram, format)
    left = weight.astype(gram.dtype)[order]
    codes = np.empty(left.shape, np.float32)
    for begin in range(0, len(left), COLUMNS):
        end = min(begin + COLUMNS, len(left))
        errors = np.empty((end - begin, left.shape[1]), left.dtype)
        for n in range(begin, end):
            row = grid.rows(int(order[n]), size)
            codes[n] = row.codes(left[n])
            errors[n - begin] = (left[n] - row.values(codes[n])) / factor[n, n]
            left[n:end] -= factor[n, n:end, None] * errors[n - begin]
        left[end:] -= factor[begin:end, end:].T @ errors
    made = Codes(np.empty_like(codes), grid, size)
    made.codes[order] = codes
    plain = nearest(weight, fitted(weight, format), format)
    is_better = error(made, weight, gram) <= error(plain, weight, gram)
    scales, zeros = (
        np.where(is_better, ours, theirs) for ours, theirs in zip(grid, plain.grid, strict=True)
    )
    return Codes(np.where(is_better, made.codes, plain.codes), Grid(scales, zeros), size)


def _inverse_factor(gram: Gram) -> Gram:
    """Return the upper triangular U with U^T U the inverse of the damped Gram matrix."""
    size, diagonal = len(gram), np.diag(gram)
    used = diagonal[diagonal > 0]
    mean = used.mean() if used.size else 1.0
    for damping in _dampings():
        damped = gram + np.diag(np.where(diagonal > 0, damping * mean, mean)).astype(gram.dtype)
        try:
            lower = scipy.linalg.cholesky(damped[::-1, ::-1], lower=True)
        except np.linalg.LinAlgError:  # singular in this arithmetic
            continue
        identity = np.eye(size, dtype=gram.dtype)
        return scipy.linalg.solve_triangular(lower[::-1, ::-1], identity, lower=False)
    raise AssertionError  # the damping grows without end


def _dampings() -> Iterator[float]:
    return (DAMPING * 10.0**power for power in itertools.count())


def awq_scales(
    weights: Sequence[Matrix],
    gram: Gram,
    magnitudes: Float[np.ndarray, "I"],
    format: WeightFormat,
) -> Float[np.ndarray, "I"]:
    """Return a factor s for each input, by which the weights lose least: x W = (x / s) (s W).

    s is a power of the inputs' mean magnitudes, the one in POWERS with the least error of the
    outputs of all weights; 1 for each if rounding to nearest is best without them.

    Args:
      weights: all that read these inputs, [I, O] each.
      gram: x^T x of the inputs.
      magnitudes: mean or sum of |x|: a common factor changes nothing.
      format: int4 or int4_zero.

    Source: Lin et al. 2023, arXiv:2306.00978, section 3.2.
    """
    weight = np.concatenate(weights, 1)
    floor = LEAST * max(magnitudes.max(), np.finfo(np.float32).tiny)
    known = np.maximum(magnitudes, floor).astype(np.float64)
    best, least = np.ones(len(weight), np.float32), np.inf
    for power in POWERS:
        tried = known**power
        tried = (tried / np.sqrt(tried.max() * tried.min())).astype(np.float32)
        scaled = weight * tried[:, None]
        rounded = nearest(scaled, fitted(scaled, format), format).values / tried[:, None]
        wrong = rounded - weight
        total = float(np.sum(wrong * (gram @ wrong), dtype=np.float64))
        if total < least:
            best, least = tried, total
    return best


def _blocks(weight: Matrix, format: WeightFormat) -> tuple[int, int]:
    """Return the inputs of a block, and the number of blocks."""
    size = len(weight) if format.block == "all" else min(format.block, len(weight))
    return size, -(-len(weight) // size)
