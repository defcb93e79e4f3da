"""The checkpoint that a run resumes from, allowed changes since, and the history of starts."""

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.store import Store
from jaxlm.core import batch_schedule, config, disk
from jaxlm.core.callbacks import Log
from jaxlm.core.config import ABSENT, Change, Loaded, Origin
from jaxlm.core.errors import ANOTHER, CommandError, ConfigError, DataError, listed
from jaxlm.core.nearest import nearest_word
from jaxlm.core.problems import short
from jaxlm.data import mixture_config
from jaxlm.models.cost.tensors import tensors
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Shape
from jaxlm.optim import average_config, schedule_config
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.api import ResumeOptions
from jaxlm.recipes.train.checkpointing import Rewind, Rewinds
from jaxlm.training.rundir import STARTS_FILE, RunDir, imported_facts, read_json

# Sections and settings that do not change the numbers of a run.
FREE = (
    *("log", "eval", "sample", "checkpoint", "profile", "watch", "mesh"),
    *("data.workers", "data.damaged", "data.prefetch", "loss.chunk"),
    *("guard.budget", "guard.rewinds", "guard.rewind_steps", "guard.skip"),
    *("guard.compare_every", "guard.divergence"),
    *("train.stack", "train.attention", "train.remat", "train.pipeline"),
    *("reward.workers", "reward.tolerance"),
    *("train.pipeline_repeats", "train.offload", "train.patience", "train.control"),
)
NOT_FREE = ("eval.follow",)  # losses of two sets cannot be ranked together
LINES = 4  # of an error, for differences


def with_own_validation(loaded: Loaded, workdir: Path) -> tuple[Loaded, list[str]]:
    """Return the config with the validation data of the run in `workdir`, and lines to print.

    Without `data.validation`, earlier versions validated on Python's library, and a run keeps its
    data.
    """
    run: Run = loaded.value
    saved_config = read_json(workdir, "config.json") if (workdir / "config.json").exists() else {}
    saved = saved_config.get("data") if isinstance(saved_config, dict) else None
    validation, text = ["stdlib:validation"], list(run.data.train)
    if (
        loaded.provenance["data.validation"].kind != "default"
        or list(run.data.validation) == validation
        or not isinstance(saved, dict)
        or (saved.get("train"), saved.get("validation")) != (text, validation)
    ):
        return loaded, []
    origin = Origin("file", short(workdir / "config.json"))
    changed = Loaded(
        run.changed({"data.validation": validation}),
        loaded.provenance | {"data.validation": origin},
    )
    line = (
        f"data.validation is {validation[0]}, as when this run began;"
        f" a new run would have {', '.join(run.data.validation)} of data.train"
    )
    return changed, [line]


def check(saved: Run, run: Run, options: ResumeOptions, completed: int) -> list[Change]:
    """Return the changes of a config with which a run is resumed.

    Logging, checkpoints and layout may change, and `train.steps` if the schedule and the average of
    the parameters do not depend on it. Other changes need to be allowed, setting by setting. Raises
    ConfigError if a change is not allowed; it lists all of them.
    """
    changes = config.diff(saved, run)
    refused = [
        change for change in changes if not _is_free(change, run, options.allowed, completed)
    ]
    if refused:
        raise ConfigError(
            f"{len(refused)} setting{'s differ' if len(refused) > 1 else ' differs'}"
            " from the run in this directory",
            where=f"after step {completed} of {saved.train.steps}",
            why=listed([*map(str, refused)], LINES),
            fix="\n".join([ANOTHER, *_flags_that_allow(refused, saved, run)]),
        )
    return changes


def check_place(workdir: Path, run: Run, options: ResumeOptions) -> None:
    """Raise ConfigError if the run in the directory keeps its checkpoints at another place.

    The setting may change once the checkpoints were copied there.
    """
    path, new = "checkpoint.directory", run.checkpoint.directory
    if not (workdir / "config.json").exists() or path in options.allowed:
        return
    old = object_store.url_of(workdir)
    if old != new:
        raise ConfigError(
            "the checkpoints of this run are at another place",
            where=f"{path} = {new}",
            why=f"they are in {old or workdir / 'checkpoints'}, and a run resumes from them",
            fix=f"--config.{path}={old}\n--allow_change={path}    # if they were copied there",
        )


