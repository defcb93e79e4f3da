"""Batch schedule of a run: rows and row length of each batch, smaller and shorter in warm-up."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from jaxlm.core.span import Span

_PHASE = re.compile(r"([0-9]{1,18})@(.+)")


class ScheduleError(ValueError):
    """A phase ends before the previous one or after the run; `setting` has its entry."""

    def __init__(self, setting: str, first: int, end: int, total: int, entry: str):
        bounds = f"after step {first} and before the run's last, {total}"
        super().__init__(f"{entry} ends at step {end}, which must be {bounds}")
        self.setting = setting


@dataclasses.dataclass(frozen=True)
class Phase:
    """Batches from number `first` on: `rows` rows of the stream each, cut into `length` tokens."""

    first: int
    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """Phases of a run whose rows hold `sequence` tokens. The last phase has no end."""

    phases: tuple[Phase, ...]
    sequence: int

    def _ends(self) -> Iterator[tuple[Phase, float]]:
        """Return each phase with the number of the batch after its last."""
        return zip(self.phases, (*(p.first for p in self.phases[1:]), math.inf), strict=True)

    def phase(self, number: int) -> Phase:
        """Return the phase of a batch."""
        return next(phase for phase in reversed(self.phases) if phase.first <= number)

    def rows(self, number: int) -> int:
        """Return the rows of all batches before one, which is the index of its first row."""
        begun = ((phase, min(number, end)) for phase, end in self._ends() if phase.first < number)
        return sum(int(end - phase.first) * phase.rows for phase, end in begun)

    def tokens(self, number: int) -> int:
        """Return the token slots of all batches before one."""
        return self.rows(number) * self.sequence

    def steps(self, tokens: float) -> int:
        """Return the fewest batches that have at least this many token slots."""
        for phase, end in self._ends():
            left = tokens - self.tokens(phase.first)
            steps = phase.first + math.ceil(left / (phase.rows * self.sequence) - 1e-9)
            if steps <= end:
                return max(steps, 0)
        raise AssertionError("the last phase has no end")


def build(
    *, total: int, batch: int, sequence: int, batches: Sequence[str], lengths: Sequence[str]
) -> BatchSchedule:
    """Return the batch schedule of a run. Raises ValueError if an entry is malformed.

    Raises ScheduleError, a ValueError, if one does not end after the previous and before the run.

    Args:
      total: steps of the run.
      batch: rows of a batch after warm-up.
      sequence: tokens of a row after warm-up.
      batches: entries SIZE@SPAN of `train.batch_warmup`.
      lengths: entries SIZE@SPAN of `data.sequence_warmup`.
    """
    schedule = BatchSchedule((Phase(0, batch, sequence),), sequence)
    for size, span in map(parse, batches):
        *before, last = schedule.phases
        grown = BatchSchedule((*before, Phase(last.first, size, sequence)), sequence)
        end = span.steps(total, grown)
        if not last.first < end < total:
            raise ScheduleError("train.batch_warmup", last.first, end, total, f"{size}@{span}")
        schedule = BatchSchedule((*grown.phases, Phase(end, batch, sequence)), sequence)
    first, cuts = 0, {0: sequence}  # length of rows from each of these batches on
    for length, span in map(parse, lengths):
        end = span.steps(total, schedule)
        if not first < end < total:
            raise ScheduleError("data.sequence_warmup", first, end, total, f"{length}@{span}")
        cuts |= {first: length, end: sequence}
        first = end
    phases, length = [], sequence
    for number in sorted({phase.first for phase in schedule.phases} | cuts.keys()):
        length = cuts.get(number, length)
        phases.append(Phase(number, schedule.phase(number).rows, length))
    return BatchSchedule(tuple(phases), sequence)


def parse(entry: str) -> tuple[int, Span]:
    """Parse SIZE@SPAN. Raises ValueError if it is malformed."""
    match = _PHASE.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not SIZE@SPAN, such as 32@10%")
    span = Span.parse(match[2])
    if span.unit == "second":
        raise ValueError(f"{entry!r} ends at a time, not at a step, a share or after tokens")
    return int(match[1]), span
