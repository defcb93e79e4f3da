"""Setup of a run: the start of JAX, the mesh, the sharded model, the data."""

import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import math
import os
import platform
import re
import shlex
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src import lru_cache
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int

from jaxlm.core import backend, tree
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import CommandError, ConfigError, InputMissing, JaxlmError, NotWritable
from jaxlm.core.nearest import nearest_word
from jaxlm.core.precision import Precision
from jaxlm.data import cache, dataset
from jaxlm.data.config import HELD_OUT, TOKENIZER_FILES, DataConfig
from jaxlm.data.dataset import Data
from jaxlm.data.documents import notes_of_tables, notes_of_unfinished
from jaxlm.data.teacher import StoredTeacher
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals.loss import TokenizerPrefix
from jaxlm.models.build import Blueprint
from jaxlm.models.families.union import TabledFamily
from jaxlm.models.heads import add_reward_head, add_value_head
from jaxlm.objectives.build import build as build_objective
from jaxlm.objectives.config import Distill
from jaxlm.ops.kernels import Target
from jaxlm.optim import groups
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel import rules
from jaxlm.recipes.config import VOCAB_MULTIPLE, Run
from jaxlm.recipes.plan import attention_kernels, divisibility
from jaxlm.training import state as states
from jaxlm.training.rundir import read_json
from jaxlm.tune import merge, surgery
from jaxlm.tune.config import Full

CACHE_FOLDER = "jax_compilation_cache_dir"
MIN_COMPILE_TIME = "jax_persistent_cache_min_compile_time_secs"
KEPT_SECONDS = 0.1  # JAX's default of 1 leaves out a second of small programs at each start
PASS_TOKENS = 16_384  # of a forward pass outside of training, for each part of the batch
PASS_LOGITS = 2_048  # tokens of a device whose logits are in memory in such a pass
MAX_HELD_OUT = 50  # percent, in the fix line of an error
_put_in_place = lru_cache.LRUCache.put
_SCALED = re.compile(r"/attention/(query|key)/")  # weights that QK-clip scales


def start(cpu_devices: int | None = None) -> None:
    """Configure JAX before it initializes its devices.

    `cpu_devices` splits this machine's CPU into that many devices, to try a mesh without the
    hardware. The cache folder stores compiled programs, so the second start of a run does not
    compile again. Raises CommandError if JAX has started with another number of devices.
    """
    if cpu_devices is not None:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:
            raise CommandError(
                "the number of CPU devices cannot change once JAX has started",
                where=f"--cpu_devices={cpu_devices}",
                why=str(error),
                fix="set it in the first command of the process",
            ) from error
    # On a CPU, asynchronous dispatch gains no parallelism; and core/backend.py keeps freed memory
    # only for programs that the main thread runs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if getattr(jax.config, CACHE_FOLDER) is None:
        jax.config.update(CACHE_FOLDER, str(compile_cache()))
    if MIN_COMPILE_TIME.upper() not in os.environ:
        jax.config.update(MIN_COMPILE_TIME, KEPT_SECONDS)
    lru_cache.LRUCache.put = _put  # type: ignore[assignment]


