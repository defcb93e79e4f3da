"""How many rows each batch of a run has, and how long they are: fewer and shorter ones in its first stages."""

import dataclasses
import math
import re
from collections.abc import Sequence

from jaxlm.core.span import Span

_STAGE = re.compile(r"([0-9]{1,18})@(.+)")


class ScheduleError(ValueError):
    """A stage does not end behind the one before it, or not within the run. `setting` has its entry."""

    def __init__(self, setting: str, first: int, end: int, total: int, entry: str):
        super().__init__(
            f"{entry} ends at step {end}, which must be after step {first} and before the run's last, {total}"
        )
        self.setting = setting


@dataclasses.dataclass(frozen=True)
class Phase:
    """Batches from number `first` on: `rows` rows of the stream each, which are cut into pieces of `length` tokens."""

    first: int
    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """The stages of a run whose rows hold `sequence` tokens. The last has no end."""

    phases: tuple[Phase, ...]
    sequence: int

    def phase(self, number: int) -> Phase:
        """The stage that a batch is in."""
        return next(stage for stage in reversed(self.phases) if stage.first <= number)

    def rows(self, number: int) -> int:
        """Rows of the stream before a batch: that of its own first."""
        ends = (*(stage.first for stage in self.phases[1:]), math.inf)
        return sum(
            int(min(number, end) - stage.first) * stage.rows
            for stage, end in zip(self.phases, ends, strict=True)
            if stage.first < number
        )

    def tokens(self, number: int) -> int:
        """Slots of all batches before one."""
        return self.rows(number) * self.sequence

    def steps(self, tokens: float) -> int:
        """The fewest batches with so many slots."""
        ends = (*(stage.first for stage in self.phases[1:]), math.inf)
        for stage, end in zip(self.phases, ends, strict=True):
            left = tokens - self.tokens(stage.first)
            steps = stage.first + math.ceil(left / (stage.rows * self.sequence) - 1e-9)
            if steps <= end:
                return max(steps, 0)
        raise AssertionError("the last stage has no end")


def build(
    *, total: int, batch: int, sequence: int, batches: Sequence[str], lengths: Sequence[str]
) -> BatchSchedule:
    """The pace of a run of `total` steps, from the entries SIZE@SPAN of `train.batch_warmup` and `data.sequence_warmup`.

    Raises:
      Misplaced: where an entry does not end after the one before it and before the run.
      ValueError: where one cannot be read.
    """
    pace = BatchSchedule((Phase(0, batch, sequence),), sequence)
    for size, span in map(parse, batches):
        *before, last = pace.phases
        grown = BatchSchedule((*before, Phase(last.first, size, sequence)), sequence)
        end = span.steps(total, grown)
        if not last.first < end < total:
            raise ScheduleError("train.batch_warmup", last.first, end, total, f"{size}@{span}")
        pace = BatchSchedule((*grown.phases, Phase(end, batch, sequence)), sequence)
    first, cuts = 0, []
    for length, span in map(parse, lengths):
        end = span.steps(total, pace)
        if not first < end < total:
            raise ScheduleError("data.sequence_warmup", first, end, total, f"{length}@{span}")
        cuts.append((first, length))
        first = end
    cuts.append((first, sequence))
    numbers = sorted({stage.first for stage in pace.phases} | {number for number, _ in cuts})
    return BatchSchedule(
        tuple(
            Phase(
                number,
                pace.phase(number).rows,
                next(length for start, length in reversed(cuts) if start <= number),
            )
            for number in numbers
        ),
        sequence,
    )


def parse(entry: str) -> tuple[int, Span]:
    """SIZE@SPAN. Raises ValueError where it is something else."""
    match = _STAGE.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not SIZE@SPAN, such as 32@10%")
    span = Span.parse(match[2])
    if span.unit == "second":
        raise ValueError(
            f"{entry!r} ends at a time; a stage ends at a step, a share or after tokens"
        )
    return int(match[1]), span
