"""Which source each row of an endless stream comes from: a pure function of the row's number, at any row at once."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.errors import ConfigError

Counts = Int[np.ndarray, "K"]
Knot = tuple[float, Float[np.ndarray, "K"]]  # a row, and the weight of each source there


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """The course of the weights of K sources over the rows of a stream, and what follows for each row.

    Source k is read for the (j + 1)th time at the moment t where the integral of its weight from 0 to t is j + 1/2. The rows are
    these moments of all sources in their order, at equal moments the first source first. So after any n rows each source
    has had the integral of its weight up to n within K rows, constant weights are exact in the long run, and where a row
    lies is found from its number alone, in time that grows with the number of changes of the weights only.

    Weights are straight lines between `knots`, and sum to 1; behind the last they stay.

    Source: of the moments, the divisor method of Webster (1832) and Sainte-Lague (1910) for apportionment.
    """

    knots: Float[np.ndarray, "S"]  # the row at which each stretch begins
    weights: Float[np.ndarray, "S K"]  # there
    slopes: Float[np.ndarray, "S K"]
    before: Float[np.ndarray, "S K"]  # the integral of the weights up to there
    caps: Float[np.ndarray, "K"]  # the most rows of each source
    ends: dict[int, float]  # the row at which a source has had its most, where it comes to that

    def choose(
        self, start: int, stop: int
    ) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], Counts]:
        """Of the rows from `start` up to `stop`: their sources, how often each was read before, and the counts before `start`.

        Where every source has had its most, there are fewer rows.
        """
        margin = len(self.caps) + 2
        first, last = (self._counts(t) for t in (start - margin, stop + margin))
        source = np.repeat(np.arange(len(first)), last - first)
        begin = np.repeat(first - np.concatenate(([0], np.cumsum(last - first)[:-1])), last - first)
        nth = begin + np.arange(len(source))
        order = np.lexsort((nth, source, self._moments(source, nth)))
        skipped = start - int(first.sum())
        counts = first + np.bincount(source[order[:skipped]], minlength=len(first))
        taken = order[skipped : skipped + stop - start]
        return source[taken], nth[taken], counts

    def counts(self, row: int) -> Counts:
        """How often each source is read before a row."""
        return self.choose(row, row)[2]

    def at(self, row: float) -> Float[np.ndarray, "K"]:
        """The weights at a row."""
        stretch = int(np.searchsorted(self.knots, row, side="right")) - 1
        return self.weights[stretch] + self.slopes[stretch] * (row - self.knots[stretch])

    def _counts(self, moment: float) -> Counts:
        """How many moments of each source lie before this one."""
        if moment <= 0:
            return np.zeros(len(self.caps), np.int64)
        stretch = int(np.searchsorted(self.knots, moment, side="right")) - 1
        gone = moment - self.knots[stretch]
        had = self.before[stretch] + gone * (
            self.weights[stretch] + self.slopes[stretch] * gone / 2
        )
        # The integral and its inverse are each rounded: the moments near it decide.
        near = np.maximum(had.astype(np.int64)[:, None] + np.arange(-2, 4), -1)
        source = np.repeat(np.arange(len(had)), near.shape[1])
        is_before = (self._moments(source, near.ravel()) < moment).reshape(near.shape)
        return np.where(is_before & (near >= 0), near + 1, 0).max(axis=1)

    def _moments(
        self, source: Int[np.ndarray, "n"], nth: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n"]:
        """When sources are read for the (nth + 1)th time; never is infinite."""
        wanted = nth + 0.5
        stretch = np.maximum((self.before[:, source] <= wanted).sum(axis=0) - 1, 0)
        weight, slope = self.weights[stretch, source], self.slopes[stretch, source]
        gone = _until(wanted - self.before[stretch, source], weight, slope)
        end = np.append(self.knots[1:], np.inf)[stretch]  # what rounding would put behind it
        return np.where(
            nth < self.caps[source], np.minimum(self.knots[stretch] + gone, end), np.inf
        )


def build(knots: Sequence[Knot], caps: Float[np.ndarray, "K"], names: Sequence[str]) -> Shares:
    """The shares of sources, each of which may be read `caps` times at most, infinity for no most.

    From the row at which a source has had its most, its weight is the others', in proportion to theirs: they are scaled
    to a sum of 1 there and at each later knot, with straight lines between.

    Raises:
      ConfigError: where a source has had its most and no other has a weight.
    """
    given, values = np.array([row for row, _ in knots], float), np.array([w for _, w in knots])

    def weights(row: float, is_left: np.ndarray) -> np.ndarray:
        found = np.array([np.interp(row, given, column) for column in values.T]) * is_left
        if not found.sum() and is_left.any():
            gone = [name for name, left in zip(names, is_left, strict=True) if not left]
            raise ConfigError(
                f"nothing has a weight at row {row:.0f} of the run",
                where="data.mixture",
                why=f"{', '.join(gone)} came to the most epochs before, and the others have no weight there",
                fix="'--config.data.mixture.epochs=()'    # sets no most",
            )
        return found / (found.sum() or 1)

    row, had, is_left = 0.0, np.zeros(len(names)), caps > 0
    stretches, ends = [], {}
    while True:
        now, after = weights(row, is_left), given[given > row]
        slope, length = np.zeros_like(now), np.inf
        if len(after):
            length = after[0] - row
            slope = (weights(after[0], is_left) - now) / length
        left = np.where(is_left, np.maximum(caps - had, 0), np.inf)
        until = _until(left, now, slope)
        until[until > length] = np.inf
        stretches.append((row, now, slope, had))
        gone = min(length, until.min())
        if not np.isfinite(gone):
            break
        had = had + gone * (now + slope * gone / 2)
        row += gone
        for source in np.flatnonzero(until <= gone):
            had[source], is_left[source] = caps[source], False
            ends[int(source)] = float(row)
    starts, begins, slopes, before = (np.array(column) for column in zip(*stretches, strict=True))
    return Shares(starts, begins, slopes, before, caps, ends)


def _until(
    wanted: Float[np.ndarray, "n"], weight: Float[np.ndarray, "n"], slope: Float[np.ndarray, "n"]
) -> Float[np.ndarray, "n"]:
    """The d > 0 with weight d + slope d^2 / 2 = wanted, in the citardauq form, which loses no digits where the slope is small.

    Where a falling weight is 0 before it has come to as much, something behind that; where there is no weight, infinity.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        root = 2 * wanted / (weight + np.sqrt(np.maximum(weight**2 + 2 * slope * wanted, 0)))
    return np.where(np.isnan(root), np.inf, root)
