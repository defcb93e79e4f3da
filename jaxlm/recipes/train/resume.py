"""Going on with a run: with which changes, and with how much of its state."""

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.checkpoint.store import Store
from jaxlm.core import batch_schedule, config, tree
from jaxlm.core.config import ABSENT, Change, Loaded, Origin
from jaxlm.core.errors import CommandError, ConfigError, DataError, listed
from jaxlm.core.provenance import short
from jaxlm.data import mixture_config
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Shape
from jaxlm.optim import average
from jaxlm.optim.schedule_config import Schedule, spans
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.checkpointing import Rewind, Rewinds
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training.rundir import RunDir, read_json
from jaxlm.training.state import TrainState

# Sections and settings that change nothing of what is computed.
FREE = (
    "log",
    "eval",
    "sample",
    "checkpoint",
    "profile",
    "watch",
    "mesh",
    "data.workers",
    "data.damaged",
    "data.prefetch",
)
NOT_FREE = ("eval.follow",)  # losses of two sets rank nothing together
FREE_GUARD = (
    "guard.budget",
    "guard.rewinds",
    "guard.reach",
    "guard.skip",
    "guard.compare_every",
    "guard.divergence",
)
FREE_TRAIN = (
    "train.stack",
    "train.attention",
    "train.remat",
    "train.pipeline",
    "train.pipeline_repeats",
    "train.offload",
    "train.patience",
    "train.control",
    "loss.chunk",
)
LINES = 4  # of an error, for what differs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """How a run shall go on, beyond its config.

    Args:
      start_at: a committed step to go on from; None is the newest.
      force: give up the steps after `start_at`.
      reset_optimizer: keep the parameters and begin the optimizer's state anew.
      cast: take stored arrays over into the dtypes of this config.
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
        """The flags that say it; none where the run just goes on."""
        said = {
            f"--start_at={self.start_at}": self.start_at is not None,
            "--force": self.force,
            "--reset_optimizer": self.reset_optimizer,
            "--cast": self.cast,
            f"--allow_change={','.join(self.allow_change)}": bool(self.allow_change),
        }
        return " ".join(flag for flag, is_said in said.items() if is_said)


def state(engine: TrainPrograms, store: Store, step: int, wish: ResumeOptions) -> TrainState:
    """The state of a step on this run's mesh. An average that the step has not begins at its parameters; one that the run keeps no more is left out.

    Raises:
      DataError: where it does not fit the model, or has other dtypes and no cast was asked for.
    """
    wanted, layout = engine.abstract(), store.layout(step)
    stored = _in_stored_dtypes(wanted, layout) if wish.cast else wanted
    has_average = any(path.startswith("average/") for path in layout)
    if not wish.reset_optimizer and has_average == (wanted.average is not None):
        restored = store.restore(step, stored)
        return _cast(restored, wanted) if wish.cast else restored

    def part(name: str) -> Any:
        return store.restore_part(step, name, getattr(stored, name))

    params, averaged = part("params"), None
    if wanted.average is not None:
        averaged = part("average") if has_average else average.first(params)
    restored = TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=engine.optimizer.init(params) if wish.reset_optimizer else part("opt_state"),
        guard=part("guard"),
        average=averaged,
    )
    return _cast(restored, wanted)


def check_state(engine: TrainPrograms, store: Store, step: int, wish: ResumeOptions) -> None:
    """Raise DataError if `state` will, by the layout of the step alone: before anything is written.

    Runs of before `precision.moments` kept moments in the dtype of the parameters, so theirs may be
    bfloat16 though no setting differs.
    """
    wanted, layout = engine.abstract(), store.layout(step)

    def parts(state: TrainState) -> dict[str, Any]:
        found = {"params": state.params, "guard": state.guard}
        if not wish.reset_optimizer:
            found["opt_state"] = state.opt_state
        if state.average is not None and any(path.startswith("average/") for path in layout):
            found["average"] = state.average
        return found

    store.check_layout(step, parts(_in_stored_dtypes(wanted, layout)))
    if wish.cast:
        return
    try:
        store.check_layout(step, parts(wanted))
    except DataError as error:
        raise DataError(
            f"checkpoint {step} has other dtypes than this config",
            where=error.where,
            why=error.why,
            fix="--cast    # converts the stored arrays to the dtypes of this config",
        ) from error


