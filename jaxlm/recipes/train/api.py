"""Training as a function, for notebooks and for the command line, and the options of a start.

Example:
  >>> from jaxlm.recipes.train.api import ResumeOptions
  >>> str(ResumeOptions(start_at=500, force=True))
  '--start_at=500 --force'
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.core import config as configs
from jaxlm.core import notebook_code, sections, user_code
from jaxlm.core.callbacks import Callback
from jaxlm.core.config import Loaded, Origin
from jaxlm.core.disk import check_local
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.core.python_call import python_errors
from jaxlm.core.sections import show
from jaxlm.monitor.sinks import Callbacks, Function
from jaxlm.parallel import cluster
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.recipes.config import Run
from jaxlm.training import lock

if TYPE_CHECKING:
    from jaxlm.checkpoint.store import Store
    from jaxlm.data.from_python import PythonData
    from jaxlm.monitor.console import Console
    from jaxlm.recipes.train.checkpointing import Rewinds
    from jaxlm.training.processes import ProcessGroup
    from jaxlm.training.rundir import RunDir


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Options of a resumed run beyond its config."""

    start_at: int | None = None  # committed step to resume from; by default the newest
    force: bool = False  # abandon the steps after `start_at`
    reset_optimizer: bool = False  # keep the parameters and reset the optimizer state
    cast: bool = False  # convert stored arrays to the dtypes of this config
    allow_change: tuple[str, ...] = ()  # settings that may differ from those of the run

    def __post_init__(self) -> None:
        """Raise CommandError if `allow_change` is a text, whose letters would be settings."""
        value: Any = self.allow_change
        if isinstance(value, str):
            where, fix = f"allow_change={value!r}", f"allow_change={tuple(value.split(','))!r}"
            raise CommandError("allow_change is a text", where=where, why="it is a tuple", fix=fix)

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
    """Options of one start of a run beyond its config."""

    workdir: Path
    arguments: list[str]  # the words after `jaxlm`, for command.sh
    resume: ResumeOptions
    process: ProcessSpec
    init_from: str | None = None  # RUN[@STEP] whose weights a new run starts from
    stop_at: int | None = None  # completed steps at which this start ends
    cpu_devices: int | None = None  # number of devices that the CPU is split into
    quiet: bool = False  # print no rows on stderr
    verbose: bool = False  # print the whole header, which log.txt has anyway

    @property
    def resume_command(self) -> str:
        """Command that resumes the run; words for several processes, and before it has begun."""
        if self.process.count not in (None, 1) or not (self.workdir / "config.json").exists():
            return "run the same command again"
        devices = "" if self.cpu_devices is None else f" --cpu_devices={self.cpu_devices}"
        return f"jaxlm train --workdir={shlex.quote(str(self.workdir))}{devices}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """The run around its compiled programs, shared by the trainer and its parts."""

    run: Run
    options: StartOptions
    processes: ProcessGroup  # the processes of the run, with watchdog and stop request
    directory: RunDir
    console: Console
    store: Store
    rewinds: Rewinds  # returns to earlier steps so far
    callbacks: Callbacks


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run."""

    workdir: Path
    step: int  # completed steps
    complete: bool  # whether these are all steps of the run
    # figures of the newest evaluation, and the other keys of `jaxlm train --json`.
    metrics: dict[str, Any]


