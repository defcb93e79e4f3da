"""Load the model of a trained run."""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config, tree
from jaxlm.core.callbacks import Log
from jaxlm.core.config import ABSENT, Change
from jaxlm.core.errors import CommandError, ConfigError, DataError, InputMissing, listed
from jaxlm.core.hub import PREFIX
from jaxlm.core.sections import show
from jaxlm.data import tokenizer_file
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models.heads import ADDED_HEADS
from jaxlm.optim.average_config import NoAverage, first_averaged_update
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels
from jaxlm.training import state as states
from jaxlm.training.rundir import imported_facts, read_json, split_ref
from jaxlm.tune import surgery
from jaxlm.tune.config import Full, QLora, Quantized

Weights = Literal["raw", "ema", "swa"]
Onto = Literal["dequantized", "original"]
# The weights of an adapter keep their meaning.
TUNE_FREE = ("tune.dropout", "tune.b_lr", "tune.text")
BASE = "base.json"  # of a run with an adapter: the run, step and digest of its base


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run's model with the parameters of one step, replicated or split by the run's mesh."""

    workdir: Path
    run: Run
    step: int
    model: setup.ShardedModel
    params: Any
    tokenizer: Tokenizer
    is_trained: bool = True  # False for a published size, whose `workdir` is its name
    weights: Weights = "raw"  # the parameters are those of the step, or their average


@dataclasses.dataclass(frozen=True)
class InitSource:
    """A committed step of another run."""

    run: Run
    store: Store
    step: int
    adapter: "InitSource | None" = None  # on its weights; a new run begins with it

    @property
    def workdir(self) -> Path:
        """The directory of the run."""
        return self.store.workdir

    @property
    def digest(self) -> str:
        """A digest of every file of the step."""
        files = sorted(self.store.record(self.step).files.items())
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the contents of base.json: run, step and digest, also of the adapter."""
        facts = {"run": str(self.workdir.absolute()), "step": self.step, "sha256": self.digest}
        return facts if self.adapter is None else facts | {"adapter": self.adapter.record()}

    @property
    def trained(self) -> "InitSource":
        """The run and step with the first values of the leaves that are trained."""
        return self.adapter or self

    def __str__(self) -> str:
        return f"step {self.step} of {self.workdir}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter for the model of another run, with the config of this run and the adapter."""

    run: Run

    def leaves(self, model: setup.ShardedModel, base: Any) -> Any:
        """Return the trained leaves, on the mesh; `base` are the parameters of `load_base`."""
        raise NotImplementedError


ReadAdapter = Callable[[InitSource], Adapter]


def open_run_ref(ref: str, flag: str, warn: Log, verifier: Verifier | None = None) -> InitSource:
    """Return the run and step of RUN[@STEP]; without a step, the newest.

    `flag` is the flag or setting that names it, for errors: the step of a --workdir is in --step.
    `warn` is called with a line for each damaged step that is passed over. The verifier compares
    the step with its record; None does so in this process alone.

    Raises:
      CommandError: if STEP is not a number.
      InputMissing: if there is no such run or step.
      DataError: if the step is damaged.
    """
    workdir, step = _parsed(ref, flag)
    run = read_config(workdir, flag)
    verifier = verifier or Verifier(say=warn)
    store = object_store.of_run(workdir, verifier=verifier)
    before = "--step=" if flag == "--workdir" else typed(flag, f"{workdir}@")
    chosen = verifier.decide(lambda: select_step(store, step, False, warn, before))
    return InitSource(run, store, chosen)


def check_run_ref(ref: str, flag: str) -> None:
    """Raise as `open_run_ref` without such a run or step; files of the step are not verified."""
    workdir, step = _parsed(ref, flag)
    read_config(workdir, flag)
    if step is not None:
        committed_step(object_store.of_run(workdir), step, typed(flag, f"{workdir}@"))


