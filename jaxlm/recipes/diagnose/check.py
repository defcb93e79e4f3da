"""Trial of a run on fake devices: equal results to one device, and no unexpected communication."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core import config, tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.data.dataset import Data
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.build import Blueprint
from jaxlm.ops.kernels import Target
from jaxlm.parallel import hlo, host, logical, mesh
from jaxlm.parallel.config import AXES, MeshConfig, format_mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan import attention_kernels, divisibility
from jaxlm.recipes.train.programs import TrainPrograms

HEAD_DIM = 8
VOCAB = 512  # more than the bytes' ids, and more than any width here
# Primes that divide no size of the model: they survive every reshape of an array.
MARKS = (5, 7, 11, 13, 17)
# Random numbers depend on micro-batches in a pipeline and on slots in a ring: one device would
# draw others.
DROPOUT = ("embedding_dropout", "attention_dropout", "residual_dropout", "layer_drop")
RATES = (*DROPOUT, "embedding_noise")
TOLERANCE = 1e-5  # relative, of losses and gradient norms in float32
# Largest difference in a leaf's gradient over its largest element, or over FLOOR times the largest
# of all leaves if that is more. A bias of keys has a gradient of rounding errors only, as it shifts
# all scores of a query equally.
GRADIENT_TOLERANCE = 1e-4
FLOOR = 1e-2
# Axes besides fsdp and tensor that must split a matrix, by logical axis; and logical axes that
# tensor does not split. Independent of logical.RULES, which this checks.
ALSO_SPLIT = {"layers": "pipe", "vocab": "pipe", "experts": "expert"}
NOT_OVER_TENSOR = {"routes", "positions", "joined", "features", "rank"}
ALONE = MeshConfig(pipe=1, data=1, fsdp=1, expert=1, context=1, tensor=1)


@dataclasses.dataclass(frozen=True)
class ReducedRun:
    """A small run, its mesh, and the changes from the original."""

    run: Run
    mesh: dict[str, int]
    # One of its prime factors divides the number of elements of exactly the arrays with tokens.
    mark: int
    changes: tuple[config.Change, ...]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch, over all devices."""
        return self.run.tokens_per_step // self.run.train.microbatches


def mesh_sizes(requested: MeshConfig, limit: int) -> dict[str, int]:
    """Return a mesh: 2 for axes that split anything, doubled up to `limit` devices, longest first.

    An `auto` axis may have any size.
    """
    limits = {axis: getattr(requested, axis) for axis in AXES}
    sizes = {axis: 1 if size == 1 else 2 for axis, size in limits.items()}
    most = {axis: math.inf if size == "auto" else size for axis, size in limits.items()}
    while math.prod(sizes.values()) * 2 <= limit:
        free = [axis for axis in AXES if sizes[axis] > 1 and sizes[axis] * 2 <= most[axis]]
        if not free:
            break
        # Axes that the config leaves open grow last.
        longest = max(free, key=lambda axis: (most[axis] < math.inf, most[axis] / sizes[axis]))
        sizes[longest] *= 2
    return sizes


