"""One step of a run, done again to see what it saw: its batch, its loss, its gradient, the guard's verdict."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config
from jaxlm.core.errors import CommandError, ConfigError, DataError
from jaxlm.data import loader
from jaxlm.data.batch import Tokens
from jaxlm.monitor import sinks
from jaxlm.objectives.loss import score
from jaxlm.parallel import host
from jaxlm.recipes import jax_setup, setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train import records, resume
from jaxlm.recipes.train.checkpointing import Rewinds
from jaxlm.recipes.train.context import ResumeOptions
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.resume import StartRecord
from jaxlm.training import control
from jaxlm.training.rundir import RunDir, read_json
from jaxlm.training.state import TrainState

MOST_ROWS = 5  # that are named, the highest loss first

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    workdir: Path
    step: int
    overrides: tuple[tuple[str, str], ...] = ()
    rewinds: int | None = None  # as the run was after so many of its rewinds; None is all
    cpu_devices: int | None = None


def replay(options: Options, say: Say = lambda _: None) -> dict[str, Any]:
    """Does a step again from the newest sound checkpoint before it, with the run's own batches; writes nothing there.

    On the mesh of the run every bit is as it was. `is_as_logged` says whether the loss is, and is None where the step
    was not logged.

    Raises:
      CommandError: where the run has no such step, or no such rewind.
      DataError: where the data has changed since, or no checkpoint leads to the step under its config.
    """
    workdir, step = options.workdir, options.step
    newest = read_json(workdir, "config.json")  # a run has one
    directory = RunDir(workdir)  # not entered: who only reads needs no lock
    rewinds = Rewinds(directory)
    every = len(rewinds.made)
    known = every if options.rewinds is None else options.rewinds
    if not 0 <= known <= every:
        raise CommandError(
            f"the run was not rewound {known} times",
            where=f"--rewinds={known}",
            why=f"it has rewound {every} times so far",
            fix=f"--rewinds={every}",
        )
    _check_step(step, config.from_json(Run, newest).train.steps)
    begun = resume.read_starts(workdir)
    way = [each for each in resume.lineage(begun, rewinds.made[:known]) if each.step < step]
    if not way or way[0].step:
        raise DataError(
            f"nothing says under which config step {step} was done",
            where=str(workdir / resume.STARTS_FILE),
            why="it has no line of a start before that step",
            fix="bring the file back from a copy of the run",
        )
    run: Run = config.from_json(
        Run, way[-1].config, str(workdir / resume.STARTS_FILE), options.overrides
    )
    jax_setup.start(options.cpu_devices)
    store = Store(directory.checkpoints, run.checkpoint, read_only=True, verifier=Verifier(say=say))
    later = [each for each in begun if each.rewinds > known]
    start = _start(
        store, rewinds, known, min((each.step for each in later), default=step), step, say
    )
    wish = _wish(way, start, step)
    rewinds.made = rewinds.made[:known]

    mesh = jax_setup.build_mesh(run.mesh)
    host.check_rows(mesh, run.train.batch, run.train.microbatches)
    data = setup.open_data(run, say=say, warn=say)
    _check_data(way[-1].data, data.fingerprint)
    model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
    with jax.set_mesh(mesh):
        engine = TrainPrograms(run, data, model)
        state = (
            resume.restored_state(engine, store, start, wish)
            if start
            else resume.first_state(engine, store)
        )
        say(f"from {f'checkpoint {start}' if start else 'the beginning'} through step {step}")
        batches = engine.batches(start, rewinds.skips, say)
        changes = control.read(workdir)

        def rate(completed: int) -> jax.Array:
            return engine.lr_scale(control.rate(changes, completed, run.optim.lr))

        for completed in range(start, step - 1):
            state, _ = engine.step(state, next(batches), rate(completed))
        batch = next(batches)
        uncut = engine.pace.phase(loader.number(step - 1, rewinds.skips)).rows
        rows = _rows(engine, engine.spec.point(state), batch, uncut)
        values, layers = _measured(engine, state, batch, rate(step - 1))
        found = records.spike_evidence(engine, step, values, layers, rewinds.skips)
    logged = _logged(workdir, found, is_newest=known == every)
    loss = values["loss_nats"]
    return found | {
        "from_step": start,
        "is_applied": not values["verdict"],
        "loss_hex": loss.hex(),
        "logged_loss_nats": logged,
        "is_as_logged": None if logged is None else _is_same(loss, logged),
        "rows": rows,
    }


def _check_step(step: int, steps: int) -> None:
    if not 1 <= step <= steps:
        nearest = min(max(step, 1), steps)
        raise CommandError(
            f"the run has no step {step}",
            where=f"--step={step}",
            why=f"its steps are 1 to {steps}",
            fix=f"--step={nearest}",
        )


def _start(store: Store, rewinds: Rewinds, known: int, shared: int, step: int, say: Say) -> int:
    """The newest sound checkpoint before a step that lies on its way, after `known` rewinds; 0 is the beginning.

    Of a future that was given up, no step after `shared` is left: later starts began there.
    """
    way, later = rewinds.made[:known], rewinds.made[known:]
    shared = min([shared, *(rewind.to for rewind in later)])
    for each in reversed(store.steps()):
        if each >= step or each > shared:
            continue
        if lines := store.problems(each):
            say(f"checkpoint {each} is damaged ({lines[0]}) and is passed over")
        elif not way or each <= way[-1].to or len(store.record(each).meta["rewinds"]) == known:
            return each
    return 0


def _wish(way: list[StartRecord], start: int, step: int) -> ResumeOptions:
    """How the run took up the state of a checkpoint, on its way to a step.

    Raises:
      DataError: where it took up another one in between, and changed it or a setting that matters.
    """
    at = [each for each in way if each.step <= start]
    for before, after in itertools.pairwise([*at[-1:], *way[len(at) :]]):
        try:
            resume.check(
                config.from_json(Run, before.config),
                config.from_json(Run, after.config),
                ResumeOptions(),
                0,
            )
            resume.check_data(before.data, after.data, ResumeOptions())
            why = ""
        except ConfigError as error:
            why = error.why
        changed = [name for name in ("reset_optimizer", "cast") if getattr(after, name)]
        if why or changed:
            raise DataError(
                f"step {step} cannot be reached from checkpoint {start}",
                where=f"step {after.step}, where the run went on",
                why="its checkpoint is gone or damaged, and the run took it up with other settings\n"
                + "\n".join([*(f"--{name}" for name in changed), *why.splitlines()]),
                fix=f"--step={after.step}    # the last one that this checkpoint leads to",
            )
    return at[-1].options if at and at[-1].step == start else ResumeOptions()


def _check_data(known: dict[str, Any], found: dict[str, Any]) -> None:
    """Raises DataError where the data is not what the step had read."""
    try:
        resume.check_data(known, found, ResumeOptions())
    except ConfigError as error:
        raise DataError(
            error.what,
            where=error.where,
            why=error.why,
            fix="bring the files of data.train and data.validation back as they were",
        ) from error


def _rows(engine: TrainPrograms, params: Any, batch: Tokens, uncut: int) -> list[dict[str, Any]]:
    """The rows whose tokens have the highest mean loss, without dropout; first those where it is not finite.

    They have the numbers that they had before a warm-up cut them: `uncut` of them there were.
    """

    def means(params: Any, batch: Tokens) -> jax.Array:
        model = engine.model.blueprint.merge(params)
        nll = score(model, batch, None, engine.run.loss.chunk)[0].nll
        is_counted = batch.weights != 0  # a weight that is not finite hides no row
        return jnp.where(is_counted, nll, 0).sum(-1) / jnp.maximum(is_counted.sum(-1), 1)

    losses = np.asarray(jax.jit(means)(params, batch), np.float64)
    order = np.argsort(-np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    parts = len(losses) // uncut
    return [
        {"row": int(row) // parts, "loss_nats": float(losses[row])} for row in order[:MOST_ROWS]
    ]


def _measured(
    engine: TrainPrograms, state: TrainState, batch: Tokens, rate: jax.Array
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics of a step, and the gradient's norm by layer.

    A step takes those only where it is not applied. So it is done twice, at first with a guard that has seen nothing but
    zeros: that lets no update through and leaves the state as it was, bit for bit.
    """
    run, guard = engine.run, state.guard
    refusing = engine
    if run.guard.sigmas is None:  # such a guard knows no spikes
        strict = dataclasses.replace(run.guard, sigmas=1.0)
        refusing = TrainPrograms(dataclasses.replace(run, guard=strict), engine.data, engine.model)
    zeros = jax.tree.map(lambda x: x * 0, guard)  # new arrays: the state is donated
    zeros = zeros._replace(
        filled=zeros.filled + run.guard.window, scale=jax.tree.map(jnp.copy, guard.scale)
    )
    state, refused = refusing.step(state._replace(guard=zeros), batch, rate)
    state = state._replace(step=state.step - 1, guard=guard)
    _, metrics = engine.step(state, batch, rate)
    metrics.pop("layers")
    return (
        {name: float(value) for name, value in metrics.items()},
        jax.device_get(refused["layers"]),
    )


def _is_same(a: float, b: float) -> bool:
    return a == b or not (
        math.isfinite(a) or math.isfinite(b)
    )  # logs have one word for all that is not finite


def _logged(workdir: Path, found: dict[str, Any], *, is_newest: bool) -> float | None:
    """The loss that the run wrote down for this step: in metrics.jsonl, or in spikes.jsonl for a future that it gave up."""
    name = "metrics.jsonl" if is_newest else "spikes.jsonl"
    for record in reversed(sinks.read(workdir / name)):
        is_ours = record.get("split", "train") == "train" and record["step"] == found["step"]
        if is_ours and record.get("batch", found["batch"]) == found["batch"]:
            return math.nan if record["loss_nats"] is None else record["loss_nats"]
    return None