def _put(store: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Store a compiled program atomically.

    JAX writes the file in place and never again: a process that is killed while writing leaves a
    file that every later start fails to read, and a concurrent reader gets an incomplete file.
    """
    if store.eviction_enabled:  # under a lock of its own
        return _put_in_place(store, key, value)
    target = store.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    if not target.exists():
        partial = store.path / f".{key}.{os.getpid()}.{threading.get_ident()}.tmp"
        partial.write_bytes(value)
        partial.replace(target)


def compile_cache() -> Path:
    """Return a folder for compiled programs; only this user can write it, since they are executed.

    Its name depends on the user, the compiler and the features of the processor: a program for
    another processor may crash.
    """
    folder = cache.folder(
        cache.default(),
        "compiled",
        user=os.getuid(),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        processor=_processor(),
    )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        folder.chmod(0o700)
    except OSError as error:
        raise NotWritable(
            "the folder for compiled programs cannot be used",
            where=str(folder),
            why=f"{type(error).__name__}: {error.strerror}",
            fix="export JAXLM_CACHE=~/jaxlm-cache",
        ) from error
    return folder


def _processor() -> str:
    """Return the model and the features of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    facts = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([platform.machine(), *facts])


def target(mesh: Mesh | AbstractMesh) -> Target:
    """Return the compilation target of a mesh; without devices, the platform of the trace."""
    if isinstance(mesh, AbstractMesh):
        return Target(backend.name())
    device = mesh.devices.flat[0]
    # On AMD the capability is a name.
    capability = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))
    return Target(device.platform, float(capability[0]) if capability else None)


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model's blueprint, and the shardings of its parameters and gradients.

    `trained` is the same model for training steps, which may round products (quantized training).
    With an adapter, `plain` is the model without it, `stored` is that model with the layers
    quantized that the adapter quantizes, and `base` are the paths of the leaves of `stored` that
    are no part of the state, and not trained.
    """

    mesh: Mesh
    precision: Precision
    blueprint: Blueprint
    trained: Blueprint
    shardings: Any
    gradients: Any
    plain: Blueprint
    stored: Blueprint
    plain_shardings: Any
    base: frozenset[str] = frozenset()

    def own(self, leaves: Any) -> Any:
        """Return a tree of all leaves without those of the base."""
        return tree.drop_leaves(leaves, self.base)


def with_compute(run: Run) -> Run:
    """Return the run with the dtype that `precision.compute=auto` is on this process's devices."""
    is_auto = run.precision.compute == "auto"
    return run.with_compute(backend.fastest_dtype()) if is_auto else run


def build_sharded_model(run: Run, vocab: int, mesh: Mesh) -> ShardedModel:
    """Build the model of `run` with a vocabulary of `vocab` ids, sharded on `mesh`.

    Raises ConfigError if a dimension does not divide by its mesh axes, or the configured kernel
    does not support the attention of this model on this mesh.
    """
    run = with_compute(run)
    precision = Precision.of(run.precision)
    decoder = run.decoder(vocab)
    hardware = target(mesh)
    attention_kernels.check(run, decoder, mesh.shape, hardware)
    decoder = attention_kernels.with_kernels(run, decoder, mesh.shape, hardware)
    build = functools.partial(
        Blueprint,
        decoder,
        layers=run.train.stack_on(hardware.platform, mesh.size, len(decoder.layers)),
        remat=run.train.remat,
        schedule=divisibility.schedule(run, mesh.shape),
    )
    quantize, change = surgery.quantization(run.tune), surgery_of(run)
    head = head_of(run)
    plain = build(precision=precision.evaluated, surgery=head)
    stored = blueprint = plain
    if quantize is not None or head is not None:
        stored = build(precision=precision.evaluated, surgery=quantize)
    if not isinstance(run.tune, Full):
        blueprint = build(precision=precision.evaluated, surgery=change)
    if run.regularization.qk_clip is not None:
        _check_qk_clip(run, blueprint, mesh)
    trained = blueprint
    if precision != precision.evaluated:
        trained = build(precision=precision, surgery=change)

    def layout(blueprint: Blueprint, zero: int) -> Any:
        is_split = run.mesh.zero >= zero
        return rules.shardings(mesh, blueprint.axes, blueprint.shapes, is_split=is_split)

    return ShardedModel(
        mesh,
        precision,
        blueprint,
        trained,
        layout(blueprint, 3),
        layout(blueprint, 2),
        plain,
        stored,
        layout(plain, 3),
        surgery.base_paths(run.tune, stored),
    )


def head_of(run: Run) -> surgery.Surgery | None:
    """Return the function (module, key) that adds the head of a run's objective; None for none."""
    if run.objective.has_reward_head:
        return add_reward_head
    return add_value_head if run.objective.has_value_head else None


