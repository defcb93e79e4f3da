"""A training run, from a config to a run directory. Read this file first: it is the whole story.

config -> processes -> run directory -> checkpoint to resume from -> mesh -> data -> model ->
compiled programs -> training -> summary

Files of `jaxlm/recipes` between `jaxlm train` and the first step, in the order of a run:

- `recipes/train/api.py`: the call, the options of a start, the context of a run
- `recipes/config.py`: the settings, and the checks that involve several sections
- `recipes/train/run.py`: this file
- `recipes/train/resume.py`: checkpoint to resume from, allowed changes, history of starts
- `recipes/setup.py`: JAX, mesh, sharded model, data
- `recipes/plan`: kernels, divisibility, and the memory that the compiled step is compared with
- `recipes/train/programs.py`: step, observer, gradient and evaluation, and their compilation
- `recipes/train/trainer.py`: the loop's state and what is due in it
- `recipes/train/checkpointing.py`: the first state, saves and rewinds
- `recipes/train/records.py`: header, metrics, samples, summary

Other runs also use, in `recipes/train`, the weights of another run (`init_from.py`), a teacher
(`teacher.py`), statistics of layers (`layer_stats.py`), scores of answers under a reference
(`reference.py`), scores of tasks (`task_scores.py`), rollouts (`rollouts.py`, `rescoring.py`), and
documents of steps that were not applied (`spikes.py`).
"""

import contextlib
import dataclasses
import functools
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.store import StoreWriter
from jaxlm.core import config, user_code
from jaxlm.core.callbacks import Log
from jaxlm.core.config import Change, Loaded, Origin
from jaxlm.core.errors import CommandError, ConfigError, DataError, InputMissing, Preempted
from jaxlm.data import parts
from jaxlm.data.dataset import Data
from jaxlm.data.mixture import MixtureLoader
from jaxlm.monitor import environment, trackers
from jaxlm.monitor.console import Console
from jaxlm.monitor.formatting import ProgressLines
from jaxlm.monitor.sinks import Callbacks
from jaxlm.objectives.policy_config import START
from jaxlm.parallel import rendezvous, rules
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange.import_model import copy_hub_files, keep_template
from jaxlm.recipes.plan import attention_kernels, oom, predict
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train import checkpointing, reference, resume
from jaxlm.recipes.train.api import ResumeOptions, RunContext, StartOptions
from jaxlm.recipes.train.checkpointing import Rewinds
from jaxlm.recipes.train.init_from import (
    RANDOM_WEIGHTS,
    START_FILE,
    check_tokenizer,
    find_init_source,
    find_start,
    names_other_base,
    with_imported_source,
    with_model_of,
    write_base,
)
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.records import print_header, print_summary, write_partial_report
from jaxlm.recipes.train.resume import ResumePoint, StartRecord
from jaxlm.recipes.train.teacher import find_teacher, load_teacher, with_teacher
from jaxlm.recipes.train.trainer import Trainer
from jaxlm.recipes.use.load import InitSource, base_fix, load_base, read_config
from jaxlm.training import epochs
from jaxlm.training.processes import ProcessGroup
from jaxlm.training.rundir import IMPORTED, RunDir, other_files, read_json
from jaxlm.training.signals import Interrupted, StopRequest
from jaxlm.tune.config import Full, Quantized

PROVENANCE_FILE = "provenance.json"
OTHER_VALIDATION = (
    "  --config.data.validation=GLOB names other text, '--config.data.validation=()' none"
)