def _parsed(ref: str, flag: str) -> tuple[Path, int | None]:
    """Return run and step of RUN[@STEP]. Raises CommandError if STEP is not a number."""
    workdir, text = split_ref(ref)
    if text is not None and not text.isdigit():
        raise CommandError(
            "the step to start from is not a number",
            where=typed(flag, ref),
            why=f"{text!r} follows the @, which separates the run and the step",
            fix=shlex.quote(typed(flag, str(workdir))),
        )
    return workdir, None if text is None else int(text)


def recorded_start(workdir: Path) -> str | None:
    """Return RUN@STEP of the first weights of a run with an adapter; None before it begins."""
    if not (workdir / BASE).is_file():
        return None
    base = read_json(workdir, BASE)
    return "{run}@{step}".format_map(base.get("adapter", base))


def typed(flag: str, value: str) -> str:
    """Return a flag with its value, or the value of a positional argument.

    Example:
      >>> typed("--init_from", "runs/a"), typed("--judge=reward:", "runs/a")
      ('--init_from=runs/a', '--judge=reward:runs/a')
      >>> typed("jaxlm rate", "runs/a")
      'runs/a'
    """
    if not flag.startswith("--"):
        return value
    return f"{flag}{value}" if flag.endswith(":") else f"{flag}={value}"


def is_model_of_another_library(ref: str) -> bool:
    """Return whether a path or name is a folder of transformers, a GGUF or a model of the hub."""
    path = Path(ref)
    is_folder = (path / "config.json").is_file() and not (path / "checkpoints").exists()
    return is_folder or path.suffix == ".gguf" or ref.startswith(PREFIX)


def read_config(workdir: Path, flag: str = "--workdir") -> Run:
    """Return the config of a run; `flag` names the run, for errors.

    Raises:
      CommandError: if it is a model of another library.
      InputMissing: if there is no such run.
    """
    if is_model_of_another_library(str(workdir)):
        target = f"{workdir.name.removesuffix('.gguf').replace(':', '-')}-run"
        words = ["jaxlm", "import", f"--from={workdir}", f"--workdir={target}"]
        raise CommandError(
            f"{workdir} is a model of another library",
            where=typed(flag, str(workdir)),
            why="a run has checkpoints of jaxlm, which an import makes",
            fix=shlex.join(words),
        )
    return config.from_json(Run, read_json(workdir, "config.json"), f"{workdir}/config.json")


def find_base(
    workdir: Path,
    run: Run,
    ref: str | None,
    warn: Log,
    verifier: Verifier | None = None,
    *,
    is_begun: bool = True,
) -> InitSource:
    """Return the run and step whose weights the adapter of `run` changes.

    It is the one of --init_from, or the one that base.json of the run directory names. If
    --init_from names a run with an adapter, it is the base of this run, and a run that has not
    begun starts with its adapter.

    Args:
      workdir: the run directory.
      run: the run with the adapter.
      ref: RUN[@STEP] of --init_from; None without the flag.
      warn: called with a line for each damaged step that is passed over.
      verifier: compares the step with its record, and all of its processes must call this; None
        for this process alone.
      is_begun: the run has a checkpoint, and needs no other adapter.

    Raises:
      ConfigError: if nothing names a base, or its adapter has other settings than that of `run`.
      InputMissing: if it is gone.
      DataError: if its files changed since the run began.
    """
    file = workdir / BASE
    record = read_json(workdir, BASE) if file.is_file() else {}
    if ref is None and not record:
        raise ConfigError(
            f"tune.name = {run.tune.name} needs the weights of a model",
            where="--init_from",
            why="an adapter changes a model that was trained before",
            fix="--init_from=runs/base    # a run or a folder of transformers\n"
            "--config.tune.name=full",
        )
    begun_with = None if is_begun else record.get("adapter")
    recorded = "" if ref is not None else "{run}@{step}".format_map(begun_with or record)
    try:
        source = open_run_ref(ref or recorded, "--init_from", warn, verifier)
    except InputMissing as error:
        if not recorded:
            raise
        fix = f"{move_command(workdir)}    # the new place of the model"
        why = f"{file} names {recorded}: {error.what}"
        raise InputMissing(
            "the adapter's base is gone", where=str(file), why=why, fix=fix
        ) from error
    _check_not_quantized(source, "--init_from")
    if not isinstance(source.run.tune, Full):
        _check_same_adapter(source, run)
        base = find_base(source.workdir, source.run, None, warn, verifier)
        source = dataclasses.replace(base, adapter=None if is_begun else source)
    if record and source.digest != record["sha256"]:
        raise DataError(
            "the adapter's base changed since the run began",
            where=str(file),
            why=f"sha256 of {source} is {source.digest[:16]}..., not {record['sha256'][:16]}...",
            fix=f"{move_command(workdir)}    # a copy of the model that the run began with",
        )
    return source