def parameters(engine: TrainPrograms, store: Store, step: int, fresh: TrainState) -> TrainState:
    """A fresh state with the parameters of a step of another run, cast to the dtypes of this one.

    Raises:
      DataError: where they do not fit the model.
    """
    wanted = engine.abstract()
    stored = _in_stored_dtypes(wanted, store.layout(step))
    params = _cast(store.restore_part(step, "params", stored.params), wanted.params)
    if fresh.average is None:
        return fresh._replace(params=params)
    return fresh._replace(params=params, average=_cast(average.first(params), wanted.average))


def _cast(values: Any, wanted: Any) -> Any:
    """The values in the dtypes and shardings of what is wanted."""
    taken = jax.jit(
        lambda values: jax.tree.map(lambda x, like: x.astype(like.dtype), values, wanted),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, wanted),
    )
    return taken(values)


def _in_stored_dtypes(wanted: TrainState, layout: dict[str, str]) -> TrainState:
    """The same shapes and shardings, in the dtypes that lie on disk."""

    def stored(path: str, leaf: Any) -> Any:
        dtype = layout.get(path, leaf.dtype.name).partition("[")[0]
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding)

    return tree.map_with_path(stored, wanted)


def with_own_validation(loaded: Loaded, workdir: Path) -> tuple[Loaded, list[str]]:
    """Return the config with the validation data of the run in `workdir`, and what to say of it.

    That applies to a config that does not set data.validation: by earlier versions such a run is
    validated on Python's library, and a run keeps its data.
    """
    run: Run = loaded.value
    known = read_json(workdir, "config.json") if (workdir / "config.json").exists() else {}
    saved = known.get("data") if isinstance(known, dict) else None
    own, text = ["stdlib:validation"], list(run.data.train)
    if (
        loaded.provenance["data.validation"].kind != "default"
        or list(run.data.validation) == own
        or not isinstance(saved, dict)
        or (saved.get("train"), saved.get("validation")) != (text, own)
    ):
        return loaded, []
    origin = Origin("file", short(workdir / "config.json"))
    kept = Loaded(
        run.changed({"data.validation": own}), loaded.provenance | {"data.validation": origin}
    )
    told = (
        f"data.validation is {own[0]}, as when this run began; "
        f"a new run would have {', '.join(run.data.validation)} of data.train"
    )
    return kept, [told]


def check(saved: Run, wanted: Run, wish: ResumeOptions, completed: int) -> list[config.Change]:
    """The changes that a run takes over when it goes on with another config.

    How a run is watched, saved and laid out may change. `train.steps` may where the schedule does not depend on it.
    The rest needs the user's word, field by field.

    Raises:
      ConfigError: where a change is not allowed; shows all of them.
    """
    changes = config.diff(saved, wanted)
    refused = [
        change for change in changes if not _is_free(change, wanted, wish.allowed, completed)
    ]
    if refused:
        raise ConfigError(
            f"{len(refused)} setting{'s differ' if len(refused) > 1 else ' differs'} from the run in this directory",
            where=f"after step {completed} of {saved.train.steps}",
            why=listed([*map(str, refused)], LINES),
            fix=f"--workdir=runs/another\n{_flags_that_allow(refused)}",
        )
    return changes


def load_resume_record(
    store: Store, step: int | None, run: Run, wish: ResumeOptions
) -> tuple[dict[str, Any] | None, list[config.Change]]:
    """What the record of a step knows of the run, and what changes where it goes on from there; None of a run that begins.

    Raises:
      ConfigError: where a change is not allowed.
    """
    if step is None:
        return None, []
    meta = store.record(step).meta
    return meta, check(config.from_json(Run, meta["config"]), run, wish, step)


def is_complete(meta: dict[str, Any] | None, run: Run, changes: list[config.Change]) -> bool:
    """Whether nothing is left to be trained after a step."""
    if meta is None:
        return False
    return meta["step"] >= run.train.steps or (meta["finished"] and not changes)


