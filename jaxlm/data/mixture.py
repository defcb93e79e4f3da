"""Mixture of several training sources as one stream of rows."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError
from jaxlm.data import mixture_config, shares
from jaxlm.data.config import DataConfig
from jaxlm.data.corrupt.rows import Key
from jaxlm.data.joined import Joined
from jaxlm.data.loader import Loader, shuffled
from jaxlm.data.mixture_config import Temperature
from jaxlm.data.packing import Plan
from jaxlm.data.shares import Shares

VERSION = 1  # of the assignment of rows to sources


class JoinedPlan(Plan):
    """The rows of several shard sets in order, with documents numbered across sets."""

    def __init__(self, plans: tuple[Plan, ...], documents: tuple[int, ...]):
        self._plans, self._documents = plans, documents
        self.first = tuple(itertools.accumulate((plan.rows for plan in plans), initial=0))
        self._before = tuple(itertools.accumulate(documents, initial=0))

    def __reduce__(self) -> tuple[type["JoinedPlan"], tuple[object, ...]]:  # type: ignore[override]
        return JoinedPlan, (self._plans, self._documents)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.first[-1]

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
class Mixture(Loader):
    """The rows of several shard sets as one stream, each row from one set.

    The set and the row in it are a function of the row's number in the stream (`Shares`). Each
    source has shuffled epochs of its own. The cursor is the step, as for `Loader`.
    """

    names: tuple[str, ...] = dataclasses.field(kw_only=True)
    shares: Shares = dataclasses.field(kw_only=True)
    sources: tuple[Loader, ...] = dataclasses.field(kw_only=True)

    def keys(self, start: int, stop: int) -> list[Key]:
        """Return the keys of the stream's rows from `start` to `stop`, as `Loader.keys`."""
        plan = self.plan
        assert isinstance(plan, JoinedPlan)
        return [
            Key(self.seed, epoch, plan.first[source] + row)
            for source, epoch, row in self._rows(start, stop)
        ]

    def _rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (source, epoch of the source, row in the source) for each row of the stream."""
        sources, nth, _ = self.shares.choose(start, stop)
        if len(sources) < stop - start:
            raise _all_read(self.names, start + len(sources))
        for source, number in zip(sources.tolist(), nth.tolist(), strict=True):
            size = self.sources[source].plan.rows
            epoch, index = divmod(number, size)
            yield source, epoch, shuffled(index, size, (self.seed, epoch, source))

    def source(self, key: Key) -> str:
        """Return the source name of a row."""
        assert isinstance(self.plan, JoinedPlan)
        return self.names[self.plan.part(key.row)]

    def read(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        """Return (rows, predicted tokens) of each source in the stream's rows from `start` to
        `stop`.
        """
        rows, tokens = [0] * len(self.names), [0] * len(self.names)
        for source, _, row in self._rows(start, stop):
            rows[source] += 1
            tokens[source] += int(self.sources[source].plan.pieces(row)["length"].sum())
        return dict(zip(self.names, zip(rows, tokens, strict=True), strict=True))

    def seen(self, rows: int) -> dict[str, dict[str, float]]:
        """Return rows, share and epochs of each source in the first `rows` rows of the stream."""
        counts = self.shares.counts(rows).tolist()
        return {
            name: {
                "read_rows": count,
                "share": count / max(rows, 1),
                "epochs": count / source.plan.rows,
            }
            for name, source, count in zip(self.names, self.sources, counts, strict=True)
        }

    def told(self, pace: BatchSchedule, steps: int) -> Iterator[str]:
        """Yield a line for each source after `steps` steps: share, epochs, step of its maximum."""
        rows = pace.rows(steps)
        for number, (name, seen) in enumerate(self.seen(rows).items()):
            line = f"{name} {seen['share']:.1%} of the rows, {seen['epochs']:.2f} epochs"
            if (end := self.shares.ends.get(number, math.inf)) <= rows:
                step = pace.steps(end * self.sequence)
                line += f", its maximum: from step {step} the other sources take its share"
            yield line

    def ended(self, start: int, stop: int) -> Iterator[str]:
        """Yield the sources that reach their maximum epochs in the rows from `start` to `stop`."""
        for number, end in self.shares.ends.items():
            if start < end <= stop:
                yield self.names[number]


def mixed(
    sources: dict[str, Loader],
    joined: Joined,
    config: DataConfig,
    *,
    row_at: Callable[[Span], int],
    rows: int,
) -> Mixture:
    """Return the mixture of some loaders for a run of `rows` rows.

    Args:
      sources: the loader of each source.
      joined: the shards of all sources.
      config: the data section.
      row_at: row of the stream at which a span of the run ends.
      rows: rows of the whole run.

    Raises:
      ConfigError: if the sources have too few rows under their maximum epochs, or one has none.
    """
    first, *_ = loaders = tuple(sources.values())
    names, limits = tuple(sources), mixture_config.caps(config.mixture)
    caps = np.array(
        [
            math.floor(limits[name] * loader.plan.rows + 1e-9) if name in limits else math.inf
            for name, loader in sources.items()
        ]
    )
    if not caps.all():
        name = names[int(np.flatnonzero(caps == 0)[0])]
        size = sources[name].plan.rows
        least = {n: f"{max(most, 1.01 / sources[n].plan.rows):.3g}" for n, most in limits.items()}
        raise ConfigError(
            f"the run would read nothing of {name}",
            where="data.mixture.epochs",
            why=f"{limits[name]:g} epochs of its {size} rows are less than one",
            fix="--config.data.mixture.epochs=" + ",".join(f"{n}={m}" for n, m in least.items()),
        )
    course = shares.build(_knots(config, sources, row_at), caps, names)
    if (most := float(caps.sum())) < rows:
        raise ConfigError(
            f"the run takes {rows} rows, and the sources have {most:.0f} under their maximum "
            f"epochs",
            where="data.mixture.epochs",
            why=", ".join(
                f"{name}: {cap:.0f} of {loader.plan.rows} rows x {limits[name]:g}"
                for (name, loader), cap in zip(sources.items(), caps, strict=True)
            ),
            fix="--config.data.mixture.epochs="
            + ",".join(f"{name}={limits[name] * rows / most * 1.01:.3g}" for name in names),
        )
    return Mixture(
        joined,
        JoinedPlan(
            tuple(loader.plan for loader in loaders),
            tuple(loader.shards.documents for loader in loaders),
        ),
        config.sequence,
        first.seed,
        config.workers,
        config.prefetch,
        corruption=first.corruption,
        names=names,
        shares=course,
        sources=loaders,
    )


def _knots(
    config: DataConfig, sources: dict[str, Loader], row_at: Callable[[Span], int]
) -> list[shares.Knot]:
    """Return the weights of the sources at each row where a linear piece of one begins or ends."""
    mixture = config.mixture
    if isinstance(mixture, Temperature):
        sizes = np.array([loader.shards.manifest.tokens for loader in sources.values()], float)
        return [(0.0, (sizes / sizes.max()) ** (1 / mixture.temperature))]
    known = mixture.points
    rows = sorted({0, *map(row_at, mixture_config.spans(mixture))})
    return [
        (row, np.array([mixture_config.weight_at(known[name], row, row_at) for name in sources]))
        for row in rows
    ]


def _all_read(names: tuple[str, ...], row: int) -> ConfigError:
    return ConfigError(
        "every source has reached its maximum number of epochs",
        where="data.mixture.epochs",
        why=f"{', '.join(names)} end at row {row}",
        fix="'--config.data.mixture.epochs=()'    # no maximum",
    )