def run_training(
    loaded: Loaded, options: StartOptions, callbacks: Callbacks | None = None
) -> dict[str, Any]:
    """Train in a run directory, or resume there, and return the last evaluation and the result.

    Raises:
      JaxlmError: for every problem that a user can cause, before compilation if it can be found.
    """
    loaded, notices = resume.with_own_validation(loaded, options.workdir)
    if options.init_from is not None:
        with rendezvous.report_failure_to_peers(options.process):
            parts.check_names(loaded.value.data)  # an import may take minutes
        options = with_imported_source(options)
        assert options.init_from is not None
        loaded, lines = with_model_of(loaded, options.init_from, options.workdir)
        notices += lines
    run: Run = loaded.value
    with rendezvous.report_failure_to_peers(options.process):
        _check_cheaply(run, options)
    with contextlib.ExitStack() as stack:
        context = _open(stack, loaded, options, callbacks or Callbacks())
        context, loaded = _with_saved(context, loaded)
        run = context.run
        stop = stack.enter_context(context.processes.stop)
        point = _resume_point(context, stop)
        is_imported = (options.workdir / IMPORTED).exists()
        if point.meta and (is_imported or resume.is_complete(point.meta, run, point.changes)):
            _record_base(context, stop, point)
            return _answer_complete(context, point.meta)
        selection, mesh = point.selection, point.mesh or setup.build_mesh_for(run)
        notices += context.store.notices
        origin = loaded.provenance["data.validation"]
        held_out = origin.where if origin.kind == "default" else ""  # else the user chose the set
        notices += [f"validation: {held_out}\n{OTHER_VALIDATION}"] if held_out else []
        source = _init_source(context, stop, point, notices.append)
        if context.processes.peers.is_first and context.directory.is_new:
            _keep_log(stack, context)
        start = _start(context, source, notices.append)
        data = _open_data(context, stop, notices.append, is_limited=bool(point.meta))
        if not point.meta:
            context, loaded, data = _with_epochs(context, loaded, data, mesh, notices.append)
            run = context.run
        notices[:0] = [
            f"{path}: {why}; if that is not meant, {fix}" for path, why, fix in run.cautions()
        ]
        if not point.meta and source is None and run.data.kind != "text":
            notices.append(RANDOM_WEIGHTS.format(run.data.kind))
        if not run.objective.samples_answers:  # else rows are of samples
            data.train.check_batch(run.pace)
        teacher_source = _teacher_source(context, stop, data, start, notices.append)
        if teacher_source:
            data = with_teacher(data, teacher_source)
        begun_with = None if point.meta else source
        compared = None
        if run.objective.compared_with is not None:
            compared = reference.find(context, begun_with, data.tokenizer.digest, notices.append)
        if point.meta:
            saved, workdir = point.meta["data"], context.directory.path
            resume.check_same_tokenizer(saved, data.fingerprint, options.resume, workdir)
            point.changes += resume.check_data(saved, data.fingerprint, options.resume)
        if source:
            check_tokenizer(source, data.tokenizer.digest)
        model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
        platform = setup.target(mesh).platform
        notices += predict.dropless_warnings(run, model.blueprint.config, mesh.shape, platform)
        notices += _row_warnings(run, data)
        _check_vocabulary(run, data)
        with jax.set_mesh(mesh):
            teacher = load_teacher(run, teacher_source, model) if teacher_source else None
            base = None
            if model.base:
                assert source is not None
                base = load_base(source, model)
            programs = TrainPrograms(run, data, model, teacher=teacher, base=base)
            if point.meta:
                resume_options = options.resume if point.start else ResumeOptions()
                checkpointing.check_state(programs, context.store, point.start, resume_options)
            if selection is not None:  # in the first process
                point.changes += _version_changes(context, notices.append)
                committed = len(context.store.steps()) - len(selection.aside)
                checkpointing.check_disk_space(programs, committed, context.directory)
            trainer = Trainer(context, programs, point, None if point.meta else source)
            if trainer.rollouts is not None:
                stack.enter_context(trainer.rollouts)
            # Nothing refuses the start from here on: now the run directory changes.
            context.directory.begin()
            if selection is not None:
                if not context.console.is_kept:
                    _keep_log(stack, context)
                selection.clear(context.store, notices.append)
                if source and not point.meta:
                    copy_hub_files(source.trained.workdir, context.directory)
                if source and base is not None:
                    is_begun = point.meta is not None
                    write_base(context.directory, source, is_begun=is_begun)
                if start is not None:
                    context.directory.write_json(START_FILE, start.record())
                if data.template is not None:
                    keep_template(data.template, context.directory.path, notices.append)
                _describe(context, loaded, data, model)
            for line in notices:
                context.console.warn(line, step=point.start)
            context.processes.barrier("begin")
            with oom.explain_oom(run, trainer.forecast):
                if compared is not None:
                    reference.attach(context, programs, compared)
            print_header(trainer, held_out)
            try:
                trainer.train(stop, options.stop_at)
            except Preempted:
                context.processes.finish()
                raise
        context.processes.finish()
        answer = print_summary(trainer)
        context.directory.outcome = _outcome(answer, trainer.alarm.verdict)
        return answer


