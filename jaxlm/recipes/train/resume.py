"""Start and resume: the checkpoint to resume from, allowed changes, first state, history."""

import contextlib
import dataclasses
import functools
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import batch_schedule, config, disk, tree
from jaxlm.core.callbacks import Log
from jaxlm.core.config import ABSENT, Change, Loaded, Origin
from jaxlm.core.errors import CommandError, ConfigError, DataError, listed
from jaxlm.core.problems import DEFAULT, short
from jaxlm.data import chat_templates, mixture_config, tokenizer_file
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.dataset import Data
from jaxlm.models.heads import SCORE_HEADS
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Shape
from jaxlm.objectives.config import START
from jaxlm.optim import average
from jaxlm.optim.schedule_config import spans
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange.import_model import FOLDER, ImportOptions, import_model
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train.api import ResumeOptions, StartOptions
from jaxlm.recipes.train.checkpointing import Rewind, Rewinds
from jaxlm.recipes.train.programs import Teacher, TrainPrograms
from jaxlm.recipes.use.load import (
    BASE,
    InitSource,
    check_plain,
    check_without_adapter,
    find_base,
    in_stored_dtypes,
    is_model_of_another_library,
    open_run_ref,
    read_config,
)
from jaxlm.training.rundir import RunDir, read_json, split_ref
from jaxlm.training.state import TrainState
from jaxlm.tune.config import Full

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
START_FILE = "start.json"  # of a run directory: the run that its reference is
NOT_FREE = ("eval.follow",)  # losses of two sets cannot be ranked together
MODEL_FREE = ("model.dropout", "model.init", "model.init_std")  # weights keep their meaning
LINES = 4  # of an error, for differences


def restored_state(
    programs: TrainPrograms, store: Store, step: int, options: ResumeOptions
) -> TrainState:
    """Return the state of a step on this run's mesh.

    An average that the step does not have starts at its parameters; one that the run does not keep
    is left out. The options reset the optimizer state, and cast arrays. Raises DataError if the
    step does not fit the model, or has other dtypes and `options.cast` is off.
    """
    target, layout = programs.abstract(), store.layout(step)
    stored = in_stored_dtypes(target, layout) if options.cast else target
    has_average = any(path.startswith("average/") for path in layout)
    if not options.reset_optimizer and has_average == (target.average is not None):
        state = store.restore(step, stored)
        return _cast(state, target) if options.cast else state

    def part(name: str) -> Any:
        return store.restore_part(step, name, getattr(stored, name))

    params, averaged = part("params"), None
    if target.average is not None:
        averaged = part("average") if has_average else average.init(params)
    reset = options.reset_optimizer
    state = TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=programs.optimizer.init(params) if reset else part("opt_state"),
        guard=part("guard"),
        average=averaged,
    )
    return _cast(state, target)


def check_state(programs: TrainPrograms, store: Store, step: int, options: ResumeOptions) -> None:
    """Raise DataError if `restored_state` would, from the layout of the step alone.

    Runs from before `precision.moments` kept moments in the dtype of the parameters, so theirs may
    be bfloat16 though no setting differs.
    """
    target, layout = programs.abstract(), store.layout(step)

    def parts(state: TrainState) -> dict[str, Any]:
        trees = {"params": state.params, "guard": state.guard}
        if not options.reset_optimizer:
            trees["opt_state"] = state.opt_state
        if state.average is not None and any(path.startswith("average/") for path in layout):
            trees["average"] = state.average
        return trees

    store.check_layout(step, parts(in_stored_dtypes(target, layout)))
    if options.cast:
        return
    try:
        store.check_layout(step, parts(target))
    except DataError as error:
        raise DataError(
            f"checkpoint {step} has other dtypes than this config",
            where=error.where,
            why=error.why,
            fix="--cast    # converts the stored arrays to the dtypes of this config",
        ) from error


def first_state(programs: TrainPrograms, store: Store) -> TrainState:
    """Return the state before step 1 of a run that has started: checkpoint 0 or fresh weights."""
    if 0 in store.steps():
        return restored_state(programs, store, 0, ResumeOptions())
    return programs.init_state()


def state_from(programs: TrainPrograms, source: InitSource) -> TrainState:
    """Return a fresh state with the parameters of another run, in this run's dtypes and shardings.

    A new adapter begins at its base instead, and a new head of scores at 0. Raises DataError if the
    parameters do not fit the model.
    """
    if programs.base is not None and source.adapter is None:
        return programs.init_state()
    source = source.trained
    fresh, target = programs.init_state(), programs.abstract()
    layout = source.store.layout(source.step)
    stored = in_stored_dtypes(target, layout).params
    new = [
        path
        for path in tree.leaves(stored)
        if path.startswith(SCORE_HEADS) and f"params/{path}" not in layout
    ]
    params = source.store.restore_part(
        source.step, "params", tree.drop_leaves(stored, new), left_out=SCORE_HEADS
    )
    params = _cast(tree.merge_leaves(fresh.params, params), target.params)
    if fresh.average is None:
        return fresh._replace(params=params)
    return fresh._replace(params=params, average=_cast(average.init(params), target.average))


