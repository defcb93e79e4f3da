"""Assignment of the rows of an endless stream to sources: a pure function of the row's number."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.errors import ConfigError

Counts = Int[np.ndarray, "K"]
Knot = tuple[float, Float[np.ndarray, "K"]]  # a row and the weight of each source there


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """The weights of K sources over the rows of a stream, and the source of each row.

    Source k is read for the (j + 1)th time at the moment t where the integral of its weight from 0
    to t is j + 1/2. The rows are these moments of all sources in order; of equal moments the first
    source comes first. So after any n rows the count of each source is within K rows of the
    integral of its weight, constant weights are exact in the long run, and the source of a row is
    found from its number, in time that grows only with the number of changes of the weights.

    Weights are linear between `knots`, with the sum 1, and constant behind the last.

    Source: the divisor method of Webster (1832) and Sainte-Lague (1910) for apportionment.
    """

    knots: Float[np.ndarray, "S"]  # first row of each linear piece
    weights: Float[np.ndarray, "S K"]  # at the knot
    slopes: Float[np.ndarray, "S K"]
    before: Float[np.ndarray, "S K"]  # integral of the weights up to the knot
    caps: Float[np.ndarray, "K"]  # maximum rows of each source
    ends: dict[int, float]  # row at which a source reaches its cap, if it does

    def choose(
        self, start: int, stop: int
    ) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], Counts]:
        """Return the source of each row, its earlier reads, and the counts of all sources before
        `start`.

        Fewer rows than `start` to `stop` are returned if every source reaches its cap.
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
        """Return the reads of each source before a row."""
        return self.choose(row, row)[2]

    def at(self, row: float) -> Float[np.ndarray, "K"]:
        """Return the weights at a row."""
        stretch = int(np.searchsorted(self.knots, row, side="right")) - 1
        return self.weights[stretch] + self.slopes[stretch] * (row - self.knots[stretch])

    def _counts(self, moment: float) -> Counts:
        """Return the number of moments of each source before this one."""
        if moment <= 0:
            return np.zeros(len(self.caps), np.int64)
        stretch = int(np.searchsorted(self.knots, moment, side="right")) - 1
        gone = moment - self.knots[stretch]
        had = self.before[stretch] + gone * (
            self.weights[stretch] + self.slopes[stretch] * gone / 2
        )
        # The integral and its inverse are rounded, so nearby moments are compared.
        near = np.maximum(had.astype(np.int64)[:, None] + np.arange(-2, 4), -1)
        source = np.repeat(np.arange(len(had)), near.shape[1])
        is_before = (self._moments(source, near.ravel()) < moment).reshape(near.shape)
        return np.where(is_before & (near >= 0), near + 1, 0).max(axis=1)

    def _moments(
        self, source: Int[np.ndarray, "n"], nth: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n"]:
        """Return when sources are read for the (nth + 1)th time; infinite if never."""
        integral = nth + 0.5
        stretch = np.maximum((self.before[:, source] <= integral).sum(axis=0) - 1, 0)
        weight, slope = self.weights[stretch, source], self.slopes[stretch, source]
        gone = _until(integral - self.before[stretch, source], weight, slope)
        end = np.append(self.knots[1:], np.inf)[stretch]  # rounding must not pass it
        return np.where(
            nth < self.caps[source], np.minimum(self.knots[stretch] + gone, end), np.inf
        )


def build(knots: Sequence[Knot], caps: Float[np.ndarray, "K"], names: Sequence[str]) -> Shares:
    """Return the shares of sources with at most `caps` rows each; infinity is no limit.

    From the row at which a source reaches its cap, the others take its weight in proportion:
    weights are scaled to the sum 1 there and at each later knot, linear between.

    Raises:
      ConfigError: if no source that is left has a weight.
    """
    knot_rows, values = np.array([row for row, _ in knots], float), np.array([w for _, w in knots])

    def weights(row: float, is_left: np.ndarray) -> np.ndarray:
        row_weights = np.array([np.interp(row, knot_rows, column) for column in values.T]) * is_left
        if not row_weights.sum() and is_left.any():
            gone = [name for name, left in zip(names, is_left, strict=True) if not left]
            raise ConfigError(
                f"no source has a weight at row {row:.0f} of the run",
                where="data.mixture",
                why=f"{', '.join(gone)} reached the maximum epochs before, and the others have no "
                "weight there",
                fix="'--config.data.mixture.epochs=()'    # no maximum",
            )
        return row_weights / (row_weights.sum() or 1)

    row, had, is_left = 0.0, np.zeros(len(names)), caps > 0
    stretches, ends = [], {}
    while True:
        now, after = weights(row, is_left), knot_rows[knot_rows > row]
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
    integral: Float[np.ndarray, "n"], weight: Float[np.ndarray, "n"], slope: Float[np.ndarray, "n"]
) -> Float[np.ndarray, "n"]:
    """Solve weight d + slope d^2 / 2 = integral for d > 0.

    The citardauq form loses no digits for a small slope. The result is beyond the root of a falling
    weight that never reaches the integral, and infinity without a weight.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        root = 2 * integral / (weight + np.sqrt(np.maximum(weight**2 + 2 * slope * integral, 0)))
    return np.where(np.isnan(root), np.inf, root)