def _check_cheaply(run: Run, options: StartOptions) -> None:
    """Check everything that takes no time: a wrong setting must not cost a minute."""
    if (options.workdir / IMPORTED).exists() and not names_other_base(options):
        source = shlex.quote(f"--init_from={options.workdir}")
        is_whole = (options.workdir / "config.json").exists()  # not an import that was killed
        if is_whole and isinstance(read_config(options.workdir).tune, Quantized):
            source = base_fix(options.workdir, "--init_from")
        raise CommandError(
            "cannot resume from an imported model",
            where=f"--workdir={options.workdir}",
            why="it has weights and no optimizer state, and stays as it was imported",
            fix=f"{shlex.quote(f'--workdir={options.workdir}-trained')} {source}",
        )
    resume.check_place(options.workdir, run, options.resume)
    trackers.check(run.log.sinks)
    with setup.name_start_folder(options.workdir):
        parts.check_names(run.data)
    setup.start(options.cpu_devices)


def _open(
    stack: contextlib.ExitStack, loaded: Loaded, options: StartOptions, callbacks: Callbacks
) -> RunContext:
    """Join the processes of the run, and open its directory, console and checkpoints."""
    run: Run = loaded.value
    processes = stack.enter_context(
        ProcessGroup(run.watch, options.process, workdir=options.workdir)
    )
    is_first = processes.peers.is_first
    processes.agree("code, config and options", _identity(loaded, options))
    others = other_files(options.workdir) if is_first else []
    directory = stack.enter_context(RunDir(options.workdir, is_writer=is_first))
    processes.shutdown.write_exit = directory.write_exit
    processes.shutdown.write_report = directory.write_report
    directory.report = functools.partial(write_partial_report, directory.path)
    processes.barrier("run directory")
    is_shown = is_first and not options.quiet and "console" in run.log.sinks
    screen = sys.stderr if is_shown else None
    console = stack.enter_context(
        Console(screen, total=run.train.steps, is_verbose=options.verbose)
    )
    if others:
        names = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        console.say(f"caution: {directory.path} has other files, which stay ({names})")
    writer = StoreWriter(
        owner=directory.lock.fence,
        is_owner=directory.lock.is_owner,
        peers=processes.peers,
        rewind_steps=run.guard.rewind_steps,
        save_seconds=run.watch.limits()["save"],
    )
    verifier = processes.verifier(console.say)
    store = object_store.opened(
        directory.checkpoints, run.checkpoint, writer=writer, verifier=verifier
    )
    rewinds = Rewinds(directory)
    rewinds.adopt(processes.share("rewinds", rewinds.as_json()))  # no disk need be shared
    stack.callback(store.release)
    stack.push(processes.exit_if_failed)  # before anything that waits for the other processes
    return RunContext(
        run=run,
        options=options,
        processes=processes,
        directory=directory,
        console=console,
        store=store,
        rewinds=rewinds,
        callbacks=callbacks,
    )


