"""A run tried on fake devices: does it compute what one device would, and does it send only what it must."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core import config, tree
from jaxlm.core.config import Change
from jaxlm.core.errors import CommandError
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.data.dataset import Data
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.build import Blueprint
from jaxlm.ops.kernels import Target
from jaxlm.parallel import hlo_collectives, host, logical, mesh
from jaxlm.parallel.config import AXES, MeshConfig, shown
from jaxlm.recipes import jax_setup, setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives, topology
from jaxlm.recipes.plan import attention_kernels, divisibility
from jaxlm.recipes.train.programs import TrainPrograms

# A run made small enough to try on fake devices: the same parts, the same pattern, the same axes, and sizes that still divide.


HEAD_DIM = 8
VOCAB = 512  # more than the bytes' ids, and more than any width here
# Nothing has these as sizes, and parts of them are marks too, however an array is reshaped.
MARKS = (5, 7, 11, 13, 17)
# Drawn by micro-batch where there are stages, and by place where a ring deals slots out: no loss of one device to compare with.
RATES = (
    "embedding_dropout",
    "attention_dropout",
    "residual_dropout",
    "layer_drop",
    "embedding_noise",
)


@dataclasses.dataclass(frozen=True)
class ReducedRun:
    """A small run, the mesh it fits, and what became what on the way."""

    run: Run
    mesh: dict[str, int]
    mark: int  # divides the number of elements of an array just where the array has tokens
    changes: tuple[Change, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, over all devices."""
        return self.run.tokens_per_step // self.run.train.microbatches


def mesh_sizes(wanted: MeshConfig, limit: int) -> dict[str, int]:
    """The axes of a mesh at 2 where they split anything, then doubled while `limit` devices suffice, the longest first.

    `auto` may take any size.
    """
    sizes = {axis: 1 if getattr(wanted, axis) == 1 else 2 for axis in AXES}
    most = {
        axis: math.inf if getattr(wanted, axis) == "auto" else getattr(wanted, axis)
        for axis in AXES
    }
    while math.prod(sizes.values()) * 2 <= limit:
        free = [axis for axis in AXES if sizes[axis] > 1 and sizes[axis] * 2 <= most[axis]]
        if not free:
            break
        # An axis of which the config says nothing grows last.
        longest = max(free, key=lambda axis: (most[axis] < math.inf, most[axis] / sizes[axis]))
        sizes[longest] *= 2
    return sizes


def reduced_run(run: Run, steps: int, limit: int) -> ReducedRun:
    """The run on at most `limit` devices (more where 2 an axis needs more), `steps` long, in float32.

    The number of tokens has a prime factor that no size of the model has. So an array on a device holds tokens just
    where its number of elements has this factor, whatever the compiler made of its shape. What `auto` would choose for
    attention by the sizes of the run itself is asked for by name; blockwise stands in for kernels of other platforms.
    Nothing is dropped and no noise added: other meshes draw other numbers.
    """
    mesh = mesh_sizes(run.mesh, limit)
    model = _model(run.model, mesh, run.train.pipeline_repeats)
    mark = next(mark for mark in MARKS if all(size % mark for size in model.values() if size))
    sequence = 2 * mark * mesh["context"]  # ring attention deals out two parts a device
    microbatches = max(min(run.train.microbatches, 2), mesh["pipe"])
    rows = math.prod(mesh[axis] for axis in ("data", "fsdp", "expert")) * microbatches
    if hasattr(run.model, "context"):
        model["context"] = 2 ** math.ceil(math.log2(sequence))  # a table of positions has no tokens
    if getattr(run.model, "capacity", None):
        # As many places as the mark in each row, so that what is sent to experts has it too.
        model["capacity"] = mark * model["experts"] / (sequence * model["top_k"])
    raw = config.to_json(run)
    raw["model"] |= model
    raw["mesh"] |= mesh
    if getattr(run.model, "dropout", 0):
        raw["model"]["dropout"] = 0.0
    raw["regularisation"] |= {name: 0.0 for name in RATES if raw["regularisation"][name]}
    kernels = _kernels(run, mesh)
    if mesh["context"] > 1:
        raw["mesh"]["context_keys"] = "ring" if "ring" in kernels else "gather"
    else:
        raw["train"]["attention"] = "reference" if kernels == {"reference"} else "blockwise"
    raw["data"] |= {"sequence": sequence, "sequence_warmup": []}
    raw["train"] |= {"steps": steps, "batch": rows, "microbatches": microbatches, "patience": None}
    raw["train"]["batch_warmup"] = []
    if run.loss.chunk is not None:
        # Half of what is scored at once; behind a pipeline that is all micro-batches.
        raw["loss"]["chunk"] = rows * sequence // (microbatches if mesh["pipe"] == 1 else 1) // 2
    raw["schedule"] = {"name": "constant", "warmup": "0"}
    raw["precision"] = {"params": "float32", "compute": "float32"}
    if hasattr(run.optim, "newton_schulz_dtype"):
        raw["optim"]["newton_schulz_dtype"] = "float32"
    small = config.from_json(Run, raw)
    changes = [change for change in config.diff(run, small) if change.path.partition(".")[0] in raw]
    return ReducedRun(small, mesh, mark, tuple(changes))