def load_resume_record(
    store: Store, step: int | None, run: Run, options: ResumeOptions
) -> tuple[dict[str, Any] | None, list[Change]]:
    """Return the metadata of a step and the config changes since; (None, []) for a new run.

    Raises ConfigError if a change is not allowed.
    """
    if step is None:
        _check_names(options.allow_change, [run])
        return None, []
    meta = store.record(step).meta
    saved: Run = config.from_json(Run, meta["config"])
    _check_names(options.allow_change, [run, saved])
    return meta, check(saved, run, options, step)


def _check_names(names: Sequence[str], runs: Sequence[Run]) -> None:
    """Raise CommandError if a name is no setting and no section of one of the configs."""
    paths = [path.split(".") for run in runs for path in config.flatten(run)]
    known = {".".join(path[:count]) for path in paths for count in range(1, len(path) + 1)}
    unknown = [name for name in names if name not in known]
    if unknown:
        near = {name: nearest_word(name, known) for name in unknown}
        mended = [near.get(name, name) for name in names]
        flag = f"--allow_change={','.join(filter(None, mended))}"
        raise CommandError(
            f"{unknown[0]!r} is no setting and no section of settings",
            where=f"--allow_change={','.join(names)}",
            why=f"the nearest is {near[unknown[0]]}"
            if near[unknown[0]]
            else "none has a like name",
            fix=flag if all(mended) else "jaxlm config show    # lists the settings",
        )


def saved_run(store: Store, options: ResumeOptions, rewinds: Rewinds) -> Run | None:
    """Return the config of the checkpoint that a run resumes from; None for a new run."""
    latest = peek_latest(store, options, rewinds)
    if latest is None:
        return None
    saved: Run = config.from_json(Run, store.record(latest).meta["config"])
    return saved


def is_complete(meta: dict[str, Any] | None, run: Run, changes: list[Change]) -> bool:
    """Return whether no step is left to train."""
    if meta is None:
        return False
    return meta["step"] >= run.train.steps or (meta["finished"] and not changes)


def check_same_tokenizer(
    saved: dict[str, Any], current: dict[str, Any], options: ResumeOptions, workdir: Path
) -> None:
    """Raise ConfigError if a run would resume with a tokenizer of other ids.

    A tokenizer that is trained on `data.train` differs if the text does, so to allow another text
    is not to allow this. The file of the run would be replaced, and with it the only one that its
    checkpoints can be read with.

    Args:
      saved: fingerprint of the data in the checkpoint.
      current: fingerprint of the data of this start.
      options: has the changes that are allowed.
      workdir: the run directory.
    """
    path = "data.tokenizer"
    if saved.get("tokenizer") == current.get("tokenizer") or path in options.allowed:
        return
    file = workdir / "tokenizer"
    is_kept = file.is_file() and disk.sha256(file) == saved.get("tokenizer")
    flag = shlex.quote(f"--config.{path}={file}")
    raise ConfigError(
        "the tokenizer differs from that of this run",
        where=path,
        why="its ids are rows of the model's embedding, and a tokenizer is trained again if the "
        f"text changes; --allow_change={path} replaces {file}",
        fix=f"{flag} --allow_change=data" if is_kept else ANOTHER,
    )


def check_data(
    saved: dict[str, Any], current: dict[str, Any], options: ResumeOptions
) -> list[Change]:
    """Return the changes of the data's fingerprint with which a run is resumed.

    Raises ConfigError if the data differs and that is not allowed; it lists all changes.
    """

    def shown(value: Any) -> str:
        return value[:12] if isinstance(value, str) else str(value)

    changes = [
        Change(f"data ({name})", shown(saved.get(name)), shown(current.get(name)))
        for name in saved | current
        if saved.get(name) != current.get(name)
    ]
    if changes and "data" not in options.allowed:
        raise ConfigError(
            "the data differs from that of this run",
            where="data",
            why=listed([*map(str, changes)], LINES),
            fix=f"{ANOTHER}\n--allow_change=data    # resumes on the new data, from the same step",
        )
    return changes