def reduced_run(run: Run, steps: int, limit: int) -> ReducedRun:
    """Return the run on about `limit` devices, `steps` long, in float32.

    More devices are used if 2 per axis need more. The number of tokens has a prime factor that no
    size of the model has, so an array holds tokens if and only if its number of elements has this
    factor, in any shape that the compiler gives it. A row after virtual tokens has another. Kernels
    that `auto` would choose for the original are requested by name; blockwise replaces kernels of
    other platforms. Dropout and noise are off, as other meshes draw other numbers, and an optimizer
    in an eigenbasis does not divide by the moments of directions that no token has.
    """
    mesh = mesh_sizes(run.mesh, limit)
    model = _model(run.model, mesh, run.train.pipeline_repeats)
    marks = [mark for mark in MARKS if all(size % mark for size in model.values() if size)]
    mark, *others = marks
    sequence = 2 * mark * mesh["context"]  # ring attention needs two chunks per device
    microbatches = max(min(run.train.microbatches, 2), mesh["pipe"])
    rows = math.prod(mesh[axis] for axis in ("data", "fsdp", "expert")) * microbatches
    if hasattr(run.model, "context"):
        model["context"] = 2 ** math.ceil(math.log2(sequence))  # a table of positions has no tokens
    if getattr(run.model, "capacity", None):
        # The capacity per row is the mark, so that arrays sent to experts have it too.
        model["capacity"] = mark * model["experts"] / (sequence * model["top_k"])
    raw = config.to_json(run)
    raw["model"] |= model
    raw["mesh"] |= mesh
    if getattr(run.model, "dropout", 0):
        raw["model"]["dropout"] = 0.0
    raw["regularization"] |= {name: 0.0 for name in RATES if raw["regularization"][name]}
    kernels = _kernels(run, mesh)
    if mesh["context"] > 1:
        raw["mesh"]["context_keys"] = "ring" if "ring" in kernels else "gather"
    else:
        raw["train"]["attention"] = "reference" if kernels == {"reference"} else "blockwise"
    raw["data"] |= {"sequence": sequence, "sequence_warmup": []}
    raw["train"] |= {"steps": steps, "batch": rows, "microbatches": microbatches, "patience": None}
    raw["train"]["batch_warmup"] = []
    if run.loss.chunk is not None:
        # Half of the tokens that a device scores at once, those of a row; after a pipeline these
        # are all micro-batches.
        raw["loss"]["chunk"] = mark * (microbatches if mesh["pipe"] > 1 else 1)
    if run.tune.virtual_tokens:  # a row after them has another prime factor, and they have none
        other = next(other for other in others if -sequence % other % mark)
        raw["tune"]["length"] = -sequence % other
        mark *= other
    if run.objective.samples_answers:  # a batch of any size is whole groups over the updates
        raw["rl"] |= {"updates": run.rl.samples, "max_tokens": mark}
    raw["schedule"] = {"name": "constant", "warmup": "0"}
    raw["precision"] = {"params": "float32", "compute": "float32"}
    if hasattr(run.optim, "newton_schulz_dtype"):
        raw["optim"]["newton_schulz_dtype"] = "float32"
    if hasattr(run.optim, "max_dim"):
        # With so few tokens most eigenvectors are arbitrary, and Adam's step along one is noise.
        raw["optim"]["eps"] = 1.0
    small = config.from_json(Run, raw)
    changes = [change for change in config.diff(run, small) if change.path.partition(".")[0] in raw]
    return ReducedRun(small, mesh, mark, tuple(changes))


def _kernels(run: Run, small: dict[str, int]) -> set[str]:
    """Return the attention kernels of the original on its mesh; `auto` axes have the small size."""
    requested = {axis: getattr(run.mesh, axis) for axis in AXES}
    sizes = {axis: small[axis] if size == "auto" else size for axis, size in requested.items()}
    decoder = dataclasses.replace(run.model, vocab=VOCAB).build()
    decoder = attention_kernels.with_kernels(run, decoder, sizes, Target("cpu"))
    return {layer.attention.kernel for layer in decoder.layers}