def _kernels(run: Run, small: dict[str, int]) -> set[str]:
    """Those with which the run itself computes attention, on its own mesh; an axis that is `auto` has the small one's size."""
    asked = {axis: getattr(run.mesh, axis) for axis in AXES}
    sizes = {axis: small[axis] if size == "auto" else size for axis, size in asked.items()}
    decoder = dataclasses.replace(run.model, vocab=VOCAB).build()
    decoder = attention_kernels.with_kernels(run, decoder, sizes, Target("cpu"))
    return {layer.attention.kernel for layer in decoder.layers}


def _model(model: Any, mesh: dict[str, int], repeats: int) -> dict[str, Any]:
    """The model's sizes: as few heads as `tensor` and the grouping allow, as few layers as stages and the pattern do."""
    tensor = mesh["tensor"]
    first = min(getattr(model, "dense_depth", 0), 1)
    less = {"dense_depth": first} if hasattr(model, "dense_depth") else {}
    decoder = dataclasses.replace(model, vocab=VOCAB, **less).build()
    heads_of = decoder.pattern[0].attention
    kv_heads = math.lcm(tensor, min(heads_of.kv_heads, 2))
    # Where heads can share keys they do, so that queries are told from keys by their number.
    grouped = 2 if hasattr(model, "kv_heads") else 1
    heads = kv_heads * grouped
    width = math.lcm(heads * HEAD_DIM, mesh["fsdp"])
    turns = -(-(decoder.depth - len(decoder.prefix)) // len(decoder.pattern))
    turns = min(turns, 2) if mesh["pipe"] == 1 else repeats * mesh["pipe"]
    experts = math.lcm(mesh["expert"], min(getattr(model, "experts", 1), 4))
    groups = min(getattr(model, "groups", 1), experts // 2)
    is_limited = getattr(model, "top_groups", 1) < getattr(model, "groups", 1)
    sizes = {
        "vocab": math.lcm(VOCAB, tensor),
        "width": width,
        "depth": len(decoder.prefix) + turns * len(decoder.pattern),
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


TOLERANCE = 1e-5  # relative, of losses and gradient norms in float32
# Of a leaf's gradient: its largest difference over its largest element, or over a share of the largest of all leaves where
# that is more. A bias of keys has no gradient but rounding errors, as it adds the same to all scores of a query.
GRADIENT_TOLERANCE = 1e-4
FLOOR = 1e-2
# By what a matrix has, the axes that are to split it beside fsdp and tensor; and what tensor has no part of. Said apart from
# logical.RULES, which are judged by it.
ALSO_SPLIT = {"layers": "pipe", "vocab": "pipe", "experts": "expert"}
NOT_OVER_TENSOR = {"routes", "positions", "joined", "features", "rank"}
ALONE = MeshConfig(pipe=1, data=1, fsdp=1, expert=1, context=1, tensor=1)

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What the command line says beside the config."""

    steps: int = 3
    devices: int = 8


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What a small run did on a mesh."""

    losses: list[float]
    grad_norms: list[float]
    gradient: dict[str, np.ndarray]  # of the first step, by leaf
    whole: dict[str, list[str]]  # the axes over which each matrix is not split, and should be
    program: str


def check(run: Run, options: CheckOptions, say: Say = lambda _: None) -> dict[str, Any]:
    """Runs a config, made small, on fake devices and on one, and reads what its compiled step sends.

    `ok` is whether the losses, the gradient norms and the first gradient leaf by leaf agree, no matrix ended up whole along an
    axis that should split it, no device holds the logits of the whole vocabulary where the mesh splits it, and nothing is sent
    that should stay where it is.

    Raises:
      ConfigError: where the config's own sizes do not fit its own mesh.
      CommandError: where JAX has started with too few devices.
    """
    check_real(run)
    small = reduced_run(run, options.steps, options.devices)
    _start(math.prod(small.mesh.values()))
    say(
        f"{shown(small.mesh)}, on fake devices; a step is compiled for them, and one for a single device"
    )
    trial = _try(small, mesh.build(small.run.mesh, _devices(small.mesh)))
    alone = _try(
        dataclasses.replace(small, run=dataclasses.replace(small.run, mesh=ALONE)),
        mesh.build(ALONE, jax.devices()[:1]),
    )
    step = step_of(small)
    lines = collectives.table(hlo_collectives.read(trial.program), small.mesh, step)
    whole = collectives.unsharded_arrays(hlo_collectives.results(trial.program), small.mesh, step)
    deviation = max(
        _deviation(trial.losses, alone.losses), _deviation(trial.grad_norms, alone.grad_norms)
    )
    replicated = _accidents(run, trial.whole)
    leaves = _deviations(trial.gradient, alone.gradient)
    worst = max(leaves, key=lambda path: leaves[path])
    is_equal = deviation <= TOLERANCE and leaves[worst] <= GRADIENT_TOLERANCE
    unwanted = [line for line in lines if line.why_unexpected]
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
        "unexpected": [line.record() for line in unwanted],
        "collectives": [line.record() for line in lines],
    }


def check_real(run: Run) -> None:
    """Raises ConfigError where the sizes of the config do not fit its mesh, whatever `auto` will be."""
    if run.architecture == "encoder-decoder":
        raise divisibility.unscaled(run)
    sizes = {axis: 1 if (size := getattr(run.mesh, axis)) == "auto" else size for axis in AXES}
    divisibility.check(run, math.prod(sizes.values()))


def step_of(small: ReducedRun) -> collectives.StepShapes:
    """Return what is known of the training step of a small run."""
    run, vocab = small.run, topology.vocabulary(small.run)
    ways = {axis: logical.ways(small.mesh, axis) for axis in ("batch", "kv_heads")}
    decoder = run.decoder(vocab)
    kv_heads = decoder.layers[0].attention.kv_heads
    vectors = small.tokens // ways["batch"] * kv_heads // ways["kv_heads"]
    schedule = divisibility.schedule(run, small.mesh)
    passes = run.train.microbatches if schedule is None else schedule.ticks
    layers = -(-decoder.depth // (1 if schedule is None else schedule.stages * schedule.repeats))
    again = 1 if run.train.remat == "none" else 2
    again *= 2 if run.optim.curvature_every else 1  # the gradient of sampled labels
    return collectives.StepShapes(
        tokens=small.tokens,
        mark=small.mark,
        vocab=vocab,
        head_dim=HEAD_DIM,
        keys=vectors * HEAD_DIM,
        gathers=2 * layers * passes * again,
        has_ring=run.mesh.context_keys == "ring",
        has_places=getattr(run.model, "capacity", None) is not None,
        figures=0
        if run.regularisation.qk_clip is None
        else decoder.depth * decoder.layers[0].attention.heads,
        has_groups=schedule is not None and schedule.repeats > 1,
        has_whole_matrices=run.optim.reads_whole_matrices,
    )


def _start(count: int) -> None:
    """Fake devices, and source lines in what is compiled that are those of this code."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        jax_setup.start(count)
    except CommandError:  # JAX has started; it may have enough
        if len(jax.devices()) < count:
            raise


def _devices(sizes: dict[str, int]) -> list[jax.Device]:
    return jax.devices()[: math.prod(sizes.values())]


def _try(small: ReducedRun, grid: Mesh) -> TrialResult:
    """A few steps from fresh parameters on rows of noise."""
    run, tokenizer = small.run, Bytes()
    model = setup.build_sharded_model(run, topology.vocabulary(run), grid)
    losses, grad_norms = [], []
    with jax.set_mesh(grid):
        engine = TrainPrograms(run, Data(tokenizer, None, {}, {}), model)  # type: ignore[arg-type]
        state = engine.init_state()
        batches = [host.put(grid, batch) for batch in _batches(run, tokenizer.size)]
        # It is computed once: LLVM's optimisations would take longer than they save.
        hurried = {"xla_backend_optimization_level": 0}
        taken = engine.gradient.lower(state, batches[0]).compile(compiler_options=hurried)
        leaves = tree.leaves(taken(state, batches[0])).items()
        gradient = {path: np.asarray(leaf) for path, leaf in leaves}
        step = engine.step.lower(state, batches[0]).compile()
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss_nats"]))
            grad_norms.append(float(metrics["grad_norm"]))
    axes = tree.leaves(model.blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    whole = {
        path: [
            axis
            for axis in _splitting(run.mesh, axes[path])
            if grid.shape[axis] > 1 and axis not in _axes(leaf.sharding.spec)
        ]
        for path, leaf in tree.leaves(state.params).items()
        if _is_matrix(path, axes[path])
    }
    return TrialResult(losses, grad_norms, gradient, whole, step.as_text() or "")


def _batches(run: Run, ids: int) -> Iterator[Any]:
    """Rows of two documents each and some padding, of uneven weights; read both ways here and there, if the objective does."""
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
            fields["visible_until"] = np.where(noise.random(shape) < 0.5, slots, ends).astype(
                np.int32
            )
        yield Tokens(**fields)


def _is_matrix(path: str, axes: tuple[str | None, ...]) -> bool:
    """Vectors, such as norms and biases, are no part of the answer: with a few of them a layer, each of a matrix's width, they
    are a ten-thousandth of a model whose width is some thousands, and cost next to nothing whole.
    """
    is_bias = path.rpartition("/")[2] == "bias"
    return not is_bias and sum(axis not in logical.LAYERS for axis in axes) >= 2


def _splitting(config: MeshConfig, names: tuple[str | None, ...]) -> list[str]:
    """The mesh axes over which a matrix with these logical axes is to be split."""
    wanted = {ALSO_SPLIT[name] for name in names if name in ALSO_SPLIT}
    wanted |= {"fsdp"} if config.zero == 3 else set()
    wanted |= set() if NOT_OVER_TENSOR & set(names) else {"tensor"}
    return [axis for axis in AXES if axis in wanted]


def _axes(spec: PartitionSpec) -> set[str]:
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return {axis for entry in entries for axis in entry}


def _accidents(run: Run, whole: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Those matrices that are whole over some axes, and what they are in the config's own model."""
    decoder = run.decoder(topology.vocabulary(run))
    shapes = Blueprint(decoder, Precision.of(run.precision)).shapes
    sizes = {path: math.prod(leaf.shape) for path, leaf in tree.leaves(shapes).items()}
    total = sum(sizes.values())
    return [
        {
            "path": path,
            "axes": axes,
            "parameters": sizes[path],
            "share": sizes[path] / total,
        }
        for path, axes in whole.items()
        if axes
    ]


def _deviations(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """How far each leaf of a gradient is from what it should be; infinite where it is not finite."""
    sizes = {path: float(np.abs(leaf).max()) for path, leaf in expected.items()}
    least = FLOOR * max(sizes.values()) or 1.0
    apart = {
        path: float(np.abs(found[path] - leaf).max()) / max(sizes[path], least)
        for path, leaf in expected.items()
    }
    return {path: each if math.isfinite(each) else math.inf for path, each in apart.items()}


def _deviation(values: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where one is not a number."""
    pairs = zip(values, expected, strict=True)
    found = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return found if math.isfinite(found) else math.inf