def _flags_that_allow(refused: list[Change], saved: Run, run: Run) -> list[str]:
    """Return the line of flags that allow the changes; none if the parameters have other shapes."""
    if _shapes(saved) != _shapes(run):
        return []
    paths = [change.path for change in refused]
    flags = []
    before, after = saved.train.epochs, run.train.epochs
    # A run that resumes has the steps that it began with.
    if before and after and after > before and "train.steps" not in paths:
        flags.append(f"--config.train.steps={math.ceil(saved.train.steps * after / before)}")
        paths.append("train.steps")
    if {"optim.name", "optim.freeze"} & set(paths):  # other optimizer state
        flags.append("--reset_optimizer")
        paths = [path for path in paths if not path.startswith(("optim.", "schedule."))]
    if {"precision.params", "precision.moments"} & set(paths):
        flags.append("--cast")
        paths = [path for path in paths if not path.startswith("precision.")]
    return [" ".join([*flags, *([f"--allow_change={','.join(paths)}"] if paths else [])])]


def _shapes(run: Run) -> list[tuple[str, tuple[int, ...]]]:
    """Return path and shape of each parameter of the model, with any vocabulary if it is auto."""
    vocab = 256 if run.model.vocab == "auto" else run.model.vocab
    return [(each.path, each.shape) for each in tensors(run.decoder(vocab))]


def _is_free(change: Change, run: Run, allowed: tuple[str, ...], completed: int) -> bool:
    def is_in(names: Sequence[str]) -> bool:
        return any(change.path == name or change.path.startswith(f"{name}.") for name in names)

    if change.path not in NOT_FREE and is_in(FREE):
        return True
    if change.path == "train.steps" and run.train.steps >= completed:
        warmups = (*run.train.batch_warmup, *run.data.sequence_warmup)
        moving = [  # a share depends on the number of steps
            *schedule_config.spans(run.schedule).values(),
            *average_config.spans(run.average).values(),
            *mixture_config.change_spans(run.data.mixture),
            *(batch_schedule.parse(entry)[1] for entry in warmups),
        ]
        if all(span.unit != "share" or not span.amount for span in moving):
            return True
    return is_in(allowed)


class Selection(NamedTuple):
    """The step to resume from, None for a new run, and the steps to quarantine.

    Selection only reads: a refused start changes nothing.
    """

    step: int | None
    aside: dict[int, tuple[str, str]]  # the problem for the log, and the stored reason

    def clear(self, store: Store, warn: Log) -> None:
        """Move the steps to the quarantine. Raise NotWritable."""
        for step, (problem, reason) in self.aside.items():
            warn(f"checkpoint {step} {problem}; it is in {store.quarantine(step, reason)}")


@dataclasses.dataclass
class ResumePoint:
    """The checkpoint that a run resumes from, and the mesh."""

    meta: dict[str, Any] | None  # metadata of the checkpoint; None for a new run
    changes: list[Change]  # of config, data and versions since the checkpoint
    selection: Selection | None = None  # None in all processes but the first
    mesh: Mesh | None = None  # of the run, if it was built

    @property
    def start(self) -> int:
        """Completed steps."""
        return self.meta["step"] if self.meta else 0


def peek_latest(store: Store, options: ResumeOptions, rewinds: Rewinds) -> int | None:
    """Return the step that `select` will choose unless it is damaged; its arrays are not read.

    Raises CommandError if the step of --start_at does not exist.
    """
    abandoned = rewinds.abandoned_steps(store)
    steps = [step for step in store.steps() if step not in abandoned]
    if options.start_at is not None:
        if options.start_at not in steps:
            raise CommandError(
                f"there is no checkpoint of step {options.start_at}",
                where=f"--start_at={options.start_at}",
                why=f"committed steps: {', '.join(map(str, steps)) or 'none'}",
                fix=f"--start_at={steps[-1]}" if steps else "leave --start_at out",
            )
        steps = [options.start_at]
    for step in reversed(steps):
        with contextlib.suppress(DataError):
            return store.record(step).step
    return None