def _model(model: Any, mesh: dict[str, int], repeats: int) -> dict[str, Any]:
    """Return small sizes of the model: the fewest heads and layers that mesh and pattern allow."""
    tensor = mesh["tensor"]
    first = min(getattr(model, "dense_depth", 0), 1)
    less = {"dense_depth": first} if hasattr(model, "dense_depth") else {}
    decoder = dataclasses.replace(model, vocab=VOCAB, **less).build()
    heads_of = decoder.pattern[0].attention
    kv_heads = math.lcm(tensor, min(heads_of.kv_heads, 2))
    # Heads share keys if they can: then the number of elements separates queries from keys.
    grouped = 2 if hasattr(model, "kv_heads") else 1
    heads = kv_heads * grouped
    width = math.lcm(heads * HEAD_DIM, mesh["fsdp"])
    groups_of_layers = -(-(decoder.depth - len(decoder.prefix)) // len(decoder.pattern))
    groups_of_layers = min(groups_of_layers, 2) if mesh["pipe"] == 1 else repeats * mesh["pipe"]
    experts = math.lcm(mesh["expert"], min(getattr(model, "experts", 1), 4))
    groups = min(getattr(model, "groups", 1), experts // 2)
    is_limited = getattr(model, "top_groups", 1) < getattr(model, "groups", 1)
    sizes = {
        "vocab": math.lcm(VOCAB, tensor),
        "width": width,
        "depth": len(decoder.prefix) + groups_of_layers * len(decoder.pattern),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "nope_dim": HEAD_DIM // 2,
        "rope_dim": HEAD_DIM // 2,
        "value_dim": HEAD_DIM,
        "kv_rank": 2 * width,
        "query_rank": 2 * width if getattr(model, "query_rank", None) else None,
        "hidden": 2 * width,
        "experts": experts,
        "groups": max(groups, 1),
        "top_groups": 1 if is_limited else max(groups, 1),
        "top_k": min(getattr(model, "top_k", 1), 2),
        "shared": 2 * width if getattr(model, "shared", 0) else 0,
        "dense_depth": first,
        "dense_hidden": 2 * width,
    }
    return {name: size for name, size in sizes.items() if hasattr(model, name)}


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """Results of a small run on a mesh."""

    losses: list[float]
    grad_norms: list[float]
    gradient: dict[str, np.ndarray]  # of the first step, by leaf
    whole: dict[str, list[str]]  # axes that should split each matrix and do not
    program: str


def check(
    run: Run, *, steps: int = 3, devices: int = 8, say: Log = lambda _: None
) -> dict[str, Any]:
    """Run a config, made small, on fake devices and on one, and inspect its compiled step.

    `ok` is True if the losses, gradient norms and first gradients agree; no matrix is whole along
    an axis that should split it; no device holds logits of the whole vocabulary if the mesh splits
    it; and nothing is sent unexpectedly. Raises ConfigError if the config's own sizes do not fit
    its own mesh, and CommandError if JAX has started with too few devices.
    """
    run = run.with_compute("float32")  # if auto: to compare sums, not their rounding
    check_real(run)
    small = reduced_run(run, steps, devices)
    count = math.prod(small.mesh.values())
    try:
        setup.start(count)
    except CommandError:  # JAX has started; it may have enough devices
        if len(jax.devices()) < count:
            raise
    compiling = "compiling a step for them, and one for one device"
    say(f"{format_mesh(small.mesh)}, on fake devices; {compiling}")
    on_one = dataclasses.replace(small.run, mesh=ALONE)
    with keyed_by_source_lines():
        trial = _try(small.run, mesh.build(small.run.mesh, jax.devices()[:count]))
        alone = _try(on_one, mesh.build(ALONE, jax.devices()[:1]))
    step = step_of(small)
    rows = collectives.table(hlo.read_collectives(trial.program), small.mesh, step)
    whole = collectives.unsharded_arrays(hlo.read_results(trial.program), small.mesh, step)
    deviation = _deviation(trial.losses, alone.losses)
    deviation = max(deviation, _deviation(trial.grad_norms, alone.grad_norms))
    replicated = _replicated(run, trial.whole)
    leaves = _deviations(trial.gradient, alone.gradient)
    worst = max(leaves, key=lambda path: leaves[path])
    is_equal = deviation <= TOLERANCE and leaves[worst] <= GRADIENT_TOLERANCE
    unwanted = [row for row in rows if row.why_unexpected]
    return {
        "ok": is_equal and not (replicated or unwanted or whole),
        "is_equal": is_equal,
        "deviation": deviation,
        "tolerance": TOLERANCE,
        "gradients": leaves,
        "gradient_tolerance": GRADIENT_TOLERANCE,
        "worst_gradient": worst,
        "losses": trial.losses,
        "losses_alone": alone.losses,
        "grad_norms": trial.grad_norms,
        "grad_norms_alone": alone.grad_norms,
        "mesh": small.mesh,
        "changes": {change.path: [change.old, change.new] for change in small.changes},
        "replicated": replicated,
        "whole_logits": whole,
        "unexpected": [row.record() for row in unwanted],
        "collectives": [row.record() for row in rows],
    }


@contextlib.contextmanager
def keyed_by_source_lines() -> Iterator[None]:
    """Compile programs that carry the source lines of this code, for a report that names them.

    Without them in the key of the compile cache, a program may come from the cache with the lines
    of an older version. Programs that are compiled after the context are found by the plain key.
    """
    setting = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, setting)
    jax.config.update(setting, True)
    try:
        yield
    finally:
        jax.config.update(setting, before)


def check_real(run: Run) -> None:
    """Raise ConfigError if the config does not fit its mesh, for any size of `auto` axes."""
    if run.architecture == "encoder-decoder":
        raise divisibility.unscaled(run)
    sizes = {axis: 1 if (size := getattr(run.mesh, axis)) == "auto" else size for axis in AXES}
    divisibility.check(run, math.prod(sizes.values()))


def step_of(small: ReducedRun) -> collectives.StepShapes:
    """Return sizes and designed communication of the training step of a small run."""
    run, vocab = small.run, collectives.vocabulary(small.run)
    ways = {axis: logical.ways(small.mesh, axis) for axis in ("batch", "kv_heads")}
    decoder = run.decoder(vocab)
    kv_heads = decoder.layers[0].attention.kv_heads
    vectors = small.tokens // ways["batch"] * kv_heads // ways["kv_heads"]
    schedule = divisibility.schedule(run, small.mesh)
    passes = run.train.microbatches if schedule is None else schedule.ticks
    layers = -(-decoder.depth // (1 if schedule is None else schedule.stages * schedule.repeats))
    gradients = 1 if run.train.remat == "none" else 2
    gradients *= 2 if run.optim.curvature_every else 1  # the gradient of sampled labels
    figures = decoder.depth * decoder.layers[0].attention.heads
    return collectives.StepShapes(
        tokens=small.tokens,
        mark=small.mark,
        vocab=vocab,
        head_dim=HEAD_DIM,
        keys=vectors * HEAD_DIM,
        gathers=2 * layers * passes * gradients,
        has_ring=run.mesh.context_keys == "ring",
        has_places=getattr(run.model, "capacity", None) is not None,
        figures=0 if run.regularization.qk_clip is None else figures,
        has_groups=schedule is not None and schedule.repeats > 1,
        has_whole_matrices=run.optim.reads_whole_matrices,
    )


def _random_base(model: setup.ShardedModel) -> Any:
    """Return parameters for the base of an adapter; None without one."""
    if not model.base:
        return None
    layout = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract_base(model))
    return jax.jit(model.stored.init, out_shardings=layout)(jax.random.key(0))


def _try(run: Run, grid: Mesh) -> TrialResult:
    """Run a few steps from fresh parameters on random rows."""
    tokenizer = Bytes()
    model = setup.build_sharded_model(run, collectives.vocabulary(run), grid)
    losses, grad_norms = [], []
    with jax.set_mesh(grid):
        data: Any = Data(tokenizer, None, {}, {})  # type: ignore[arg-type]
        engine = TrainPrograms(run, data, model, base=_random_base(model))
        state = engine.init_state()
        batches = [host.put(grid, batch) for batch in _batches(run, tokenizer.size)]
        # The program runs once: LLVM's optimizations would cost more time than they save.
        hurried: dict[str, Any] = {"xla_backend_optimization_level": 0}
        lowered = engine.gradient.lower(state, batches[0], **engine.extra_inputs)
        taken = lowered.compile(compiler_options=hurried)
        leaves = tree.leaves(taken(state, batches[0], **engine.extra_inputs)).items()
        gradient = {path: np.asarray(leaf) for path, leaf in leaves}
        step = engine.step.lower(state, batches[0], **engine.extra_inputs).compile()
        for batch in batches:
            state, metrics = step(state, batch, **engine.extra_inputs)
            losses.append(float(metrics["loss_nats"]))
            grad_norms.append(float(metrics["grad_norm"]))
    axes = tree.leaves(model.blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    whole = {}
    for path, leaf in tree.leaves(state.params).items():
        if _is_matrix(path, axes[path]):
            entries = [each if isinstance(each, tuple) else (each,) for each in leaf.sharding.spec]
            split = set(itertools.chain(*entries))
            required = [axis for axis in _splitting(run.mesh, axes[path]) if axis not in split]
            whole[path] = [axis for axis in required if grid.shape[axis] > 1]
    return TrialResult(losses, grad_norms, gradient, whole, step.as_text() or "")


def _batches(run: Run, ids: int) -> Iterator[Any]:
    """Yield rows of two documents and padding, of uneven weights; partly bidirectional."""
    noise = np.random.default_rng(run.seed)
    shape = run.train.batch, run.data.sequence
    slots = np.arange(shape[1], dtype=np.int32)
    for _ in range(run.train.steps):
        ends = noise.integers(1, shape[1], (shape[0], 2), dtype=np.int32)
        middle, end = ends.min(1)[:, None], ends.max(1)[:, None]
        is_second, is_padding = slots >= middle, slots >= end
        fields: dict[str, Any] = dict(
            tokens=noise.integers(0, ids, shape, dtype=np.int32),
            targets=noise.integers(0, ids, shape, dtype=np.int32),
            weights=np.where(is_padding, 0, noise.random(shape)).astype(np.float32),
            segments=np.where(is_padding, 0, 1 + is_second).astype(np.int32),
            positions=np.where(is_second, slots - middle, slots).astype(np.int32),
        )
        if run.objective.bidirectional:
            ends = np.where(is_padding, slots, np.where(is_second, end - 1, middle - 1))
            visible = np.where(noise.random(shape) < 0.5, slots, ends)
            fields["visible_until"] = visible.astype(np.int32)
        yield collectives.with_answers(Tokens(**fields), run)


def _is_matrix(path: str, axes: tuple[str | None, ...]) -> bool:
    """Return False for vectors, such as norms and biases: they are cheap to replicate.

    A few per layer are a ten-thousandth of a model whose width is some thousands.
    """
    is_bias = path.rpartition("/")[2] == "bias"
    return not is_bias and sum(axis not in logical.LAYERS for axis in axes) >= 2


def _splitting(config: MeshConfig, names: tuple[str | None, ...]) -> list[str]:
    """Return the mesh axes that must split a matrix with these logical axes."""
    required = {ALSO_SPLIT[name] for name in names if name in ALSO_SPLIT}
    required |= {"fsdp"} if config.zero == 3 else set()
    required |= set() if NOT_OVER_TENSOR & set(names) else {"tensor"}
    return [axis for axis in AXES if axis in required]


def _replicated(run: Run, whole: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the matrices that are whole over some axes, with their size in the original model.

    Those of an adapter are small, and left out.
    """
    decoder = run.decoder(collectives.vocabulary(run))
    shapes = Blueprint(decoder, Precision.of(run.precision)).shapes
    sizes = {path: math.prod(leaf.shape) for path, leaf in tree.leaves(shapes).items()}
    total = sum(sizes.values())
    return [
        {"path": path, "axes": axes, "parameters": sizes[path], "share": sizes[path] / total}
        for path, axes in whole.items()
        if axes and path in sizes
    ]


def _deviations(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the deviation of each leaf of a gradient; infinite if it is not finite."""
    sizes = {path: float(np.abs(leaf).max()) for path, leaf in expected.items()}
    floor = FLOOR * max(sizes.values()) or 1.0
    deviations = {
        path: float(np.abs(actual[path] - leaf).max()) / max(sizes[path], floor)
        for path, leaf in expected.items()
    }
    return {path: each if math.isfinite(each) else math.inf for path, each in deviations.items()}


def _deviation(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; infinite if one is not finite."""
    pairs = zip(values, expected, strict=True)
    largest = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return largest if math.isfinite(largest) else math.inf