def _cast(values: Any, target: Any) -> Any:
    """Return values in the dtypes and shardings of a target tree."""
    cast = jax.jit(
        lambda values: jax.tree.map(lambda x, like: x.astype(like.dtype), values, target),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target),
    )
    return cast(values)


def find_init_source(
    run: Run, options: StartOptions, warn: Log, verifier: Verifier, *, is_begun: bool
) -> InitSource:
    """Return the run and step of --init_from=RUN[@STEP], or of an adapter's base.

    All processes of `verifier` must call it; the first one chooses the step. Raises as
    `open_run_ref` and `find_base`, and ConfigError if the model of the run differs from that of
    `run`, or all weights are to be trained and it has an adapter.

    Args:
      run: the config.
      options: with --init_from and the run directory.
      warn: called with a line for each damaged step that is passed over.
      verifier: compares the step with its record.
      is_begun: the run has a checkpoint.
    """
    if isinstance(run.tune, Full):
        assert options.init_from is not None
        source = open_run_ref(options.init_from, "--init_from", warn, verifier)
        check_plain(source, why="its checkpoints have an adapter, and tune.name=full trains all")
    else:
        base = functools.partial(find_base, options.workdir, run, options.init_from)
        source = base(warn, verifier, is_begun=is_begun)
    if source.run.objective.has_reward_head and not run.objective.has_reward_head:
        raise ConfigError(
            "the run to start from is a reward model",
            where=f"--init_from={source.workdir}",
            why=f"{run.objective.name} has no use for the head that scores texts",
            fix=f"--config.objective.name={source.run.objective.name} --config.data.kind=pairs",
        )
    if source.run.objective.has_value_head and not run.objective.has_value_head:
        warn(
            f"left out: the value head of {source.workdir}; {run.objective.name} predicts no value"
        )
    size = tokenizer_file.read(source.workdir / "tokenizer").size
    if changes := model_differences(*(_with_vocabulary(each, size) for each in (source.run, run))):
        more = f"\nand {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ConfigError(
            "the model differs from that of the run to start from",
            where=f"--init_from={source.workdir}",
            why="\n".join(map(str, changes[:3])) + more,
            fix=shlex.join(f"--config.{each.path}={each.old}" for each in changes),
        )
    return source


def _with_vocabulary(run: Run, tokens: int) -> Run:
    """Return the run with the size of its vocabulary in place of `auto`."""
    model = dataclasses.replace(run.model, vocab=setup.vocabulary(run, tokens))
    return dataclasses.replace(run, model=model)


def with_imported_source(options: StartOptions) -> StartOptions:
    """Return the options with a run in place of a model of another library, which is imported.

    The run is WORKDIR-base; a later start uses it again. Raises CommandError if there are several
    processes, as an import needs one, and else as `import_model`.
    """
    ref = options.init_from
    assert ref is not None
    several = options.process.count not in (None, 1)

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr)

    run = as_run(ref, options.workdir, options.cpu_devices, say, is_alone=not several)
    return dataclasses.replace(options, init_from=run)


def as_run(
    ref: str, workdir: Path, cpu_devices: int | None, say: Log, *, is_alone: bool = True
) -> str:
    """Return a run in place of a model of another library, which is imported to WORKDIR-base.

    Raises CommandError if the process is not alone, and else as `import_model`.

    Args:
      ref: RUN[@STEP], or a model of another library.
      workdir: the new run directory.
      cpu_devices: number of devices of a CPU.
      `say`: receives log lines.
      is_alone: if there is one process.
    """
    if not is_model_of_another_library(ref):
        return ref
    target = workdir.with_name(f"{workdir.name}-base")
    if (target / "config.json").exists():
        return str(target)
    if not is_alone:
        words = ["jaxlm", "import", f"--from={ref}", f"--workdir={target}"]
        raise CommandError(
            "several processes cannot import a model",
            where=f"--init_from={ref}",
            why="one process reads it and writes a run",
            fix=f"{shlex.join(words)}\n--init_from={target}    # afterwards",
        )
    say(f"importing {ref} to {target}")
    import_model(ImportOptions(source=ref, workdir=target, cpu_devices=cpu_devices), say)
    return str(target)