def select(store: Store, options: ResumeOptions, rewinds: Rewinds) -> Selection:
    """Return the step to resume from, after every byte of it was verified.

    Raises:
      CommandError: if the step of --start_at is not the newest and --force is not given.
      DataError: if that step is damaged, or all steps are.
    """
    abandoned = rewinds.abandoned_steps(store)
    damaged: dict[int, list[str]] = {}
    newest = store.latest_valid(damaged.__setitem__, without=abandoned)
    aside = {step: ("was abandoned by a rewind", reason) for step, reason in abandoned.items()}
    for step, lines in damaged.items():
        aside[step] = (f"is damaged ({lines[0]})", "\n".join(lines))
    start_at = options.start_at
    if newest is None or start_at is None or start_at == newest:
        return Selection(newest, aside)
    wrong = damaged.get(start_at, [])
    if not wrong and not options.force:
        raise CommandError(
            f"step {start_at} is not the newest",
            where=f"--start_at={start_at}",
            why=f"resuming from it abandons the training up to step {newest}",
            fix=f"--start_at={start_at} --force    # moves the later steps to quarantine/",
        )
    if wrong := wrong or store.problems(start_at):
        workdir = shlex.quote(str(store.workdir))
        raise DataError(
            f"checkpoint {start_at} is damaged",
            where=f"--start_at={start_at}",
            why="\n".join(wrong[:4]),
            fix=f"jaxlm checkpoint list --workdir={workdir}",
        )
    reason = f"abandoned: the run was resumed from step {start_at}"
    later = {step: ("was abandoned", reason) for step in store.steps() if step > start_at}
    return Selection(start_at, aside | {step: later[step] for step in later if step not in aside})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartRecord:
    """One start of a run."""

    step: int  # completed updates; later ones belong to this start
    rewinds: int  # rewinds that had been made
    reset_optimizer: bool  # whether the optimizer state was reset at this step
    cast: bool  # whether arrays were cast at this step
    config: dict[str, Any]
    data: dict[str, Any]  # the fingerprint of the data
    versions: dict[str, str]  # versions of packages, and digests of the packages of jaxlm

    @property
    def options(self) -> ResumeOptions:
        """Options by which the state of its step was restored."""
        return ResumeOptions(reset_optimizer=self.reset_optimizer, cast=self.cast)


SHAPE: Shape = (
    dict.fromkeys(("step", "rewinds"), sinks.is_step)
    | dict.fromkeys(("reset_optimizer", "cast"), lambda value: isinstance(value, bool))
    | dict.fromkeys(("config", "data", "versions"), lambda value: isinstance(value, dict))
)


def append_start(directory: RunDir, start: StartRecord) -> None:
    """Write a start, through to the disk."""
    with contextlib.closing(directory.journal(STARTS_FILE)) as sink:
        sink.write(dataclasses.asdict(start))


def read_starts(workdir: Path) -> list[StartRecord]:
    """Return the starts of a run, newest last. Raise DataError if the file is damaged."""
    records = sinks.read(workdir / STARTS_FILE, SHAPE)
    return [StartRecord(**{name: record[name] for name in SHAPE}) for record in records]


def trained_on(workdir: Path) -> dict[str, Any]:
    """Return the fingerprint of the data of a run, or of the run it was made from; or an empty one.

    Raises DataError if the file of starts is damaged.
    """
    if (workdir / STARTS_FILE).exists():
        return read_starts(workdir)[-1].data
    return dict(imported_facts(workdir).get("data", {}))


def version_changes(workdir: Path, versions: dict[str, str]) -> list[Change]:
    """Return the packages whose version changed since the last start.

    Raises DataError if the file of starts is damaged.
    """
    if not (workdir / STARTS_FILE).exists():
        return []
    before = read_starts(workdir)[-1].versions
    return [
        Change(name, before.get(name, ABSENT), versions.get(name, ABSENT))
        for name in sorted(before | versions)
        if before.get(name) != versions.get(name)
    ]


def lineage(starts: Sequence[StartRecord], rewinds: Sequence[Rewind]) -> list[StartRecord]:
    """Return the starts that led to the newest step, without steps that were made again later.

    A rewind is a start of its own, under the config of the process that made it.
    """
    counted = [start for start in starts if start.rewinds <= len(rewinds)]
    path: list[StartRecord] = []

    def before(step: int) -> list[StartRecord]:
        return [start for start in path if start.step < step]

    for start, following in zip(counted, [*counted[1:], None], strict=True):
        path = [*before(start.step), start]
        for rewind in rewinds[start.rewinds : following.rewinds if following else None]:
            restart = dataclasses.replace(start, step=rewind.to)
            if rewind.to > start.step:  # a checkpoint of this very start
                restart = dataclasses.replace(restart, reset_optimizer=False, cast=False)
            path = [*before(rewind.to), restart]
    return path