def check_plain(
    source: InitSource,
    flag: str = "--init_from",
    why: str = "an adapter changes the weights of a plain model",
) -> None:
    """Raise ConfigError if the run has an adapter of its own or codes; `flag` names the run."""
    _check_not_quantized(source, flag)
    check_without_adapter(source, flag, why)


def check_without_adapter(source: InitSource, flag: str, why: str) -> None:
    """Raise ConfigError if the run has an adapter of its own; `flag` names the run."""
    if not isinstance(source.run.tune, Full | Quantized):
        raise ConfigError(
            "the model that is named has an adapter of its own",
            where=f"{flag}={source.workdir}",
            why=why,
            fix=plain_fix(source, flag),
        )


def check_teaches(source: InitSource, flag: str) -> None:
    """Raise ConfigError if a run has no plain model of the next token; `flag` names the run."""
    check_without_adapter(source, flag, "a teacher or a reference is loaded without an adapter")
    run = source.run
    if run.objective.prompts != "left to right" or run.architecture != "decoder":
        raise ConfigError(
            "the run does not predict each token from those before it",
            where=f"{flag}={source.workdir}",
            why=f"it was trained with the objective {run.objective.name}",
            fix=f"name a {flag} of the objective causal",
        )


def _check_not_quantized(source: InitSource, flag: str) -> None:
    """Raise ConfigError if the weights of a run are codes, which nothing is trained from."""
    if isinstance(source.run.tune, Quantized):
        raise ConfigError(
            "the model to start from is quantized",
            where=f"{flag}={source.workdir}",
            why=source.run.tune.unmerged,
            fix=plain_fix(source, flag),
        )


def adapter_differences(before: Run, after: Run) -> list[Change]:
    """Return the settings of adapters that differ and change the meaning of their weights."""
    changes = config.diff(before, after)
    return [
        each for each in changes if each.path.startswith("tune.") and each.path not in TUNE_FREE
    ]


def flags_of(changes: Sequence[Change]) -> str:
    """Return the flags that undo changes of settings."""
    flags = {each.path: each.old for each in changes if each.old != ABSENT}
    return shlex.join(f"--config.{path}={show(value)}" for path, value in flags.items())


def _check_same_adapter(source: InitSource, run: Run) -> None:
    """Raise ConfigError if the adapter of a run cannot be trained on as that of another."""
    if changes := adapter_differences(source.run, run):
        raise ConfigError(
            "the adapter differs from that of the run to start from",
            where=f"--init_from={source.workdir}",
            why=listed([*map(str, changes)], 3),
            fix=f"{flags_of(changes)}\n{plain_fix(source)}    # for another adapter",
        )


def move_command(workdir: Path) -> str:
    """Return the command that names another place of the base of a run with an adapter."""
    return f"jaxlm train --workdir={shlex.quote(str(workdir))} --init_from=runs/base"


def plain_fix(source: InitSource, flag: str = "--init_from") -> str:
    """Return the command that makes a plain model of a run with an adapter, or a flag for its base.

    The flag is returned if the adapter cannot be merged.
    """
    if not source.run.tune.unmerged:
        return merge_command(source.workdir)
    return base_fix(source.workdir, flag)


def unmerged_fix(run: Run, workdir: Path) -> str:
    """Return the fix of a command that needs plain weights, and cannot merge those of the run."""
    if isinstance(run.tune, Quantized):
        return base_fix(workdir, "--workdir")
    return f"jaxlm eval --workdir={shlex.quote(str(workdir))}"