def _flags_that_allow(refused: list[config.Change]) -> str:
    """The flags that let these changes through."""
    paths = [change.path for change in refused]
    flags = []
    if {"optim.name", "optim.freeze"} & set(paths):  # their state is another
        flags.append("--reset_optimizer")
        paths = [path for path in paths if not path.startswith(("optim.", "schedule."))]
    if {"precision.params", "precision.moments"} & set(paths):
        flags.append("--cast")
        paths = [path for path in paths if not path.startswith("precision.")]
    return " ".join([*flags, *([f"--allow_change={','.join(paths)}"] if paths else [])])


def check_data(
    saved: dict[str, Any], found: dict[str, Any], wish: ResumeOptions
) -> list[config.Change]:
    """The changes of the data's fingerprint that a run takes over when it goes on.

    Raises:
      ConfigError: where the data is not what the run read before, and nobody allowed that; shows all of them.
    """
    changes = [
        config.Change(f"data ({name})", _short(saved.get(name)), _short(found.get(name)))
        for name in saved | found
        if saved.get(name) != found.get(name)
    ]
    if changes and "data" not in wish.allowed:
        raise ConfigError(
            "the data is not what this run read before",
            where="data",
            why=listed([*map(str, changes)], LINES),
            fix="--workdir=runs/another\n--allow_change=data    # goes on with it, from the same step",
        )
    return changes


def _is_free(change: config.Change, wanted: Run, allowed: tuple[str, ...], completed: int) -> bool:
    path = change.path
    if path in (*FREE_TRAIN, *FREE_GUARD):
        return True
    if path not in NOT_FREE and any(path == free or path.startswith(f"{free}.") for free in FREE):
        return True
    if path == "train.steps" and wanted.train.steps >= completed:
        stages = (*wanted.train.batch_warmup, *wanted.data.sequence_warmup)
        moving = [
            *mixture_config.spans(wanted.data.mixture),
            *(batch_schedule.parse(s)[1] for s in stages),
        ]
        is_fixed = all(span.unit != "share" for span in moving)
        if is_fixed and is_absolute(wanted.schedule):
            return True
    return any(path == name or path.startswith(f"{name}.") for name in allowed)


def is_absolute(schedule: Schedule) -> bool:
    """Whether the learning rate at a step does not depend on the number of steps."""
    return all(span.unit != "share" for span in spans(schedule).values())


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


# From which step a run goes on, and what is not part of it any more.
#
# Choosing reads only: what refuses the start afterwards finds every checkpoint where it was.


class SetAside(NamedTuple):
    """A step that the run goes on without: what the log says of it, and what is written beside it."""

    step: int
    told: str
    reason: str


class Selection(NamedTuple):
    """The step that a run goes on from, None where it begins; and those that are in its way."""

    step: int | None
    aside: list[SetAside]

    def clear(self, store: Store, say: Callable[[str], None]) -> None:
        """Moves what is in the way to the quarantine. Raises NotWritable."""
        for each in self.aside:
            place = store.quarantine(each.step, each.reason)
            say(f"checkpoint {each.step} {each.told}; it is in {place}")


def peek_latest(store: Store, wish: ResumeOptions, rewinds: Rewinds) -> int | None:
    """The step that will be chosen unless it is damaged: its record is whole, and its arrays nobody has read.

    Raises:
      CommandError: where the step that was asked for is not there.
    """
    given_up = rewinds.abandoned_steps(store)
    steps = [step for step in store.steps() if step not in given_up]
    if wish.start_at is not None:
        if wish.start_at not in steps:
            raise CommandError(
                f"there is no checkpoint of step {wish.start_at}",
                where=f"--start_at={wish.start_at}",
                why=f"committed steps: {', '.join(map(str, steps)) or 'none'}",
                fix=f"--start_at={steps[-1]}" if steps else "leave --start_at out",
            )
        steps = [wish.start_at]
    for step in reversed(steps):
        with contextlib.suppress(DataError):
            return store.record(step).step
    return None