def _with_saved(context: RunContext, loaded: Loaded) -> tuple[RunContext, Loaded]:
    """Replace settings that a run chooses when it begins by those of the run, if it has begun.

    These are `precision.compute=auto`, which a new run chooses here by its devices, and what
    `train.epochs` limits, which a new run chooses when its data is open.

    JAX may not start before the processes are joined, so this is not part of the config's checks.
    """
    run, is_first = context.run, context.processes.peers.is_first
    is_auto, names = run.precision.compute == "auto", epochs.limited_names(loaded)
    if not is_auto and not names:
        return context, loaded
    chosen: dict[str, Any] = {}
    if is_first:
        saved = resume.saved_run(context.store, context.options.resume, context.rewinds)
        if saved:
            flat = config.flatten(saved)
            chosen = {name: flat[name] for name in names}
        if is_auto:
            chosen["precision.compute"] = (saved or setup.with_compute(run)).precision.compute
    chosen = context.processes.share("settings of the run", chosen)
    if is_auto:
        compute = chosen["precision.compute"]
        context.console.say(f"precision.compute: auto is {compute} in this run")
    return _changed(context, loaded, chosen)


def _changed(
    context: RunContext, loaded: Loaded, values: Mapping[str, Any]
) -> tuple[RunContext, Loaded]:
    """Return both with other values of settings. Raises ConfigError if they contradict others."""
    loaded = Loaded(loaded.value.changed(values), loaded.provenance)
    context.console.total = loaded.value.train.steps
    return dataclasses.replace(context, run=loaded.value), loaded


def _resume_point(context: RunContext, stop: StopRequest) -> ResumePoint:
    """Select the checkpoint to resume from, and build the mesh unless the run is complete."""
    run, store, directory = context.run, context.store, context.directory
    options = context.options.resume
    point = ResumePoint(None, [])
    # The record is read before the arrays: a refusal must not wait minutes for them.
    is_first = context.processes.peers.is_first
    latest = context.processes.share(
        "newest", resume.peek_latest(store, options, context.rewinds) if is_first else None
    )
    meta, changes = resume.load_resume_record(store, latest, run, options)
    if meta and not context.rewinds.made:  # the run directory may be new, and the checkpoints not
        context.rewinds.adopt(meta["rewinds"])
    directory.step = latest or 0
    if not resume.is_complete(meta, run, changes):
        point.mesh = setup.build_mesh_for(run)

    def choose() -> int | None:
        point.selection = resume.select(store, options, context.rewinds)
        return point.selection.step

    with _interruptible(stop, context.options, "the checkpoints were verified"):
        step = store.verifier.decide(choose)
    point.meta, point.changes = resume.load_resume_record(store, step, run, options)
    directory.step = point.start
    return point


def _record_base(context: RunContext, stop: StopRequest, point: ResumePoint) -> None:
    """Record the place of an adapter's base in base.json, if --init_from names another one."""
    is_first = context.processes.peers.is_first
    is_other = is_first and names_other_base(context.options)
    if not context.processes.share("base", is_other if is_first else None):
        return
    warn = functools.partial(context.console.warn, step=point.start)
    if source := _init_source(context, stop, point, warn):
        write_base(context.directory, source, is_begun=True)
        context.console.say(f"the base is {source}")