def train(
    config: Any,
    *,
    workdir: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    train_data: PythonData | None = None,
    validation_data: PythonData | None = None,
    callbacks: Sequence[Function | Callback] = (),
    stop_at: int | None = None,
    init_from: str | None = None,
    cpu_devices: int | None = None,
    quiet: bool = False,
    verbose: bool = False,
    resume: ResumeOptions | None = None,
    process: ProcessSpec | None = None,
    arguments: Sequence[str] | None = None,
) -> Result:
    """Train in a run directory, or resume there. `jaxlm train` calls this function.

    Each function of `callbacks` is called in the first process as `callback(step, metrics)` with
    every record of metrics.jsonl, after it was written: logged steps have the `split` train,
    evaluations that of their set. A true answer ends the run after the step that is being computed,
    with its state saved; the same call resumes from there. An exception does so too, and is raised
    once the state is saved. After a rewind the same steps occur again. Objects of `jaxlm.Callback`
    see the state and the batch too, in all processes.

    Data from Python is written to the cache and read from there, so that the run is packed, resumed
    and evaluated as one on files. config.json has its digest as `python:DIGEST`: a call with other
    data does not resume the run. It is a list or another iterable that can be iterated again, or a
    function that returns one, of texts, of records (dicts, see `data.kind`), or of documents of
    token ids: arrays, or an array with a document in each row. A dict of those has several sources
    by name, the parts of a mixture.

    Args:
      config: a name or path as --config takes it, a dict of settings by path (`{"optim.lr": 1e-3}`,
        nested or not), a ConfigDict of `jaxlm.core.config.new`, or a `Run` (`jaxlm.Config`).
      workdir: the run directory; with a run in it, that run is resumed.
      settings: values by path, such as `{"optim.lr": 1e-3}`, nested or not, which override those of
        the config.
      train_data: data to train on, in place of `data.train`.
      validation_data: data to evaluate on, in place of `data.validation`.
      callbacks: functions that get each record, and objects of `jaxlm.Callback`.
      stop_at: completed steps after which to save and return.
      init_from: RUN[@STEP] whose weights a new run starts from.
      cpu_devices: number of devices that the CPU is split into.
      quiet: print no rows on stderr.
      verbose: print the whole header, which log.txt in the run directory has anyway.
      resume: options of a resumed run beyond its config.
      process: this process among several; by default, from the environment.
      arguments: the words after `jaxlm` for command.sh; by default, made from the arguments.

    Raises JaxlmError for every problem that a user can cause; also what a callback raised. What
    its `fix` names of the command line is an argument of this function.
    """
    with python_errors() if arguments is None else contextlib.nullcontext():
        if arguments is None:
            _check_arguments(config, settings, callbacks, resume)
            for name, value in (("stop_at", stop_at), ("cpu_devices", cpu_devices)):
                _check_count(name, value)
            init_from = None if init_from is None else os.fspath(init_from)
        check_local(workdir, "workdir")
        process = process or cluster.process_spec(os.environ)
        if process.count in (None, 1):  # several processes would find the lock of the first
            lock.check_free(Path(workdir) / "lock")
        settings = _flat(settings or {})
        data = {"train": train_data, "validation": validation_data}
        # Before JAX is imported: a wrong setting is refused at once.
        loaded, settings = _with_data(config, settings, data)
        loaded = _with_current_parts(loaded, Path(workdir))

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
            verbose=verbose,
        )
        answer = run_training(loaded, options, Callbacks(callbacks))
        workdir, step, complete = (answer.pop(name) for name in ("workdir", "step", "complete"))
        return Result(Path(workdir), step, complete, answer)


