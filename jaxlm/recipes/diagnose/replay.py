"""Repeat one step of a run to inspect its batch, loss, gradient and guard verdict."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError, DataError
from jaxlm.data import loader
from jaxlm.data.batch import Tokens
from jaxlm.monitor import sinks
from jaxlm.objectives.loss import score
from jaxlm.parallel import host
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train import checkpointing, reference, resume
from jaxlm.recipes.train.api import ResumeOptions
from jaxlm.recipes.train.checkpointing import Rewinds
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.spikes import spike_evidence
from jaxlm.recipes.train.teacher import find_teacher, load_teacher, with_teacher
from jaxlm.recipes.use import load
from jaxlm.training import control
from jaxlm.training.rundir import STARTS_FILE, RunDir, imported_facts, read_json
from jaxlm.training.state import TrainState

MAX_ROWS = 5  # to report, the highest loss first


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The run, the step, and the settings to override."""

    workdir: Path
    step: int
    overrides: tuple[tuple[str, str], ...] = ()
    rewinds: int | None = None  # the state after this number of rewinds; None: after all
    cpu_devices: int | None = None


def replay(options: ReplayOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Repeat a step from the newest undamaged checkpoint before it; the run stays unchanged.

    On the mesh of the run every bit is reproduced. `is_as_logged` compares the loss with the logged
    one; None if the step was not logged. Raises CommandError if the run has no such step or rewind,
    or was not trained, and DataError if the data changed since, or no checkpoint leads to the step
    under its config.
    """
    workdir, step = options.workdir, options.step
    newest = read_json(workdir, "config.json")
    directory = RunDir(workdir)  # not entered: a reader needs no lock
    rewinds = Rewinds(directory)
    every = len(rewinds.made)
    known = every if options.rewinds is None else options.rewinds
    if not 0 <= known <= every:
        what, why = f"the run has no rewind {known}", f"it has {every} rewinds so far"
        raise CommandError(what, where=f"--rewinds={known}", why=why, fix=f"--rewinds={every}")
    if (facts := imported_facts(workdir)) and not (workdir / STARTS_FILE).is_file():
        raise CommandError(
            "the run has no steps to replay",
            where=str(workdir),
            why=f"it was {facts.get('status', 'imported')}, not trained",
            fix="jaxlm runs    # lists the runs",
        )
    last = config.from_json(Run, newest).train.steps
    if not 1 <= step <= last:
        what, why = f"the run has no step {step}", f"its steps are 1 to {last}"
        fix = f"--step={min(max(step, 1), last)}"
        raise CommandError(what, where=f"--step={step}", why=why, fix=fix)
    starts, file = resume.read_starts(workdir), str(workdir / STARTS_FILE)
    lineage = [each for each in resume.lineage(starts, rewinds.made[:known]) if each.step < step]
    if not lineage or lineage[0].step:
        what = f"the config of step {step} is unknown"
        why = "the file has no line of a start before that step"
        raise DataError(what, where=file, why=why, fix="restore the file from a copy of the run")
    run: Run = config.from_json(Run, lineage[-1].config, file, options.overrides)
    setup.start(options.cpu_devices)
    store = object_store.of_run(workdir, verifier=Verifier(say=say))
    shared = min((each.step for each in starts if each.rewinds > known), default=step)
    start = _start(store, rewinds, known, shared, step, say)
    resume_options = _resume_options(lineage, start, step)
    rewinds.made = rewinds.made[:known]

    mesh = meshes.build(run.mesh)
    host.check_rows(mesh, run.train.batch, run.train.microbatches)
    data = setup.open_data(run, workdir=workdir, say=say, warn=say)
    teacher = find_teacher(run, data, say)
    if teacher:
        data = with_teacher(data, teacher)
    _check_data(lineage[-1].data, data.fingerprint)
    model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
    with jax.set_mesh(mesh):
        base = None
        if model.base:
            base = load.load_base(load.find_base(workdir, run, None, say), model)
        frozen = load_teacher(run, teacher, model) if teacher else None
        data = reference.with_stored(data, run, workdir)
        engine = TrainPrograms(run, data, model, teacher=frozen, base=base)
        if run.objective.compared_with == reference.ADAPTER_OFF:
            began = reference.continued_adapter(workdir, say)
            engine.adapter = (
                None if began is None else checkpointing.state_from(engine, began).params
            )
        state = (
            checkpointing.restored_state(engine, store, start, resume_options)
            if start
            else checkpointing.first_state(engine, store)
        )
        say(f"from {f'checkpoint {start}' if start else 'the beginning'} through step {step}")
        batches = engine.batches(start, rewinds.skips, say)
        changes = control.read_changes(workdir)

        def rate(completed: int) -> jax.Array:
            return engine.lr_scale(control.lr_scale(changes, completed, run.optim.lr))

        for completed in range(start, step - 1):
            state, _ = engine.step(state, next(batches), rate(completed), **engine.extra_inputs)
        batch = next(batches)
        full_rows = engine.pace.phase(loader.batch_number(step - 1, rewinds.skips)).rows
        point = engine.whole(engine.spec.point(state))
        rows = list[dict[str, Any]]()
        if not run.objective.has_reward_head:  # which does not predict tokens
            rows = _rows(engine, point, batch, full_rows)
        values, layers = _measured(engine, state, batch, rate(step - 1))
        evidence = spike_evidence(engine, step, values, layers, rewinds.skips)
    logged = _logged(workdir, evidence, is_newest=known == every)
    loss, is_as_logged = values["loss_nats"], None
    if logged is not None:  # the log has one value for everything that is not finite
        is_as_logged = loss == logged or not (math.isfinite(loss) or math.isfinite(logged))
    return evidence | {
        "from_step": start,
        "is_applied": not values["verdict"],
        "loss_hex": loss.hex(),
        "logged_loss_nats": logged,
        "is_as_logged": is_as_logged,
        "rows": rows,
    }


def _start(store: Store, rewinds: Rewinds, known: int, shared: int, step: int, say: Log) -> int:
    """Return the newest undamaged checkpoint before a step in its lineage; 0 is the start.

    No step after `shared` is left of an abandoned future: later starts began there.
    """
    made, later = rewinds.made[:known], rewinds.made[known:]
    shared = min([shared, *(rewind.to for rewind in later)])
    for each in reversed(store.steps()):
        if each >= step or each > shared:
            continue
        if lines := store.problems(each):
            say(f"checkpoint {each} is damaged ({lines[0]}) and skipped")
        elif not made or each <= made[-1].to or len(store.record(each).meta["rewinds"]) == known:
            return each
    return 0


def _resume_options(lineage: list[resume.StartRecord], start: int, step: int) -> ResumeOptions:
    """Return the options of the resume at a checkpoint. Raises DataError if a later one differs."""
    earlier = [each for each in lineage if each.step <= start]
    for before, after in itertools.pairwise([*earlier[-1:], *lineage[len(earlier) :]]):
        try:
            saved, resumed = (config.from_json(Run, each.config) for each in (before, after))
            resume.check(saved, resumed, ResumeOptions(), 0)
            resume.check_data(before.data, after.data, ResumeOptions())
            why = ""
        except ConfigError as error:
            why = error.why
        changed = [f"--{name}" for name in ("reset_optimizer", "cast") if getattr(after, name)]
        if why or changed:
            missing = "its checkpoint is missing or damaged, the run resumed with other settings"
            why = "\n".join([missing, *changed, *why.splitlines()])
            what = f"step {step} cannot be reached from checkpoint {start}"
            where = f"step {after.step}, where the run resumed"
            fix = f"--step={after.step}    # the last one that this checkpoint leads to"
            raise DataError(what, where=where, why=why, fix=fix)
    return earlier[-1].options if earlier and earlier[-1].step == start else ResumeOptions()


def _check_data(known: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise DataError if the data differs from what the step read."""
    try:
        resume.check_data(known, current, ResumeOptions())
    except ConfigError as error:
        fix = "restore the files of data.train and data.validation"
        raise DataError(error.what, where=error.where, why=error.why, fix=fix) from error


def _rows(engine: TrainPrograms, params: Any, batch: Tokens, uncut: int) -> list[dict[str, Any]]:
    """Return the rows of highest mean nats of a token, without dropout; the not finite come first.

    They are numbered as the `uncut` rows before the warm-up cut them into shorter ones.
    """

    def means(params: Any, batch: Tokens) -> jax.Array:
        model = engine.model.blueprint.merge(params)
        nll = score(model, batch, None, engine.run.loss.chunk)[0].nll
        is_counted = batch.weights != 0  # a weight that is not finite hides no row
        return jnp.where(is_counted, nll, 0).sum(-1) / jnp.maximum(is_counted.sum(-1), 1)

    losses = np.asarray(jax.jit(means)(params, batch), np.float64)
    order = np.argsort(-np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    parts = len(losses) // uncut
    return [{"row": int(row) // parts, "loss_nats": float(losses[row])} for row in order[:MAX_ROWS]]


def _measured(
    engine: TrainPrograms, state: TrainState, batch: Tokens, rate: jax.Array
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of a step, and the gradient's norm by layer.

    A step computes those norms only if the guard rejects it. So it runs twice: first with a guard
    that has seen nothing but zeros, which rejects any update and leaves the state bit for bit.
    """
    run, guard = engine.run, state.guard
    refusing = engine
    if run.guard.sigmas is None:  # such a guard detects no spikes
        strict = dataclasses.replace(run, guard=dataclasses.replace(run.guard, sigmas=1.0))
        refusing = TrainPrograms(
            strict, engine.data, engine.model, teacher=engine.teacher, base=engine.base
        )
    zeros = jax.tree.map(lambda x: x * 0, guard)  # new arrays: the state is donated
    zeros = zeros._replace(
        filled=zeros.filled + run.guard.window, scale=jax.tree.map(jnp.copy, guard.scale)
    )
    state, refused = refusing.step(state._replace(guard=zeros), batch, rate, **engine.extra_inputs)
    state = state._replace(step=state.step - 1, guard=guard)
    _, metrics = engine.step(state, batch, rate, **engine.extra_inputs)
    metrics.pop("layers")
    values = {name: float(value) for name, value in metrics.items()}
    return values, jax.device_get(refused["layers"])


def _logged(workdir: Path, evidence: dict[str, Any], *, is_newest: bool) -> float | None:
    """Return the logged loss of this step, from spikes.jsonl if its future was abandoned."""
    name = "metrics.jsonl" if is_newest else "spikes.jsonl"
    for record in reversed(sinks.read(workdir / name)):
        is_ours = record.get("split", "train") == "train" and record["step"] == evidence["step"]
        if is_ours and record.get("batch", evidence["batch"]) == evidence["batch"]:
            return math.nan if record["loss_nats"] is None else record["loss_nats"]
    return None