def with_model_of(loaded: Loaded, ref: str, workdir: Path) -> tuple[Loaded, list[str]]:
    """Return the config with model and tokenizer of RUN[@STEP], and lines that name the changes.

    The weights have a meaning in that model alone, so only flags of the command line, and settings
    that do not change the meaning, replace its settings. A run that has begun in `workdir` keeps
    its own, so that a resumed run does not need the other one.

    Raises InputMissing if there is no such run.
    """
    (named, _), is_begun = split_ref(ref), (workdir / "config.json").is_file()
    folder = workdir if is_begun else named
    run, origins, lines = loaded.value, dict(loaded.provenance), []
    source = read_config(folder, "--workdir" if is_begun else "--init_from")
    origin = Origin("file", short(f"{folder}/config.json"))
    raw, typed = config.to_json(run), {p for p, o in origins.items() if o.kind == "command line"}
    if "model.family" not in typed:
        model = config.to_json(source)["model"]
        free = {path for path in MODEL_FREE if origins.get(path, origin).kind == "file"}
        names = {path.removeprefix("model.") for path in typed | free if path.startswith("model.")}
        raw["model"] = model | {name: raw["model"][name] for name in names & model.keys()}
    one, other = source.data, run.data
    is_same = one.tokenizer == other.tokenizer and (
        one.train == other.train or "/" in one.tokenizer or one.tokenizer == "bytes"
    )
    if "data.tokenizer" not in typed and not is_same:
        raw["data"]["tokenizer"] = one.tokenizer if is_begun else str(named / "tokenizer")
    # The sections are checked against each other again.
    run = config.from_json(Run, raw, where=f"{folder}/config.json")
    for section, name in (("model.", "model"), ("data.tokenizer", "tokenizer")):
        changed = [each.path for each in config.diff(loaded.value, run)]
        changed = [path for path in changed if path.startswith(section)]
        set_by = [each for path in changed if (each := origins.get(path, DEFAULT)).kind == "file"]
        if changed:
            why = f"in place of that of {set_by[0].place}" if set_by else "as the config names none"
            lines.append(f"{name}: that of {named}, {why}")
            origins |= dict.fromkeys(changed, origin)
    return Loaded(run, {path: origins.get(path, origin) for path in config.flatten(run)}), lines


def model_differences(before: Run, after: Run) -> list[Change]:
    """Return the model settings that differ and change the meaning of weights."""
    changes = config.diff(before, after)
    return [
        each for each in changes if each.path.startswith("model.") and each.path not in MODEL_FREE
    ]


def check_tokenizer(source: InitSource, digest: str) -> None:
    """Raise ConfigError if the tokenizer of the run to start from has another digest."""
    file = source.workdir / "tokenizer"
    if tokenizer_file.read(file).digest != digest:
        raise ConfigError(
            "the tokenizer differs from that of the run to start from",
            where="data.tokenizer",
            why="the weights would read other text into its ids",
            fix=f"--config.data.tokenizer={file}",
        )


def names_other_base(options: StartOptions) -> bool:
    """Return whether --init_from names another place than base.json of the run directory."""
    if options.init_from is None or not (options.workdir / BASE).is_file():
        return False
    workdir, step = split_ref(options.init_from)
    named = str(workdir.absolute())
    base = read_json(options.workdir, BASE)
    known = [(each["run"], str(each["step"])) for each in (base, base.get("adapter", base))]
    return not any(run == named and step in (None, number) for run, number in known)


def write_base(directory: RunDir, source: InitSource, *, is_begun: bool) -> None:
    """Write base.json; the adapter that a run began with stays named."""
    record, file = source.record(), directory.path / BASE
    if is_begun and file.is_file():
        before = read_json(directory.path, BASE)
        record |= {name: before[name] for name in ("adapter",) if name in before}
    directory.write_json(BASE, record)


def copy_hub_files(source: Path, workdir: Path) -> None:
    """Copy the files of an imported model, such as its chat template, for exports of this run."""
    folder = source / FOLDER
    if folder.is_dir():
        shutil.copytree(folder, workdir / FOLDER, dirs_exist_ok=True)