def surgery_of(
    run: Run, encode: Callable[[str], Sequence[int]] | None = None
) -> surgery.Surgery | None:
    """Return the function (module, key) that adds the adapter and the head of a run.

    None if it has neither; `encode` is as of `surgery.build`.
    """
    changes = [surgery.build(run.tune, encode), head_of(run)]
    present = [each for each in changes if each is not None]

    def apply(module: nnx.Module, key: jax.Array) -> None:
        for change in present:
            change(module, key)

    return apply if present else None


def _check_qk_clip(run: Run, blueprint: Blueprint, mesh: Mesh) -> None:
    """Raise ConfigError if QK-clip cannot scale the heads."""
    fix = "--config.regularization.qk_clip=None"
    scaled = [path for path in groups.unmoved(run.optim, blueprint.axes) if _SCALED.search(path)]
    if scaled:
        what = "QK-clip cannot scale frozen queries and keys"
        why = f"it scales {min(scaled)}, which optim.freeze or optim.lr_scale keeps constant"
    elif any(layer.attention.qk_norm is not None for layer in blueprint.config.layers):
        what = "QK-clip does not support normalized queries and keys"
        why = "the norm cancels a scale of their weights, and already bounds the logits"
    elif rules.split(mesh, "stages") > 1:
        what = "QK-clip does not support a pipeline"
        why = "pipeline stages do not return their largest logits"
        fix += "\n--config.mesh.pipe=1"
    else:
        return
    raise ConfigError(what, where="regularization.qk_clip", why=why, fix=fix)


def observer_model(model: ShardedModel) -> Blueprint:
    """Return the training model without a pipeline, in which statistics would mix micro-batches."""
    return model.trained.without_pipeline()


def taught_run(teacher: Run, run: Run) -> Run:
    """Return the run of a frozen teacher, laid out as `run` is and reading rows of its length.

    Raises ConfigError if the teacher has fewer positions than a row of `run`.
    """
    sequence = run.data.sequence
    if isinstance(teacher.model, TabledFamily) and teacher.model.max_positions < sequence:
        raise ConfigError(
            f"rows of {sequence} tokens are too long for the teacher",
            where="objective.teacher",
            why=f"the teacher has {teacher.model.max_positions} positions",
            fix=f"--config.data.sequence={teacher.model.max_positions}",
        )
    data = dataclasses.replace(teacher.data, sequence=sequence, sequence_warmup=())
    return dataclasses.replace(teacher, data=data, train=run.train, mesh=run.mesh)


def vocabulary(run: Run, tokens: int) -> int:
    """Return `model.vocab`; for `auto` the tokenizer's size, rounded up."""
    padded = -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return padded if run.model.vocab == "auto" else run.model.vocab


def token_bytes(model: ShardedModel, tokenizer: Tokenizer) -> Int[np.ndarray, "V"]:
    """Return the number of bytes of each id of the model; 0 for padding ids of the vocabulary."""
    known = tokenizer.token_bytes
    return np.pad(known, (0, model.blueprint.config.vocab - len(known)))


def prefix(tokenizer: Tokenizer) -> TokenizerPrefix | None:
    """Return the bytes that a tokenizer adds to the first token of a text; None if it adds none.

    In a document without a preceding token these bytes are in a token that is never a target.
    """
    if not tokenizer.lead or not tokenizer.before:
        return None
    return TokenizerPrefix(tokenizer.before[-1], len(tokenizer.lead))


def build_mesh_for(run: Run) -> Mesh:
    """Build the mesh of a run over all devices, before any data is read or compiled.

    Raises ConfigError if devices are missing, or a dimension does not divide by its mesh axes.
    """
    divisibility.check(run, len(jax.devices()), meshes.slices(jax.devices()))
    mesh = meshes.build(run.mesh)
    check_fit(run, mesh)
    return mesh


