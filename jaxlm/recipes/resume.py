"""Going on with a run: with which changes, and with how much of its state."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, pace, tree
from jaxlm.core.config import Loaded, Origin
from jaxlm.core.errors import ConfigError, DataError, listed
from jaxlm.core.provenance import short
from jaxlm.data import mixture_config
from jaxlm.optim import average
from jaxlm.optim.schedule_config import Schedule, spans
from jaxlm.recipes.config import Run
from jaxlm.recipes.engine import Engine
from jaxlm.train.rundir import read_json
from jaxlm.train.state import TrainState

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
class Wish:
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


def state(engine: Engine, store: Store, step: int, wish: Wish) -> TrainState:
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


def check_state(engine: Engine, store: Store, step: int, wish: Wish) -> None:
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


def parameters(engine: Engine, store: Store, step: int, fresh: TrainState) -> TrainState:
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


def check(saved: Run, wanted: Run, wish: Wish, completed: int) -> list[config.Change]:
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
            fix=f"--workdir=runs/another\n{_permission(refused)}",
        )
    return changes


def taken_up(
    store: Store, step: int | None, run: Run, wish: Wish
) -> tuple[dict[str, Any] | None, list[config.Change]]:
    """What the record of a step knows of the run, and what changes where it goes on from there; None of a run that begins.

    Raises:
      ConfigError: where a change is not allowed.
    """
    if step is None:
        return None, []
    meta = store.record(step).meta
    return meta, check(config.from_json(Run, meta["config"]), run, wish, step)


def is_over(meta: dict[str, Any] | None, run: Run, changes: list[config.Change]) -> bool:
    """Whether nothing is left to be trained after a step."""
    if meta is None:
        return False
    return meta["step"] >= run.train.steps or (meta["finished"] and not changes)


def _permission(refused: list[config.Change]) -> str:
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


def check_data(saved: dict[str, Any], found: dict[str, Any], wish: Wish) -> list[config.Change]:
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
        moving = [*mixture_config.spans(wanted.data.mixture), *(pace.parse(s)[1] for s in stages)]
        is_fixed = all(span.unit != "share" for span in moving)
        if is_fixed and is_absolute(wanted.schedule):
            return True
    return any(path == name or path.startswith(f"{name}.") for name in allowed)


def is_absolute(schedule: Schedule) -> bool:
    """Whether the learning rate at a step does not depend on the number of steps."""
    return all(span.unit != "share" for span in spans(schedule).values())


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