def select(store: Store, wish: ResumeOptions, rewinds: Rewinds) -> Selection:
    """The step to go on from, every byte of it as it was written.

    Raises:
      CommandError: where the step that was asked for is not the newest and nobody forced it.
      DataError: where it is damaged, or all are.
    """
    given_up = rewinds.abandoned_steps(store)
    damaged: dict[int, list[str]] = {}
    newest = store.latest_valid(damaged.__setitem__, without=given_up)
    aside = [
        SetAside(step, "belongs to a future that was given up", reason)
        for step, reason in given_up.items()
    ]
    aside += [
        SetAside(step, f"is damaged ({lines[0]})", "\n".join(lines))
        for step, lines in damaged.items()
    ]
    if newest is None or wish.start_at is None or wish.start_at == newest:
        return Selection(newest, aside)
    wrong = damaged.get(wish.start_at, [])
    if not wrong and not wish.force:
        raise CommandError(
            f"step {wish.start_at} is not the newest",
            where=f"--start_at={wish.start_at}",
            why=f"going on from it gives up what was trained up to step {newest}",
            fix=f"--start_at={wish.start_at} --force    # moves the later steps to quarantine/",
        )
    if wrong := wrong or store.problems(wish.start_at):
        raise DataError(
            f"checkpoint {wish.start_at} is damaged",
            where=f"--start_at={wish.start_at}",
            why="\n".join(wrong[:4]),
            fix=f"jaxlm checkpoint list --workdir={shlex.quote(str(store.directory.parent))}",
        )
    reason = f"given up: the run was started again at {wish.start_at}"
    known = {each.step for each in aside}
    aside += [
        SetAside(step, "was given up", reason)
        for step in store.steps()
        if step > wish.start_at and step not in known
    ]
    return Selection(wish.start_at, aside)


# Each start of a run, kept for good: from which step it went on, under which config, with how much of its state.
#
# A step is done again under the start that did it. The newest is not enough for that, and checkpoints come and go.


FILE = "starts.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartRecord:
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
    def wish(self) -> ResumeOptions:
        """How the state of its step was taken up."""
        return ResumeOptions(reset_optimizer=self.reset_optimizer, cast=self.cast)


SHAPE: Shape = dict.fromkeys(("step", "rewinds"), sinks.is_step) | {
    "reset_optimizer": lambda value: isinstance(value, bool),
    "cast": lambda value: isinstance(value, bool),
    "config": lambda value: isinstance(value, dict),
    "data": lambda value: isinstance(value, dict),
    "versions": lambda value: isinstance(value, dict),
}


def append_start(directory: RunDir, start: StartRecord) -> None:
    """Writes a start down, through to the disk."""
    sink = directory.journal(FILE)
    try:
        sink.write(dataclasses.asdict(start))
    finally:
        sink.close()


def read_starts(workdir: Path) -> list[StartRecord]:
    """The starts of a run, the newest last. Raises DataError where the file is damaged."""
    names = [field.name for field in dataclasses.fields(StartRecord)]
    return [
        StartRecord(**{name: record[name] for name in names})
        for record in sinks.read(workdir / FILE, SHAPE)
    ]


def version_changes(workdir: Path, versions: dict[str, str]) -> list[Change]:
    """What computes otherwise than when the newest start of a run was made. Raises DataError as `read` does."""
    if not (workdir / FILE).exists():
        return []
    before = read_starts(workdir)[-1].versions
    return [
        Change(name, before.get(name, ABSENT), versions.get(name, ABSENT))
        for name in sorted(before | versions)
        if before.get(name) != versions.get(name)
    ]


def lineage(starts: Sequence[StartRecord], rewinds: Sequence[Rewind]) -> list[StartRecord]:
    """What led to the newest step after these rewinds: each start with those of its steps that no later one did again.

    A rewind is a start of its own, under the config of the process that made it.
    """
    known = [start for start in starts if start.rewinds <= len(rewinds)]
    found: list[StartRecord] = []
    for start, after in zip(known, [*known[1:], None], strict=True):
        found = [*_before(found, start.step), start]
        for rewind in rewinds[start.rewinds : after.rewinds if after else None]:
            again = dataclasses.replace(start, step=rewind.to)
            if rewind.to > start.step:  # a checkpoint of this very start
                again = dataclasses.replace(again, reset_optimizer=False, cast=False)
            found = [*_before(found, rewind.to), again]
    return found


def _before(starts: Sequence[StartRecord], step: int) -> list[StartRecord]:
    return [start for start in starts if start.step < step]