def _answer_complete(context: RunContext, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run that was already complete."""
    context.processes.finish()
    workdir = str(context.options.workdir)
    answer = {"step": meta["step"], "complete": True, "already": True, "workdir": workdir}
    if verdict := meta["progress"].get("divergence"):
        context.directory.outcome = _outcome(answer, verdict)
        answer["divergence"] = verdict
    return (meta["evaluation"] or {}) | answer


def _init_source(
    context: RunContext, stop: StopRequest, point: ResumePoint, warn: Log
) -> InitSource | None:
    """Return the run whose weights a new run starts from, or an adapter's base at every start."""
    options = context.options
    is_adapter = not isinstance(context.run.tune, Full)
    if not is_adapter and (point.meta is not None or options.init_from is None):
        return None
    with _interruptible(stop, options, "the run to start from was verified"):
        is_begun = point.meta is not None
        named = options.init_from, options.workdir, warn, context.store.verifier
        return find_init_source(context.run, *named, is_begun=is_begun)


def _open_data(context: RunContext, stop: StopRequest, warn: Log, *, is_limited: bool) -> Data:
    run, console, processes = context.run, context.console, context.processes
    with (
        _interruptible(stop, context.options, "the data was prepared"),
        processes.in_turn("prepare"),
    ):
        data = setup.open_data(
            run,
            workdir=context.directory.path,
            say=console.say,
            warn=warn,
            progress=ProgressLines(console.say),
            is_limited=is_limited,
        )
    setup.ranking_set(run, data.validation)
    setup.check_held_out(run.data, data)
    processes.agree("data", data.fingerprint)
    return data


def _with_epochs(
    context: RunContext, loaded: Loaded, data: Data, mesh: Mesh, warn: Log
) -> tuple[RunContext, Loaded, Data]:
    """Limit the passes of a new run over its data by `train.epochs`."""
    run, rows = context.run, data.train.plan.rows
    if run.objective.samples_answers:  # its rows are of samples
        return context, loaded, data
    unit = rules.split(mesh, "batch") * run.train.microbatches
    typed = epochs.typed_names(loaded)
    values = epochs.fewer_steps(run.train, rows=rows, unit=unit, typed=typed)
    flat = config.flatten(run)
    is_changed = any(flat[name] != value for name, value in values.items())
    if is_changed:
        context, loaded = _changed(context, loaded, values)
        warn(epochs.explain(run.train, context.run.train, rows))
    if is_changed or (run.train.epochs is not None and isinstance(data.train, MixtureLoader)):
        # Weights and maximum epochs of its sources may depend on the number of steps.
        data = setup.open_data(context.run, workdir=context.directory.path, is_limited=True)
    if line := epochs.explain_end(context.run.train, rows):
        warn(line)
    return context, loaded, data


def _check_vocabulary(run: Run, data: Data) -> None:
    if run.model.vocab != "auto" and run.model.vocab < data.tokenizer.size:
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.size} ids and the model only {run.model.vocab}",
            where="model.vocab",
            why=f"id {data.tokenizer.size - 1} would be past the embedding's last row",
            fix="--config.model.vocab=auto",
        )


def _row_warnings(run: Run, data: Data) -> Iterator[str]:
    """Yield a line if a row exceeds the positions of the model, or that of a stored teacher."""
    figures, positions = data.train.shards.manifest.figures, run.model.max_positions
    fix = f"if that is not meant, --config.data.sequence={positions}"
    if "longest" in figures:
        longest = figures["longest"] - 1
        if longest > positions:
            yield (
                f"data: a conversation has {longest:,} tokens, and the model {positions:,} "
                f"positions; {fix} leaves out longer ones"
            )
    elif run.data.sequence > positions:
        yield (
            f"data: a row has {run.data.sequence:,} tokens, and the model {positions:,} positions "
            f"(model.max_positions); {fix}"
        )
    stored = data.train.teacher
    if stored is not None and stored.facts.sequence != run.data.sequence:
        yield (
            f"objective.stored: the teacher saw at most {stored.facts.sequence:,} tokens before a "
            f"target, and a row has {run.data.sequence:,}; if that is not meant, "
            f"--config.data.sequence={stored.facts.sequence}"
        )


def _start(context: RunContext, source: InitSource | None, warn: Log) -> InitSource | None:
    """Return the run that this one begins with, if that is the reference of its objective."""
    if context.run.objective.teacher != START:
        return None
    path, is_first = context.directory.path, context.processes.peers.is_first
    is_begun = is_first and (path / START_FILE).is_file()
    record = context.processes.share("start", read_json(path, START_FILE) if is_begun else None)
    return find_start(record, source, warn, context.store.verifier)


def _teacher_source(
    context: RunContext, stop: StopRequest, data: Data, start: InitSource | None, warn: Log
) -> InitSource | None:
    """Return the run and step of the frozen model that the objective reads; None without one."""
    if not context.run.objective.teacher:
        return None
    with _interruptible(stop, context.options, "the teacher was verified"):
        return find_teacher(context.run, data, warn, context.store.verifier, start)


