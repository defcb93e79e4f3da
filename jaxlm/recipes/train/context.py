"""Everything around the computation of a run: options of a start, processes, files, console."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm.parallel.cluster import ProcessSpec

if TYPE_CHECKING:
    from jaxlm.checkpoint.store import Store
    from jaxlm.monitor.console import Console
    from jaxlm.monitor.sinks import Callbacks
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.train.checkpointing import Rewinds
    from jaxlm.training.processes import ProcessGroup
    from jaxlm.training.rundir import RunDir


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Options of a resumed run beyond its config.

    Args:
      start_at: committed step to resume from; by default the newest.
      force: abandon the steps after `start_at`.
      reset_optimizer: keep the parameters and reset the optimizer state.
      cast: convert stored arrays to the dtypes of this config.
      allow_change: settings that may differ from those of the run.
    """

    start_at: int | None = None
    force: bool = False
    reset_optimizer: bool = False
    cast: bool = False
    allow_change: tuple[str, ...] = ()

    @property
    def allowed(self) -> tuple[str, ...]:
        """Settings, or whole sections, that may differ."""
        reset = ("optim", "schedule") if self.reset_optimizer else ()
        return (*self.allow_change, *reset, *(("precision",) if self.cast else ()))

    def __str__(self) -> str:
        """Return the flags of these options; empty for the defaults."""
        flags = {
            f"--start_at={self.start_at}": self.start_at is not None,
            "--force": self.force,
            "--reset_optimizer": self.reset_optimizer,
            "--cast": self.cast,
            f"--allow_change={','.join(self.allow_change)}": bool(self.allow_change),
        }
        return " ".join(flag for flag, is_set in flags.items() if is_set)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options of one start of a run beyond its config.

    Args:
      workdir: the run directory.
      arguments: the words after `jaxlm`, for command.sh.
      resume: options of a resumed run.
      process: this process among those of the run.
      init_from: RUN[@STEP] whose weights a new run starts from.
      stop_at: completed steps at which this start ends.
      cpu_devices: number of devices that the CPU is split into.
      quiet: print no rows on stderr.
    """

    workdir: Path
    arguments: list[str]
    resume: ResumeOptions
    process: ProcessSpec
    init_from: str | None = None
    stop_at: int | None = None
    cpu_devices: int | None = None
    quiet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """The run around its compiled programs, shared by the trainer and its parts.

    Args:
      run: the resolved config.
      options: options of this start.
      processes: the processes of the run, with watchdog and stop request.
      directory: the run directory.
      console: output for people.
      store: checkpoints.
      rewinds: returns to earlier steps so far.
      callbacks: functions of the caller.
    """

    run: Run
    options: StartOptions
    processes: ProcessGroup
    directory: RunDir
    console: Console
    store: Store
    rewinds: Rewinds
    callbacks: Callbacks
