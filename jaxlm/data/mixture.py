"""Mixture of several training sources as one stream of rows."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError
from jaxlm.data import mixture_config
from jaxlm.data.config import DataConfig
from jaxlm.data.corrupt.rows import RowKey
from jaxlm.data.loader import Loader, shuffled
from jaxlm.data.mixture_config import Temperature
from jaxlm.data.packing import PIECE, PackingPlan
from jaxlm.data.shards import AnyShards, JoinedShards

Counts = Int[np.ndarray, "K"]
Knot = tuple[float, Float[np.ndarray, "K"]]  # a row and the weight of each source there

VERSION = 1  # of the assignment of rows to sources


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
        """Return each row's source and its earlier reads, and all sources' counts before `start`.

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


def build_shares(
    knots: Sequence[Knot], caps: Float[np.ndarray, "K"], names: Sequence[str]
) -> Shares:
    """Return the shares of sources with at most `caps` rows each; infinity is no limit.

    From the row at which a source reaches its cap, the others take its weight in proportion:
    weights are scaled to the sum 1 there and at each later knot, linear between.

    Raise ConfigError if no source that is left has a weight.
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


class DocumentPlan(PackingPlan):
    """The documents of a shard set, each a row: prompts are drawn one by one."""

    def __init__(self, shards: AnyShards):
        self._shards = shards

    def __reduce__(self) -> tuple[type["DocumentPlan"], tuple[AnyShards]]:  # type: ignore[override]
        return DocumentPlan, (self._shards,)

    @property
    def rows(self) -> int:
        """Number of documents."""
        return self._shards.documents

    @property
    def most_pieces(self) -> int:
        """Largest number of pieces of a row."""
        return 1

    def pieces(self, row: int) -> np.ndarray:
        """Return the piece of a document: (document, start, length)."""
        length = int(self._shards.lengths(row, row + 1)[0]) - 1
        return np.array([(row, 0, length)][: max(length, 0)], PIECE)


class JoinedPlan(PackingPlan):
    """The rows of several shard sets in order, with documents numbered across sets."""

    def __init__(self, plans: tuple[PackingPlan, ...], documents: tuple[int, ...]):
        self._plans, self._documents = plans, documents
        self.first = tuple(itertools.accumulate((plan.rows for plan in plans), initial=0))
        self._before = tuple(itertools.accumulate(documents, initial=0))

    def __reduce__(self) -> tuple[type["JoinedPlan"], tuple[object, ...]]:  # type: ignore[override]
        return JoinedPlan, (self._plans, self._documents)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.first[-1]

    @property
    def most_pieces(self) -> int:
        """Largest number of pieces of a row."""
        return max(plan.most_pieces for plan in self._plans)

    def part(self, row: int) -> int:
        """Return the number of a row's shard set."""
        return bisect.bisect_right(self.first, row) - 1

    def pieces(self, row: int) -> np.ndarray:
        """Return the pieces of a row, in order: (document, start, length)."""
        number = self.part(row)
        pieces = self._plans[number].pieces(row - self.first[number]).copy()
        pieces["document"] += self._before[number]
        return pieces


