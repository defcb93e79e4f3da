"""Training, from a config to a run directory: the story in the order you would tell it."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config
from jaxlm.core.config import Loaded
from jaxlm.core.errors import CommandError, ConfigError, DataError, Preempted
from jaxlm.data import parts
from jaxlm.data.dataset import Data
from jaxlm.monitor import environment, trackers
from jaxlm.monitor.console import Console
from jaxlm.monitor.progress import Lines
from jaxlm.monitor.sinks import Callbacks
from jaxlm.parallel import rendezvous
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.recipes import jax_setup, setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels, dropless
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train import checkpointing, initial_state, resume, summary
from jaxlm.recipes.train.checkpointing import Rewinds
from jaxlm.recipes.train.initial_state import InitSource
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.resume import ResumeOptions, Selection, StartRecord
from jaxlm.recipes.train.trainer import Trainer
from jaxlm.training.processes import ProcessGroup
from jaxlm.training.rundir import IMPORTED, RunDir
from jaxlm.training.signals import Interrupted, StopRequest

OTHERWISE = "--config.data.validation=GLOB names other text, '--config.data.validation=()' none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says beside the config."""

    workdir: Path
    arguments: list[str]  # the words after `jaxlm`, for command.sh
    wish: ResumeOptions
    place: ProcessSpec
    init_from: str | None = None
    stop_at: int | None = None
    cpu_devices: int | None = None
    quiet: bool = False


def pretrain(
    loaded: Loaded, options: Options, callbacks: Callbacks | None = None
) -> dict[str, Any]:
    """Trains, or goes on training, in a run directory; returns the last evaluation and where things are.

    Raises:
      JaxlmError: for whatever a user can cause, before anything is compiled where it can be known.
    """
    loaded, kept = resume.with_own_validation(loaded, options.workdir)
    run: Run = loaded.value
    with rendezvous.report_failure_to_peers(options.place):
        _check_cheaply(run, options)
    with contextlib.ExitStack() as stack:
        crew = stack.enter_context(ProcessGroup(run.watch, options.place, workdir=options.workdir))
        stop = stack.enter_context(crew.stop)
        is_first = crew.peers.is_first
        crew.agree("code, config and options", _identity(loaded, options))
        directory = stack.enter_context(RunDir(options.workdir, is_writer=is_first))
        crew.ending.leave, crew.ending.conclude = directory.leave, directory.conclude
        directory.epilogue = functools.partial(summary.write_partial_report, directory.path)
        crew.barrier("run directory")
        screen = None
        if is_first and not options.quiet and "console" in run.log.sinks:
            screen = sys.stderr
        console = stack.enter_context(Console(screen, total=run.train.steps))
        verifier = crew.verifier(console.say)
        store = Store(
            directory.checkpoints,
            run.checkpoint,
            reach=run.guard.reach,
            owner=directory.lock.fence,
            is_owner=directory.lock.is_owner,
            peers=crew.peers,
            save_seconds=run.watch.limits()["save"],
            verifier=verifier,
        )
        stack.callback(store.release)
        stack.push(crew.end_if_failed)  # before anything that waits for the others
        rewinds = Rewinds(directory)
        # By its record, before its bytes are read: those may take minutes, and a refusal must not.
        found = crew.share(
            "newest", resume.peek_latest(store, options.wish, rewinds) if is_first else None
        )
        meta, changes = resume.load_resume_record(store, found, run, options.wish)
        directory.step = found or 0
        mesh = None if resume.is_complete(meta, run, changes) else setup.build_mesh_for(run)
        chosen: Selection | None = None

        def choose() -> int | None:
            nonlocal chosen
            chosen = resume.select(store, options.wish, rewinds)
            return chosen.step

        with _waiting(stop, options, "the checkpoints were verified"):
            found = verifier.decide(choose)
        meta, changes = resume.load_resume_record(store, found, run, options.wish)
        directory.step = start = found or 0
        if meta and resume.is_complete(meta, run, changes):
            crew.depart()
            told = {}
            if verdict := meta["progress"].get("divergence"):
                directory.outcome, told = _outcome(verdict), {"divergence": verdict}
            return (meta["evaluation"] or {}) | {
                "step": start,
                "complete": True,
                "already": True,
                "workdir": str(options.workdir),
                **told,
            }
        mesh = mesh or setup.build_mesh_for(run)
        noticed = [
            f"{path}: {why}; if that is not meant, {fix}" for path, why, fix in run.cautions()
        ]
        held_out = _held_out(loaded)
        noticed += [*kept, *([f"validation: {held_out}; {OTHERWISE}"] if held_out else [])]
        with _waiting(stop, options, "the run to begin from was verified"):
            origin = _origin(options, run, meta, noticed.append, verifier)
        if is_first and directory.is_new:
            _keep_log(stack, directory, console)
        with _waiting(stop, options, "the data was prepared"), crew.in_turn("prepare"):
            data = setup.open_data(
                run, say=console.say, warn=noticed.append, progress=Lines(console.say)
            )
        setup.ranking_set(run, data.validation)
        setup.check_held_out(run.data, data)
        crew.agree("data", data.fingerprint)
        if meta:
            changes += resume.check_data(meta["data"], data.fingerprint, options.wish)
        if origin:
            initial_state.check_tokenizer(origin, data.tokenizer.digest)
        model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
        platform = jax_setup.target(mesh).platform
        noticed += dropless.cautions(run, model.blueprint.config, mesh.shape, platform)
        _check_vocabulary(run, data)
        with jax.set_mesh(mesh):
            engine = TrainPrograms(run, data, model)
            if meta:
                resume.check_state(engine, store, start, options.wish if start else ResumeOptions())
            if chosen is not None:
                try:
                    changes += resume.version_changes(directory.path, environment.versions())
                except DataError as error:
                    noticed.append(f"{error.what}: {error.where}")
                checkpointing.check_disk_space(
                    engine, len(store.steps()) - len(chosen.aside), directory
                )
            session = Trainer(
                engine,
                crew,
                directory,
                console,
                store,
                rewinds,
                options.wish,
                meta,
                changes,
                origin,
                callbacks,
            )
            # Nothing refuses the start any more: from here on the run directory changes.
            directory.begin()
            if chosen is not None:  # in the first process
                if not console.is_kept:
                    _keep_log(stack, directory, console)
                chosen.clear(store, noticed.append)
                if origin:
                    initial_state.copy_hub_files(origin, directory.path)
                _describe(directory, loaded, options, data, model, len(rewinds.made))
            for line in noticed:
                console.warn(line, step=start)
            crew.barrier("begin")
            summary.print_header(session, held_out)
            try:
                session.train(stop, options.stop_at)
            except Preempted:
                crew.depart()
                raise
        crew.depart()
        answer = summary.print_summary(session)
        verdict = session.alarm.verdict
        if not answer["complete"]:
            directory.outcome = f"stopped after step {answer['step']}, as it was asked to"
            directory.outcome += f"; {verdict['outcome']}" if verdict else ""
        elif verdict:
            directory.outcome = _outcome(verdict)
        return answer


