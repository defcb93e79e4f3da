"""Each start of a run, kept for good: from which step it went on, under which config, with how much of its state.

A step is done again under the start that did it. The newest is not enough for that, and checkpoints come and go.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.config import ABSENT, Change
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Shape
from jaxlm.recipes.resume import Wish
from jaxlm.recipes.rewinding import Rewind
from jaxlm.train.rundir import RunDir

FILE = "starts.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where training went on.

    Args:
      step: the completed updates; those after it are this start's.
      rewinds: how many rewinds had been made by then.
      reset_optimizer: whether the optimizer's state began anew at this step.
      cast: whether the arrays were taken over into other dtypes at this step.
      config: the resolved config.
      data: the fingerprint of the data.
      versions: of packages, and digests of the rooms of this one.
    """

    step: int
    rewinds: int
    reset_optimizer: bool
    cast: bool
    config: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]

    @property
    def wish(self) -> Wish:
        """How the state of its step was taken up."""
        return Wish(reset_optimizer=self.reset_optimizer, cast=self.cast)


SHAPE: Shape = dict.fromkeys(("step", "rewinds"), sinks.is_step) | {
    "reset_optimizer": lambda value: isinstance(value, bool),
    "cast": lambda value: isinstance(value, bool),
    "config": lambda value: isinstance(value, dict),
    "data": lambda value: isinstance(value, dict),
    "versions": lambda value: isinstance(value, dict),
}


def note(directory: RunDir, start: Start) -> None:
    """Writes a start down, through to the disk."""
    sink = directory.journal(FILE)
    try:
        sink.write(dataclasses.asdict(start))
    finally:
        sink.close()


def read(workdir: Path) -> list[Start]:
    """The starts of a run, the newest last. Raises DataError where the file is damaged."""
    names = [field.name for field in dataclasses.fields(Start)]
    return [
        Start(**{name: record[name] for name in names})
        for record in sinks.read(workdir / FILE, SHAPE)
    ]


def upgraded(workdir: Path, versions: dict[str, str]) -> list[Change]:
    """What computes otherwise than when the newest start of a run was made. Raises DataError as `read` does."""
    if not (workdir / FILE).exists():
        return []
    before = read(workdir)[-1].versions
    return [
        Change(name, before.get(name, ABSENT), versions.get(name, ABSENT))
        for name in sorted(before | versions)
        if before.get(name) != versions.get(name)
    ]


def way(starts: Sequence[Start], rewinds: Sequence[Rewind]) -> list[Start]:
    """What led to the newest step after these rewinds: each start with those of its steps that no later one did again.

    A rewind is a start of its own, under the config of the process that made it.
    """
    known = [start for start in starts if start.rewinds <= len(rewinds)]
    found: list[Start] = []
    for start, after in zip(known, [*known[1:], None], strict=True):
        found = [*_before(found, start.step), start]
        for rewind in rewinds[start.rewinds : after.rewinds if after else None]:
            again = dataclasses.replace(start, step=rewind.to)
            if rewind.to > start.step:  # a checkpoint of this very start
                again = dataclasses.replace(again, reset_optimizer=False, cast=False)
            found = [*_before(found, rewind.to), again]
    return found


def _before(starts: Sequence[Start], step: int) -> list[Start]:
    return [start for start in starts if start.step < step]