def _version_changes(context: RunContext, warn: Log) -> list[Change]:
    try:
        return resume.version_changes(context.directory.path, environment.versions())
    except DataError as error:
        warn(f"{error.what}: {error.where}")
        return []


@contextlib.contextmanager
def _interruptible(stop: StopRequest, options: StartOptions, doing: str) -> Iterator[None]:
    """Run something long before the first step, during which a signal ends the run at once."""
    try:
        with stop.waiting():
            yield
    except Interrupted as signal:
        raise Preempted(
            f"the run was stopped by {signal} while {doing}",
            where=str(options.workdir),
            why="nothing was trained since the last save",
            fix=options.resume_command,
        ) from None


def _keep_log(stack: contextlib.ExitStack, context: RunContext) -> None:
    """Copy all console lines from now on to the run directory."""
    log = context.directory.append("log.txt")
    warnings = context.directory.journal("warnings.jsonl")
    for file in (log, warnings):
        stack.enter_context(contextlib.closing(file))
    context.console.keep(log, warnings)


def _identity(loaded: Loaded, options: StartOptions) -> dict[str, str]:
    """Return the facts in which all processes of a run must agree before they compute together."""
    facts = {
        "workdir": options.workdir.absolute(),
        "init_from": options.init_from,
        "stop_at": options.stop_at,
    } | dataclasses.asdict(options.resume)
    flags = {f"--{name}": str(value) for name, value in facts.items()}
    settings = {path: str(value) for path, value in config.flatten(loaded.value).items()}
    return environment.versions() | flags | settings


def _outcome(answer: dict[str, Any], verdict: dict[str, Any] | None) -> str:
    """Return the cause in exit.json of a run that ended well."""
    if not answer["complete"]:
        stopped = f"stopped after step {answer['step']}, as --stop_at requires"
        return f"{stopped}; {verdict['outcome']}" if verdict else stopped
    return f"finished, {verdict['outcome']}: {verdict['message']}" if verdict else "finished"


def _origins(loaded: Loaded, workdir: Path) -> dict[str, str]:
    """Return the origin of each setting; one read from the run's own config has its first one."""
    config_file, stored = (workdir / "config.json").resolve(), None
    with contextlib.suppress(InputMissing, DataError):  # a description is no reason to end a run
        stored = read_json(workdir, PROVENANCE_FILE)
    before = stored if isinstance(stored, dict) else {}

    def origin_of(name: str, origin: Origin) -> str:
        is_own = origin.kind == "file" and Path(origin.where).resolve() == config_file
        return before.get(name, str(origin)) if is_own else str(origin)

    return {name: origin_of(name, origin) for name, origin in loaded.provenance.items()}


def _describe(context: RunContext, loaded: Loaded, data: Data, model: ShardedModel) -> None:
    """Write the files that describe this start; starts.jsonl keeps those that it replaces."""
    directory, options = context.directory, context.options
    settings = config.to_json(loaded.value)
    start = StartRecord(
        step=directory.step,
        rewinds=len(context.rewinds.made),
        reset_optimizer=options.resume.reset_optimizer,
        cast=options.resume.cast,
        config=settings,
        data=data.fingerprint,
        versions=environment.versions(),
    )
    resume.append_start(directory, start)
    directory.write_json("config.json", settings)
    user_code.keep(loaded.value, directory.path)
    directory.write_json(PROVENANCE_FILE, _origins(loaded, directory.path))
    kernels = attention_kernels.describe_kernels(
        loaded.value, model.blueprint.config, model.mesh.shape, setup.target(model.mesh)
    )
    facts = {"cluster": options.process.as_json(), "attention": kernels}
    directory.write_json("environment.json", environment.facts() | facts)
    directory.write_command(options.arguments)
    directory.write_bytes("tokenizer", data.tokenizer.serialize())