def base_fix(workdir: Path, flag: str) -> str:
    """Return a flag that names the run whose weights a run was made of, not merged or rounded."""
    if not (workdir / BASE).is_file():
        made = imported_facts(workdir).get("source", "it")
        return f"{flag}=runs/base    # an import of the model that {made} was quantized from"
    record = read_json(workdir, BASE)
    step = f"@{record['step']}" if flag == "--init_from" else ""
    return shlex.quote(f"{flag}={record['run']}{step}")


def merge_command(workdir: Path) -> str:
    """Return the command that makes a plain model of a run with an adapter."""
    merged = shlex.quote(f"{workdir}-merged")
    return f"jaxlm merge --workdir={shlex.quote(str(workdir))} --out={merged}"


def in_stored_dtypes(target: Any, layout: dict[str, str]) -> Any:
    """Return the same shapes and shardings in the dtypes that are on the disk."""

    def stored(path: str, leaf: Any) -> Any:
        dtype = layout.get(path, leaf.dtype.name).partition("[")[0]
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding)

    return tree.map_with_path(stored, target)


def load_base(source: InitSource, model: setup.ShardedModel) -> Any:
    """Return the parameters of an adapter's base on the mesh, in the dtypes of the model.

    Each is quantized, or cast, when it is read: no more than one is in memory as it is stored.
    """
    added = [path for path in tree.leaves(model.plain.shapes) if path.startswith(ADDED_HEADS)]
    shapes, layout = (
        tree.drop_leaves(each, added) for each in (model.plain.shapes, model.plain_shardings)
    )
    plain = states.abstract(shapes, layout)
    stored = in_stored_dtypes({"params": plain}, source.store.layout(source.step))["params"]
    source.store.check_layout(source.step, {"params": stored}, left_out=ADDED_HEADS)
    targets = tree.leaves(setup.abstract_base(model))
    quantized = surgery.quantized_weights(model.stored)
    base: dict[str, jax.Array] = {}
    for path, leaf in tree.leaves(stored).items():
        read = source.store.restore_leaf(source.step, f"params/{path}", leaf)
        if layer := quantized.get(path):
            parts = jax.eval_shape(layer.quantized, leaf)
            names = {name: f"{path.rpartition('/')[0]}/{name}" for name in parts}
            layout = {name: targets[new].sharding for name, new in names.items()}
            made = jax.jit(layer.quantized, out_shardings=layout)(read)
            base |= {new: made[name] for name, new in names.items()}
            jax.block_until_ready(made)  # else the next tensor is read while this one exists
        else:
            base[path] = read.astype(targets[path].dtype)
        del read
    return tree.map_with_path(lambda path, _: base[path], model.stored.shapes)


