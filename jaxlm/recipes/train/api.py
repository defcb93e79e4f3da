"""Training as a function, for notebooks and for the command line."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core import config as configs
from jaxlm.core.config import Loaded
from jaxlm.core.disk import check_local
from jaxlm.core.sections import show
from jaxlm.monitor.sinks import Callback, Callbacks
from jaxlm.parallel import cluster
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.context import ResumeOptions, StartOptions
from jaxlm.training import lock


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run.

    Args:
      workdir: the run directory.
      step: completed steps.
      complete: whether these are all steps of the run.
      metrics: figures of the newest evaluation, and the other keys of `jaxlm train --json`.
    """

    workdir: Path
    step: int
    complete: bool
    metrics: dict[str, Any]


def train(
    config: Any,
    *,
    workdir: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    stop_at: int | None = None,
    init_from: str | None = None,
    cpu_devices: int | None = None,
    quiet: bool = False,
    resume: ResumeOptions | None = None,
    process: ProcessSpec | None = None,
    arguments: Sequence[str] | None = None,
) -> Result:
    """Train in a run directory, or resume there. `jaxlm train` calls this function.

    Each callback is called in the first process as `callback(step, metrics)` with every record of
    metrics.jsonl, after it was written: logged steps have the `split` train, evaluations that of
    their set. A true answer ends the run after the step that is being computed, with its state
    saved; the same call resumes from there. An exception does so too, and is raised once the state
    is saved. After a rewind the same steps occur again.

    Args:
      config: a path as --config takes it, a ConfigDict of `jaxlm.core.config.new`, or a `Run`.
      workdir: the run directory; with a run in it, that run is resumed.
      settings: values by path, such as `{"optim.lr": 1e-3}`, which override those of the config.
      callbacks: functions that get each record.
      stop_at: completed steps after which to save and return.
      init_from: RUN[@STEP] whose weights a new run starts from.
      cpu_devices: number of devices that the CPU is split into.
      quiet: print no rows on stderr.
      resume: options of a resumed run beyond its config.
      process: this process among several; by default, from the environment.
      arguments: the words after `jaxlm` for command.sh; by default, made from the arguments.

    Raises:
      JaxlmError: for every problem that a user can cause; also what a callback raised.
    """
    check_local(workdir, "workdir")
    process = process or cluster.process_spec(os.environ)
    if process.count in (None, 1):  # several processes would find the lock of the first
        lock.check_free(Path(workdir) / "lock")
    settings = settings or {}
    loaded = _loaded(config, settings)  # before JAX is imported: a wrong setting is refused at once

    from jaxlm.recipes.train.run import run_training

    options = StartOptions(
        workdir=Path(workdir),
        arguments=_words(config, workdir, settings) if arguments is None else [*arguments],
        resume=resume or ResumeOptions(),
        process=process,
        init_from=init_from,
        stop_at=stop_at,
        cpu_devices=cpu_devices,
        quiet=quiet,
    )
    answer = run_training(loaded, options, Callbacks(callbacks))
    workdir, step, complete = (answer.pop(name) for name in ("workdir", "step", "complete"))
    return Result(Path(workdir), step, complete, answer)


def _loaded(config: Any, settings: Mapping[str, Any]) -> Loaded:
    overrides = [(path, show(value)) for path, value in settings.items()]
    if isinstance(config, Loaded):
        return config
    if isinstance(config, str | os.PathLike):
        return configs.load(Run, os.fspath(config), overrides)
    raw = configs.to_json(config) if isinstance(config, Run) else config.to_dict()
    return configs.loaded_json(Run, raw, "the config that was given", overrides)


def _words(config: Any, workdir: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return a command that does the same; a config that is not a file is that of the run."""
    is_file = isinstance(config, str | os.PathLike)
    file = os.fspath(config) if is_file else os.path.join(workdir, "config.json")
    flags = [f"--config.{path}={show(value)}" for path, value in settings.items()]
    return ["train", f"--config={file}", f"--workdir={os.fspath(workdir)}", *flags]