def _outcome(verdict: dict[str, Any]) -> str:
    """Return the cause in exit.json of a run that finished with a loss that is wrong."""
    return f"finished, {verdict['outcome']}: {verdict['said']}"


def _held_out(loaded: Loaded) -> str:
    """Return why a part of the training text is the validation set; empty if the user chose the set."""
    origin = loaded.provenance["data.validation"]
    return origin.where if origin.kind == "default" else ""


def _check_cheaply(run: Run, options: Options) -> None:
    """What costs nothing to find out comes first: a wrong setting must not cost a minute."""
    if (options.workdir / IMPORTED).exists():
        raise CommandError(
            "an imported model is no run to go on with",
            where=f"--workdir={options.workdir}",
            why="it has weights and no optimizer, and stays as it was imported",
            fix=f"--init_from={options.workdir} --workdir={options.workdir}-trained",
        )
    trackers.check(run.log.sinks)
    parts.find(run.data)
    jax_setup.start(options.cpu_devices)


@contextlib.contextmanager
def _waiting(stop: StopRequest, options: Options, doing: str) -> Iterator[None]:
    """Something long before the first step, in which a signal ends the run at once."""
    try:
        with stop.waiting():
            yield
    except Interrupted as told:
        raise Preempted(
            f"stopped by {told} while {doing}",
            where=str(options.workdir),
            why="nothing was trained since the last save",
            fix="run the same command again",
        ) from None


def _keep_log(stack: contextlib.ExitStack, directory: RunDir, console: Console) -> None:
    """What is said from now on, the run directory keeps."""
    log, warnings = directory.append("log.txt"), directory.journal("warnings.jsonl")
    for file in (log, warnings):
        stack.enter_context(contextlib.closing(file))
    console.keep(log, warnings)


def _origin(
    options: Options,
    run: Run,
    meta: dict[str, Any] | None,
    say: Callable[[str], None],
    verifier: Verifier,
) -> InitSource | None:
    """The run whose weights this one begins with; None where it begins with its own, or has begun."""
    if meta is not None or options.init_from is None:
        return None
    return initial_state.find(options.init_from, run, say, verifier)


def _identity(loaded: Loaded, options: Options) -> dict[str, str]:
    """What all processes of a run must have in common before they compute together."""
    told = {
        "workdir": options.workdir.absolute(),
        "init_from": options.init_from,
        "stop_at": options.stop_at,
    } | dataclasses.asdict(options.wish)
    flags = {f"--{name}": str(value) for name, value in told.items()}
    settings = {path: str(value) for path, value in config.flatten(loaded.value).items()}
    return environment.versions() | flags | settings


def _check_vocabulary(run: Run, data: Data) -> None:
    if run.model.vocab != "auto" and run.model.vocab < data.tokenizer.size:
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.size} ids and the model only {run.model.vocab}",
            where="model.vocab",
            why=f"id {data.tokenizer.size - 1} would be past the embedding's last row",
            fix="--config.model.vocab=auto",
        )


def _describe(
    directory: RunDir,
    loaded: Loaded,
    options: Options,
    data: Data,
    model: ShardedModel,
    rewinds: int,
) -> None:
    """Writes what the run was started with. Where it replaces what was there, starts.jsonl keeps that."""
    wanted, wish = config.to_json(loaded.value), options.wish
    start = StartRecord(
        step=directory.step,
        rewinds=rewinds,
        reset_optimizer=wish.reset_optimizer,
        cast=wish.cast,
        config=wanted,
        data=data.fingerprint,
        versions=environment.versions(),
    )
    resume.append_start(directory, start)
    directory.write_json("config.json", wanted)
    directory.write_json(
        "provenance.json", {name: str(origin) for name, origin in loaded.provenance.items()}
    )
    told = attention_kernels.describe_kernels(
        loaded.value, model.blueprint.config, model.mesh.shape, jax_setup.target(model.mesh)
    )
    facts = environment.facts() | {"cluster": options.place.as_json(), "attention": told}
    directory.write_json("environment.json", facts)
    directory.write_command(options.arguments)
    directory.write_bytes("tokenizer", data.tokenizer.serialise())