def load_run(
    workdir: Path,
    *,
    step: int | None = None,
    best: bool = False,
    weights: Weights = "raw",
    sequence: int | None = None,
    cpu_devices: int | None = None,
    is_merged: bool = True,
    onto: Onto = "dequantized",
    adapter: ReadAdapter | None = None,
    check: Callable[[LoadedRun], None] = lambda _: None,
    say: Log = lambda _: None,
) -> LoadedRun:
    """Load the newest step of a run, the best one, or the named one.

    If the kernel of the training cannot compute attention on these devices and rows, another is
    chosen and logged. Raises InputMissing without the run or the step, DataError if the step is
    damaged, and CommandError if the run stores no such average, or it is to have an adapter.

    Args:
      workdir: the run.
      step: the step to load; None for the newest.
      best: load the best step instead.
      weights: the parameters or the stored average of them, in the dtypes of the parameters.
      sequence: length of the rows; None for the run's own.
      cpu_devices: number of devices to split the CPU into.
      is_merged: merge an adapter into its base, if it can be.
      onto: the base of an adapter that was trained on a quantized one: as it was trained, or as
        the base's run stores it.
      adapter: reads an adapter to put on the weights of the step; None for the run's own, if any.
      check: called before weights are read, with shapes in their place; it may raise.
      `say`: receives log lines.
    """
    run = read_config(workdir)
    if isinstance(run.tune, QLora) and onto == "original":
        run = dataclasses.replace(run, tune=run.tune.unquantized())
    if adapter is not None and weights != "raw":
        what, why = "an adapter has no average of its base", "it changes the weights of a step"
        raise CommandError(what, where=f"--weights={weights}", why=why, fix="--weights=raw")
    encoder = tokenizer_file.read(workdir / "tokenizer")
    if weights not in ("raw", run.average.name):
        what = f"the run stores no {weights} average of its parameters"
        fix = f"--weights={'raw' if isinstance(run.average, NoAverage) else run.average.name}"
        why = f"its average.name is {run.average.name}"
        raise CommandError(what, where=f"--weights={weights}", why=why, fix=fix)
    setup.start(cpu_devices)
    verifier = Verifier(say=say)
    store = object_store.of_run(workdir, verifier=verifier)
    chosen = select_step(store, step, best, say)
    source = InitSource(run, store, chosen)
    added = None if adapter is None else adapter(source)
    if added is not None:
        run = added.run
    mesh_config = run.mesh
    try:
        mesh_config.sizes(jax.device_count())
    except ConfigError:  # runs of a pod are inspected on laptops too
        mesh_config = MeshConfig()
    mesh = meshes.build(mesh_config)
    vocab = setup.vocabulary(run, encoder.size)
    adapted = _adapted_to_mesh(run, vocab, mesh, sequence, say)
    model = setup.build_sharded_model(adapted, vocab, mesh)
    abstract = model.own(setup.abstract_params(model))
    check(LoadedRun(workdir, run, chosen, model, abstract, encoder))
    if added is not None:
        base = load_base(source, model)
        params = added.leaves(model, base)
    elif weights == "raw":
        params = store.restore_part(chosen, "params", abstract)
    else:
        assert not isinstance(run.average, NoAverage)
        first = first_averaged_update(run.average, run.train.steps, run.pace)
        if chosen < first:
            say(f"at step {chosen} the {weights} average is the parameters: it begins at {first}")
        shape = jax.ShapeDtypeStruct
        layout = jax.tree.map(lambda a: shape(a.shape, jnp.float32, sharding=a.sharding), abstract)
        average = store.restore_part(chosen, "average", layout)
        params = jax.tree.map(lambda a, leaf: a.astype(leaf.dtype), average, abstract)
    if model.base:
        if added is None:
            base = load_base(find_base(workdir, run, None, say), model)
        params = tree.merge_leaves(base, params)
        blueprint, decoded = setup.decoding(model)
        if is_merged and blueprint is model.plain:
            with jax.set_mesh(mesh):
                params = decoded(params)
            run, adapted = map(_merged, (run, adapted))
            model = setup.build_sharded_model(adapted, vocab, mesh)
    return LoadedRun(workdir, run, chosen, model, params, encoder, weights=weights)


def _merged(run: Run) -> Run:
    """Return the run with its adapter in the weights, whose base is no reference any more."""
    objective: Any = run.objective
    if objective.compared_with == "adapter_off":
        objective = dataclasses.replace(objective, reference="start")
    return dataclasses.replace(run, tune=Full(), objective=objective)


def check_generates(opened: LoadedRun, *, is_chat: bool) -> None:
    """Raise ConfigError if the model of a run cannot continue text, or answer as in a chat."""
    if opened.run.objective.prompts == "none":
        where = f"objective.name={opened.run.objective.name}"
        why = "it predicts masked tokens from those before and after them"
        if opened.run.objective.has_reward_head:
            why = "it scores answers"
        workdir = shlex.quote(str(opened.workdir))
        fix = f"jaxlm eval --workdir={workdir}    # what such a model can do"
        raise ConfigError("this model cannot continue a text", where=where, why=why, fix=fix)
    if is_chat and opened.run.architecture == "encoder-decoder":
        what = "an encoder-decoder does not support --chat"
        fix = "without --chat a prompt is read as it is"
        why = f"{opened.run.model.family} does not continue its input"
        raise ConfigError(what, where="--chat", why=why, fix=fix)