def _check_arguments(config: Any, settings: Any, callbacks: Any, resume: Any) -> None:
    """Raise CommandError if an argument has a type that would fail later, after a compilation."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise _wrong("callbacks", callbacks, "it is no list", f"callbacks=[{_name(callbacks)}]")
    for number, each in enumerate(callbacks):
        if isinstance(each, type) and issubclass(each, Callback):
            why, fix = "it is a class, and its object is called", f"callbacks=[{each.__name__}()]"
        elif isinstance(each, Callback) or callable(each):
            continue
        else:
            why, fix = "it is no function and no jaxlm.Callback", "callbacks=[print]"
        raise _wrong(f"callbacks[{number}]", each, why, fix)
    if resume is not None and not isinstance(resume, ResumeOptions):
        named = f"**{resume!r}" if isinstance(resume, dict) else "force=True"
        why, fix = "it is no jaxlm.ResumeOptions", f"resume=jaxlm.ResumeOptions({named})"
        raise _wrong("resume", resume, why, fix)
    if settings is not None and not isinstance(settings, Mapping):
        fix = "settings={'optim.lr': 1e-3}"
        raise _wrong("settings", settings, "it is no dict of values by path", fix)
    kinds = (str, os.PathLike, Mapping, Run, Loaded)
    if not isinstance(config, kinds) and not hasattr(config, "to_dict"):
        why = "it is no name, path, dict of settings, ConfigDict or jaxlm.Config"
        raise _wrong("config", config, why, "config='quickstart'")


def _check_count(name: str, value: Any) -> None:
    """Raise CommandError unless an argument is None or a number of at least 1."""
    if value is None or (hasattr(value, "__index__") and value >= 1):
        return
    is_number = isinstance(value, int | float) and value < 1
    why = "it is below 1" if is_number else "it is no whole number"
    raise _wrong(name, value, why, f"{name}=1")


def _wrong(name: str, value: Any, why: str, fix: str) -> CommandError:
    where = f"{name}={_name(value)[:80]}"
    return CommandError(f"{name} has a wrong value", where=where, why=why, fix=fix)


def _name(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def _with_current_parts(loaded: Loaded, workdir: Path) -> Loaded:
    """Return the config with the classes and rewards of the user as their files are now.

    The config of a run records the digests of the files, so that a changed file is found as every
    other changed setting is. Raises ConfigError if a file is gone.
    """
    run: Run = loaded.value
    raw: dict[str, Any] = {}
    changed = []
    for name, known in sections.fields(Run).items():
        section = getattr(run, name)
        source = user_code.source_of(section)
        if source is None:
            continue
        try:
            arm = user_code.find(known.arms, sections.arm_name(type(section)))
        except ConfigError as error:
            copy = workdir / user_code.FOLDER / user_code.copy_name(section)
            if not copy.is_file():
                raise
            place = sections.arm_name(type(section)).rpartition(":")[0]
            fix = shlex.join(["cp", str(copy), place])
            raise ConfigError(error.what, where=error.where, why=error.why, fix=fix) from error
        if arm is not type(section):
            raw = raw or configs.to_json(run)
            del raw[name]["source"]
            changed.append(f"{name}.source")
    for place, digest in run.reward.recorded_files:
        copy = workdir / user_code.FOLDER / user_code.name_of_copy(place, digest)
        try:
            is_same = user_code.named_file(place, "reward.functions").digest == digest
        except ConfigError as error:
            if not copy.is_file():
                raise
            fix = shlex.join(["cp", str(copy), place])
            raise ConfigError(error.what, where=error.where, why=error.why, fix=fix) from error
        if not is_same:
            raw = raw or configs.to_json(run)
            raw["reward"].pop("sources", None)
            changed.append("reward.sources")
    if not changed:
        return loaded
    current = configs.loaded_json(Run, raw, "config.json").value
    origin = Origin("file", "its file")
    return Loaded(current, loaded.provenance | dict.fromkeys(changed, origin))


def _with_data(
    config: Any, settings: Mapping[str, Any], data: Mapping[str, PythonData | None]
) -> tuple[Loaded, Mapping[str, Any]]:
    """Return the config with the data that came from Python, and the settings that name it.

    That data is what the caller passed, and the results of functions that the config names.
    """
    from jaxlm.data import from_python

    present = {name: value for name, value in data.items() if value is not None}
    unknown = {
        f"data.{name}": tuple(
            f"{source}={from_python.PREFIX}" if source else from_python.PREFIX
            for source in (value if isinstance(value, Mapping) else [""])
        )
        for name, value in present.items()
    }
    loaded = _loaded(config, {**settings, **unknown})
    section = loaded.value.data
    passed = {
        f"data.{name}": from_python.store(value, f"{name}_data", section)
        for name, value in present.items()
    }
    called = from_python.resolved(section)
    entries = {f"data.{name}": getattr(called, name) for name in ("train", "validation")} | passed
    if not passed and called is section:
        return loaded, settings
    train = entries["data.train"]
    if from_python.is_tokens(train) and any(each.endswith("%") for each in section.validation):
        raise ConfigError(
            "a share of token ids cannot be held out",
            where=f"data.validation = {section.validation[0]}",
            why="a held-out part is cut from texts, and the training data is token ids",
            fix="train_data=ids[:-10_000], validation_data=ids[-10_000:]\n"
            "settings={'data.validation': ()}    # no evaluation",
        )
    run = loaded.value.changed({path: list(each) for path, each in entries.items()})
    origins = {path: Origin("command line", f"{path[5:]}_data=") for path in passed}
    return Loaded(run, loaded.provenance | origins), {**settings, **passed}


def _loaded(config: Any, settings: Mapping[str, Any]) -> Loaded:
    if isinstance(config, Mapping):  # read like flags on top of the defaults
        settings = {**_flat(config), **settings}
    texts = {k: notebook_code.named(v) if isinstance(v, type) else v for k, v in settings.items()}
    overrides = [(path, show(value)) for path, value in texts.items()]
    if isinstance(config, Loaded):
        return config
    if isinstance(config, str | os.PathLike):
        return configs.load(Run, os.fspath(config), overrides)
    if isinstance(config, Mapping):
        raw: dict[str, Any] = {}
    else:
        raw = configs.to_json(config) if isinstance(config, Run) else config.to_dict()
    return configs.loaded_json(Run, raw, "the config that was given", overrides)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by their whole path."""
    flat: dict[str, Any] = {}
    for path, value in settings.items():
        inner = _flat(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{path}.{name}".removesuffix("."): each for name, each in inner.items()}
    return flat


def _words(config: Any, workdir: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return a command that does the same; a config that is not a file is that of the run."""
    is_file = isinstance(config, str | os.PathLike)
    file = os.fspath(config) if is_file else os.path.join(workdir, "config.json")
    flags = [f"--config.{path}={show(value)}" for path, value in settings.items()]
    return ["train", f"--config={file}", f"--workdir={os.fspath(workdir)}", *flags]
