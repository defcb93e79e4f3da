"""Training as a function, for notebooks and for the command line."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.core import config as configs
from jaxlm.core.config import Loaded
from jaxlm.core.paths import check_local
from jaxlm.core.values import show
from jaxlm.monitor.sinks import Callback, Callbacks
from jaxlm.parallel import cluster
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.recipes.config import Run
from jaxlm.training import lock

if TYPE_CHECKING:  # it imports JAX, and a wrong setting is told before that
    from jaxlm.recipes.train.resume import ResumeOptions


@dataclasses.dataclass(frozen=True)
class Result:
    """Where a run has come to."""

    workdir: Path
    step: int  # completed
    complete: bool  # whether these are all
    metrics: dict[str, Any]  # of the newest evaluation, and what `jaxlm train --json` says beside


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
    wish: "ResumeOptions | None" = None,
    place: ProcessSpec | None = None,
    arguments: Sequence[str] | None = None,
) -> Result:
    """Trains, or goes on training, in a run directory: `jaxlm.training`, and what `jaxlm train` calls.

    Each callback is called in the first process as `callback(step, metrics)` with every record of metrics.jsonl, once it is
    written there: logged steps have the `split` train, evaluations that of their set. A true answer ends the run after the
    step that is being computed, its state saved: the same call goes on from there. So does an exception, which is raised
    once the state is saved. After a rewind steps come again.

    Args:
      config: a path as --config takes it, a ConfigDict as `jaxlm.core.config.new` makes them, or a `Run`.
      workdir: the run directory; the same one goes on where it stopped.
      settings: values by path, such as `{"optim.lr": 1e-3}`, over those of the config.
      stop_at: save after this step and return.
      init_from: RUN[@STEP], whose weights the run begins with.
      cpu_devices: split the CPU into so many devices.
      quiet: show no rows on stderr.
      wish: how a run shall go on beyond its config; None is as it was.
      place: which process of several this is; None is what the environment says.
      arguments: the words after `jaxlm` for command.sh; None makes them.

    Raises:
      JaxlmError: for whatever a user can cause; what a callback has raised.
    """
    check_local(workdir, "workdir")
    place = place or cluster.process_spec(os.environ)
    if place.count in (None, 1):  # one of several would find the lock of the first
        lock.check_free(Path(workdir) / "lock")
    loaded = _loaded(config, settings or {})

    from jaxlm.recipes.train.pretrain import Options, pretrain
    from jaxlm.recipes.train.resume import ResumeOptions

    options = Options(
        workdir=Path(workdir),
        arguments=_words(config, workdir, settings or {}) if arguments is None else [*arguments],
        wish=wish or ResumeOptions(),
        place=place,
        init_from=init_from,
        stop_at=stop_at,
        cpu_devices=cpu_devices,
        quiet=quiet,
    )
    answer = pretrain(loaded, options, Callbacks(callbacks))
    known = {name: answer.pop(name) for name in ("workdir", "step", "complete")}
    return Result(Path(known["workdir"]), known["step"], known["complete"], answer)


def _loaded(config: Any, settings: Mapping[str, Any]) -> Loaded:
    overrides = [(path, show(value)) for path, value in settings.items()]
    if isinstance(config, Loaded):
        return config
    if isinstance(config, str | os.PathLike):
        return configs.load(Run, os.fspath(config), overrides)
    raw = configs.to_json(config) if isinstance(config, Run) else config.to_dict()
    return configs.loaded_json(Run, raw, "the config that was given", overrides)


def _words(config: Any, workdir: Any, settings: Mapping[str, Any]) -> list[str]:
    """A command that does the same; a config that is no file is the one that the run writes."""
    is_file = isinstance(config, str | os.PathLike)
    file = os.fspath(config) if is_file else os.path.join(workdir, "config.json")
    flags = [f"--config.{path}={show(value)}" for path, value in settings.items()]
    return ["train", f"--config={file}", f"--workdir={os.fspath(workdir)}", *flags]