def check_left_to_right(opened: LoadedRun, verb: str) -> None:
    """Raise ConfigError if the model of a run does not continue a text, or reads it both ways."""
    check_generates(opened, is_chat=False)
    if opened.run.objective.prompts == "both ways":
        raise ConfigError(
            f"jaxlm {verb} reads prompts from left to right",
            where=f"objective.name={opened.run.objective.name}",
            why="this model reads a prompt in both directions, as a whole",
            fix="`jaxlm generate` continues prompts of this model",
        )


def check_scores(opened: LoadedRun) -> None:
    """Raise ConfigError if the model of a run has no probability of each token of a text."""
    check_generates(opened, is_chat=False)
    if opened.run.architecture == "encoder-decoder":
        workdir = shlex.quote(str(opened.workdir))
        raise ConfigError(
            "this model has no probabilities of a text",
            where=f"model.family={opened.run.model.family}",
            why="it reads one text and writes another",
            fix=f"jaxlm eval --workdir={workdir}    # what such a model can do",
        )


def select_step(
    store: Store, step: int | None, best: bool, say: Log, before: str = "--step="
) -> int:
    """Return the requested step if it is undamaged; by default the newest undamaged one.

    Args:
      store: the steps of a run.
      step: the requested step.
      best: take the best step instead of the newest.
      `say`: receives log lines.
      before: the text before a step on the command line, for errors.

    Raises CommandError if a step and the best one are requested, and what `committed_step` and
    `check_undamaged` raise.
    """
    if best and step is not None:
        raise CommandError(
            "a step and the best one are requested",
            where=f"--best {before}{step}",
            why=f"they may differ: the best is that of step {store.best()}",
            fix=f"leave --best out\nleave {before}{step} out",
        )

    def damaged(step: int, lines: list[str]) -> None:
        say(f"checkpoint {step} is damaged ({lines[0]})")

    named = step if step is not None else store.best() if best else None
    step = store.latest_valid(damaged) if named is None else named
    chosen = committed_step(store, step, before)
    if named is not None:
        check_undamaged(store, named)
    return chosen


def committed_step(store: Store, step: int | None, before: str = "--step=") -> int:
    """Return the step. Raises InputMissing if it is None or not committed.

    `before` is the text before a step on the command line, for errors.
    """
    committed = store.steps()
    if step is not None and step in committed:
        return step
    what = f"the run has no checkpoint {'yet' if step is None else f'of step {step}'}"
    why = f"committed steps: {', '.join(map(str, committed)) or 'none'}"
    fix = f"jaxlm train --workdir={shlex.quote(str(store.workdir))}"
    fix = shlex.quote(f"{before}{committed[-1]}") if committed else fix
    raise InputMissing(what, where=str(store.directory), why=why, fix=fix)


def check_undamaged(store: Store, step: int) -> None:
    """Raise DataError if a file of the step is damaged."""
    if problems := store.problems(step):
        raise DataError(
            f"checkpoint {step} is damaged",
            where=str(store.directory / str(step)),
            why="\n".join(problems[:4]),
            fix=f"jaxlm checkpoint list --workdir={shlex.quote(str(store.workdir))}",
        )


def _adapted_to_mesh(run: Run, vocab: int, mesh: Mesh, sequence: int | None, say: Log) -> Run:
    """Return the run on rows of another length, with kernels that compute its attention here."""
    run = run.at(run.pace.phases[-1])  # warm-ups are over
    data = dataclasses.replace(run.data, sequence=sequence or run.data.sequence)
    run = dataclasses.replace(run, data=data)
    decoder = run.decoder(vocab)
    free = dataclasses.replace(run, train=dataclasses.replace(run.train, attention="auto"))
    target = setup.target(mesh)
    try:
        attention_kernels.check(run, decoder, mesh.shape, target)
    except ConfigError as error:
        chosen = attention_kernels.describe_kernels(free, decoder, mesh.shape, target)
        say(f"{error.what} here: {chosen}")
        return free
    return run