def pass_rows(run: Run, mesh: Mesh, *, sequence: int | None = None, most: int | None = None) -> int:
    """Return the rows of a forward pass outside of training: as many as devices share evenly.

    They are `eval.batch` rows. If it is auto, they are those of a micro-batch, and have at most
    PASS_TOKENS tokens for each part of the batch.

    Args:
      run: the run.
      mesh: the mesh.
      sequence: length of the rows; None for that of the run.
      most: rows that there are; None for any number.
    """
    ways = rules.split(mesh, "batch")
    if run.eval.batch == "auto":
        fitting = ways * PASS_TOKENS // (sequence or run.data.sequence)
        rows = min(-(-run.train.batch // run.train.microbatches), max(fitting, 1))
    else:
        rows = run.eval.batch
    if most is not None:  # the last batch is filled up: all have about as many rows
        rows = -(-most // max(-(-most // rows), 1))
    return -(-rows // ways) * ways


def pass_chunk(run: Run) -> int:
    """Return the tokens of each device whose logits are in memory at a time, outside of training.

    They are `loss.chunk`, and PASS_LOGITS if it is None: training has memory for all logits of a
    micro-batch of its own model, and a pass of an imported model may not.
    """
    return run.loss.chunk or PASS_LOGITS


def check_fit(run: Run, mesh: Mesh) -> None:
    """Raise ConfigError if the model cannot be sharded on the mesh, before a tokenizer exists.

    A vocabulary of the tokenizer's size is replaced by one that divides.
    """
    ways = rules.split(mesh, "vocab")
    vocab = VOCAB_MULTIPLE * ways if run.model.vocab == "auto" else run.model.vocab
    build_sharded_model(run, vocab, mesh)


def abstract_params(model: ShardedModel) -> Any:
    """Return shapes, dtypes and shardings of the parameters, the target of a restore."""
    return states.abstract(model.blueprint.shapes, model.shardings)


def abstract_base(model: ShardedModel) -> Any:
    """Return shapes, dtypes and shardings of the model without an adapter, as it is stored."""
    new = frozenset(tree.leaves(model.shardings)) - frozenset(tree.leaves(model.stored.shapes))
    return states.abstract(model.stored.shapes, tree.drop_leaves(model.shardings, new))


def decoding(model: ShardedModel) -> tuple[Blueprint, Callable[[Any], Any]]:
    """Return the model to decode with, and the function of all parameters to those of that model.

    It is the model without the adapter, which is merged. A bottleneck cannot be merged, so its
    layers run as they are trained. The function compiles once.
    """
    if not model.base or not merge.is_mergeable(model.blueprint):
        return model.blueprint, lambda params: params
    join = functools.partial(merge.merged_params, model.blueprint, model.plain)
    return model.plain, jax.jit(join, out_shardings=model.plain_shardings)


def open_data(
    run: Run,
    *,
    workdir: Path | None = None,
    say: Log = lambda _: None,
    warn: Log = lambda _: None,
    progress: OnProgress = lambda what, done, total: None,
    is_limited: bool = False,
) -> Data:
    """Open the data of the run for its objective, see `dataset.open_data`.

    Raises JaxlmError if the data is missing, damaged or empty, or does not fit the objective.

    Args:
      run: the config.
      workdir: run directory, whose copy of the tokenizer replaces a file that is gone.
      `say`: receives log lines.
      warn: receives warnings.
      progress: receives progress.
      is_limited: `train.steps` are those that `train.epochs` leaves. Before, the maximum epochs of
        the sources of a mixture are not compared with them.
    """
    data = run.data
    is_final = is_limited or run.train.epochs is None or run.objective.samples_answers
    if data.tokenizer.endswith(TOKENIZER_FILES) and not Path(data.tokenizer).exists():
        copy = None if workdir is None else workdir / "tokenizer"
        if copy is not None and copy.is_file():
            warn(f"data.tokenizer: {data.tokenizer} does not exist here; its copy {copy} is read")
            data = dataclasses.replace(data, tokenizer=str(copy))
    entries = (*data.train, *data.validation)
    for note in (*notes_of_tables(entries), *notes_of_unfinished(entries)):
        warn(note)
    with name_start_folder(workdir):
        opened = dataset.open_data(
            data,
            seed=run.seed,
            prepare=build_objective(run.objective, run.loss, run.architecture).prepare,
            row_at=run.row_at,
            rows=run.rows if is_final else 0,
            reserved=run.rl.max_tokens,
            samples=run.rl.samples * run.rl.epochs,
            log=say,
            warn=warn,
            progress=progress,
        )
    return with_stored_teacher(run, opened)


@contextlib.contextmanager
def name_start_folder(workdir: Path | None) -> Iterator[None]:
    """Add the folder in which a run was started, if another is current, to errors of missing files.

    Relative paths of its settings are relative to that folder.
    """
    try:
        yield
    except InputMissing as error:
        with contextlib.suppress(JaxlmError, AttributeError, TypeError):  # a damaged file
            facts = {} if workdir is None else read_json(workdir, "environment.json")
            folder = Path(facts.get("folder", ""))
            if folder.is_dir() and not folder.samefile(Path.cwd()):
                assert workdir is not None  # its file was read
                run = shlex.quote(f"--workdir={os.path.relpath(workdir, folder)}")
                line = f"cd {shlex.quote(str(folder))}    # the run was started there; then {run}"
                error.fix = f"{line}\n{error.fix}"
        raise


def with_stored_teacher(run: Run, data: Data) -> Data:
    """Return the data with the stored distributions of a teacher, if the objective has them.

    Raises:
      InputMissing: if there is no such folder.
      ConfigError: if they are of another tokenizer, vocabulary, temperature or text.
      DataError: if they are damaged.
    """
    if not (isinstance(run.objective, Distill) and run.objective.stored):
        return data
    stored = StoredTeacher.open(Path(run.objective.stored))
    digest, vocab = data.tokenizer.digest, vocabulary(run, data.tokenizer.size)
    stored.check(data.train.shards, digest, vocab, run.objective.temperature)
    return dataclasses.replace(
        data,
        train=dataclasses.replace(data.train, teacher=stored),
        fingerprint=data.fingerprint | {"teacher": stored.digest},
    )


def check_held_out(config: DataConfig, data: Data) -> None:
    """Raise ConfigError if a set that is held out by default has less than a row of tokens."""
    if config.validation != (HELD_OUT,):
        return
    for name, loader in data.validation.items():
        tokens, row = loader.shards.manifest.tokens, config.sequence
        if tokens >= row:
            continue
        share = float(HELD_OUT.removeprefix("tail:").removesuffix("%"))
        enough = math.ceil(1.1 * share * row / tokens)
        larger = f"--config.data.validation=tail:{enough}%\n" if enough <= MAX_HELD_OUT else ""
        raise ConfigError(
            "too little text is held out for validation",
            where=f"data.validation = {HELD_OUT}",
            why=f"{name} has {tokens} tokens, and a row {row}",
            fix=f"{larger}'--config.data.validation=()'    # trains without validation",
        )


def ranking_set(run: Run, names: Iterable[str]) -> str | None:
    """Return the validation set whose loss ranks checkpoints; None without validation sets.

    Raises ConfigError if the set that `eval.follow` names does not exist.
    """
    known, followed = list(names), run.eval.follow
    if followed in known or (followed == "auto" and not known):
        return followed if known else None
    if followed == "auto":
        return known[0]
    nearest = nearest_word(followed, known) or nearest_word(followed.partition(".")[0], known)
    raise ConfigError(
        f"eval.follow names the validation set {followed!r}, which does not exist",
        where="eval.follow",
        why=f"the validation sets are {', '.join(known) or 'none'}",
        fix=f"--config.eval.follow={nearest or 'auto'}",
    )