def keep_template(template: ChatTemplate, workdir: Path, warn: Log) -> None:
    """Write the template of the conversations, for generation and exports of this run."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    known = chat_templates.of_folder(folder)
    if known is not None and chat_templates.dated(known) != template.source:
        warn(f"the chat template, {template.where}, differs from that of the model: {known.where}")
    for name, content in chat_templates.keep(template, folder).items():
        disk.replace(folder / name, content)


def find_start(
    record: dict[str, Any] | None, source: InitSource | None, warn: Log, verifier: Verifier
) -> InitSource:
    """Return the run and step that a run begins with, which is the reference of its objective.

    Raises as `open_run_ref`, and ConfigError if the run begins with fresh weights.

    Args:
      record: the contents of start.json; None for a new run.
      source: the run of --init_from; None if the run has begun.
      warn, verifier: as of `open_run_ref`.
    """
    if record is not None:
        where = "--config.objective.reference"
        return open_run_ref(f"{record['run']}@{record['step']}", where, warn, verifier)
    if source is None:
        raise ConfigError(
            "the run begins with fresh weights, which are no reference",
            where="objective.reference = start",
            why="the distance to a model that writes noise is no use, and --init_from names none",
            fix="--config.objective.kl=none",
        )
    return source


def find_teacher(
    run: Run,
    data: Data,
    warn: Log,
    verifier: Verifier | None = None,
    start: InitSource | None = None,
) -> InitSource | None:
    """Return the run and step of the frozen model that the objective reads; None without one.

    Raises as `open_run_ref`, and ConfigError if its tokenizer differs from that of the data.

    Args:
      run: the config.
      data: with the tokenizer.
      warn, verifier: as of `open_run_ref`.
      start: the run that this one begins with.
    """
    if not run.objective.teacher:
        return None
    if run.objective.teacher == START:
        return start
    flag = "--config.objective.teacher"
    source = open_run_ref(run.objective.teacher, flag, warn, verifier)
    check_without_adapter(source, flag, "a teacher is loaded without an adapter")
    check_tokenizer(source, data.tokenizer.digest)
    return source


def with_teacher(data: Data, source: InitSource | None) -> Data:
    """Return the data with the digest of the teacher's weights in its fingerprint."""
    if source is None:
        return data
    return dataclasses.replace(data, fingerprint=data.fingerprint | {"teacher": source.digest})


def load_teacher(run: Run, source: InitSource | None, model: ShardedModel) -> Teacher | None:
    """Return the frozen model on the mesh of `model`; None without one.

    Raises ConfigError if its vocabulary differs, or it has too few positions.
    """
    if source is None:
        return None
    vocab = model.blueprint.config.vocab
    size = vocabulary_of(source)
    if size != vocab:
        raise ConfigError(
            "the vocabulary of the model differs from that of its teacher",
            where="model.vocab",
            why=f"the model has {vocab} ids and the teacher {size}",
            fix=f"--config.model.vocab={size}",
        )
    return frozen_model(run, source, vocab, model.mesh)


def vocabulary_of(source: InitSource) -> int:
    """Return the number of ids of the model of another run."""
    return setup.vocabulary(source.run, tokenizer_file.read(source.workdir / "tokenizer").size)


def frozen_model(run: Run, source: InitSource, vocab: int, mesh: Mesh) -> Teacher:
    """Return the model of another run on a mesh, laid out as `run` is, see `setup.taught_run`."""
    taught = setup.build_sharded_model(setup.taught_run(source.run, run), vocab, mesh)
    params = source.store.restore_part(source.step, "params", setup.abstract_params(taught))
    return Teacher(taught.blueprint, params)


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

    Logging, checkpoints and layout may change, and `train.steps` if the schedule does not depend on
    it. Other changes need to be allowed, setting by setting. Raises ConfigError if a change is not
    allowed; it lists all of them.
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
            fix=f"--workdir=runs/another\n{_flags_that_allow(refused)}",
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
        return None, []
    meta = store.record(step).meta
    return meta, check(config.from_json(Run, meta["config"]), run, options, step)


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
            fix="--workdir=runs/another\n"
            "--allow_change=data    # resumes on the new data, from the same step",
        )
    return changes


def _flags_that_allow(refused: list[Change]) -> str:
    paths = [change.path for change in refused]
    flags = []
    if {"optim.name", "optim.freeze"} & set(paths):  # other optimizer state
        flags.append("--reset_optimizer")
        paths = [path for path in paths if not path.startswith(("optim.", "schedule."))]
    if {"precision.params", "precision.moments"} & set(paths):
        flags.append("--cast")
        paths = [path for path in paths if not path.startswith("precision.")]
    return " ".join([*flags, *([f"--allow_change={','.join(paths)}"] if paths else [])])


def _is_free(change: Change, run: Run, allowed: tuple[str, ...], completed: int) -> bool:
    def is_in(names: Sequence[str]) -> bool:
        return any(change.path == name or change.path.startswith(f"{name}.") for name in names)

    if change.path not in NOT_FREE and is_in(FREE):
        return True
    if change.path == "train.steps" and run.train.steps >= completed:
        warmups = (*run.train.batch_warmup, *run.data.sequence_warmup)
        moving = [  # a share depends on the number of steps
            *spans(run.schedule).values(),
            *mixture_config.change_spans(run.data.mixture),
            *(batch_schedule.parse(entry)[1] for entry in warmups),
        ]
        if all(span.unit != "share" for span in moving):
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


# The history: each start of a run is kept for good. A step is replayed under the start that made
# it; the newest start is not enough for that, and checkpoints are removed.


STARTS_FILE = "starts.jsonl"


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