@dataclasses.dataclass(frozen=True)
class MixtureLoader(Loader):
    """The rows of several shard sets as one stream, each row from one set.

    The set and the row in it are a function of the row's number in the stream (`Shares`). Each
    source has shuffled epochs of its own. The cursor is the step, as for `Loader`.

    The rows of a mixture of prompts are prompts. A run takes fewer of them than rows of samples:
    one for `samples` rows, those of its samples in all epochs of a rollout.
    """

    names: tuple[str, ...] = dataclasses.field(kw_only=True)
    samples: int = dataclasses.field(kw_only=True, default=1)
    shares: Shares = dataclasses.field(kw_only=True)
    sources: tuple[Loader, ...] = dataclasses.field(kw_only=True)

    def keys(self, start: int, stop: int) -> list[RowKey]:
        """Return the keys of the stream's rows from `start` to `stop`, as `Loader.keys`."""
        plan = self.plan
        assert isinstance(plan, JoinedPlan)
        return [
            RowKey(self.seed, epoch, plan.first[source] + row)
            for source, epoch, row in self._rows(start, stop)
        ]

    def _rows(
        self, start: int, stop: int, extra: tuple[int, ...] = ()
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (source, epoch of the source, row in the source) for each row of the stream."""
        sources, nth, _ = self.shares.choose(start, stop)
        if len(sources) < stop - start:
            what = "every source has reached its maximum number of epochs"
            why = f"{', '.join(self.names)} end at row {start + len(sources)}"
            fix = "'--config.data.mixture.epochs=()'    # no maximum"
            raise ConfigError(what, where="data.mixture.epochs", why=why, fix=fix)
        for source, number in zip(sources.tolist(), nth.tolist(), strict=True):
            size = self.sources[source].plan.rows
            epoch, index = divmod(number, size)
            yield source, epoch, shuffled(index, size, (self.seed, epoch, source, *extra))

    def source(self, key: RowKey) -> str:
        """Return the source name of a row."""
        return self.source_of(key.row)

    def source_of(self, row: int) -> str:
        """Return the source name of a row of the joined plan, which is the document of a prompt."""
        assert isinstance(self.plan, JoinedPlan)
        return self.names[self.plan.part(row)]

    def documents(self, start: int, stop: int, attempt: int = 0) -> list[int]:
        """Return the prompts from `start` to `stop` of the stream, of a mixture of prompts.

        Each attempt has other prompts of the same sources.
        """
        plan = self.plan
        assert isinstance(plan, JoinedPlan)
        extra = (attempt,) if attempt else ()
        return [plan.first[source] + row for source, _, row in self._rows(start, stop, extra)]

    def read(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        """Return (rows, predicted tokens) of each source in some rows of the run."""
        start, stop = start // self.samples, stop // self.samples
        rows, tokens = [0] * len(self.names), [0] * len(self.names)
        for source, _, row in self._rows(start, stop):
            rows[source] += 1
            tokens[source] += int(self.sources[source].plan.pieces(row)["length"].sum())
        return dict(zip(self.names, zip(rows, tokens, strict=True), strict=True))

    def seen(self, rows: int) -> dict[str, dict[str, float]]:
        """Return rows, share and epochs of each source in the first `rows` rows of the run."""
        rows //= self.samples
        counts = self.shares.counts(rows).tolist()
        seen = {}
        for name, source, n in zip(self.names, self.sources, counts, strict=True):
            epochs = n / source.plan.rows
            seen[name] = {"read_rows": n, "share": n / max(rows, 1), "epochs": epochs}
        return seen

    def describe(self, pace: BatchSchedule, steps: int) -> Iterator[str]:
        """Yield a line for each source after `steps` steps: share, epochs, step of its maximum."""
        rows = pace.rows(steps)
        for number, (name, seen) in enumerate(self.seen(rows).items()):
            what = "rows" if self.samples == 1 else "prompts"
            line = f"{name} {seen['share']:.1%} of the {what}, {seen['epochs']:.2f} epochs"
            if (end := self.shares.ends.get(number, math.inf)) * self.samples <= rows:
                step = pace.steps(end * self.samples * self.sequence)
                line += f", its maximum: from step {step} the other sources take its share"
            yield line

    def weights_at(self, row: int) -> list[float]:
        """Return the weights of the sources at a row of the run."""
        return self.shares.at(row // self.samples).tolist()

    def ended(self, start: int, stop: int) -> Iterator[str]:
        """Yield the sources that reach their maximum epochs in some rows of the run."""
        for number, end in self.shares.ends.items():
            if start < end * self.samples <= stop:
                yield self.names[number]


def mix_loaders(
    sources: dict[str, Loader],
    joined: JoinedShards,
    config: DataConfig,
    *,
    row_at: Callable[[Span], int],
    rows: int,
    samples: int = 1,
) -> MixtureLoader:
    """Return the mixture of some loaders for a run of `rows` rows.

    Args:
      joined: the shards of all sources.
      row_at: row of the stream at which a span of the run ends.
      rows: rows of the whole run; 0 if they are not known.
      samples: of prompts, rows of the run for each; the stream has a row for each prompt.

    Raises:
      ConfigError: if the sources have too few rows under their maximum epochs, or one has none.
    """
    if config.has_prompts:
        sources = {
            name: dataclasses.replace(loader, plan=DocumentPlan(loader.shards))
            for name, loader in sources.items()
        }
    rows = -(-rows // samples)
    first, *_ = loaders = tuple(sources.values())
    names, limits = tuple(sources), mixture_config.max_epochs(config.mixture)
    caps = np.full(len(sources), math.inf)
    for number, (name, loader) in enumerate(sources.items()):
        if name in limits:
            caps[number] = math.floor(limits[name] * loader.plan.rows + 1e-9)
    if not caps.all():
        name = names[int(np.flatnonzero(caps == 0)[0])]
        size = sources[name].plan.rows
        least = {n: f"{max(most, 1.01 / sources[n].plan.rows):.3g}" for n, most in limits.items()}
        what = f"the run would read nothing of {name}"
        why = f"{limits[name]:g} epochs of its {size} rows are less than one"
        fix = "--config.data.mixture.epochs=" + ",".join(f"{n}={m}" for n, m in least.items())
        raise ConfigError(what, where="data.mixture.epochs", why=why, fix=fix)
    course = build_shares(
        _knots(config, sources, lambda span: row_at(span) // samples), caps, names
    )
    if (most := float(caps.sum())) < rows:
        what = (
            f"the run takes {rows} rows, and the sources have {most:.0f} under their maximum epochs"
        )
        capped = zip(names, loaders, caps, strict=True)
        limited = [f"{n}: {cap:.0f} of {x.plan.rows} rows x {limits[n]:g}" for n, x, cap in capped]
        enough = [f"{name}={limits[name] * rows / most * 1.01:.3g}" for name in names]
        fix = f"--config.data.mixture.epochs={','.join(enough)}"
        raise ConfigError(what, where="data.mixture.epochs", why=", ".join(limited), fix=fix)
    documents = tuple(loader.shards.documents for loader in loaders)
    plan = JoinedPlan(tuple(loader.plan for loader in loaders), documents)
    options = config.sequence, first.seed, config.workers, config.prefetch, None, first.corruption
    return MixtureLoader(
        joined, plan, *options, names=names, shares=course, sources=loaders, samples=samples
    )


def _knots(
    config: DataConfig, sources: dict[str, Loader], row_at: Callable[[Span], int]
) -> list[Knot]:
    """Return the weights of the sources at each row where a linear piece of one begins or ends."""
    mixture = config.mixture
    if isinstance(mixture, Temperature):
        of_prompts = config.has_prompts  # which are drawn evenly, the long and the short
        sizes = np.array(
            [x.plan.rows if of_prompts else x.shards.manifest.tokens for x in sources.values()],
            float,
        )
        return [(0.0, (sizes / sizes.max()) ** (1 / mixture.temperature))]
    known = mixture.points
    rows = sorted({0, *map(row_at, mixture_config.change_spans(mixture))})
    return [
        (row, np.array([mixture_config.weight_at(known[name], row, row_at) for name in sources]))
        for row in rows
    ]
