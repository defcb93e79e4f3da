"""No step of training adds up more than a few numbers in 16 bits, on any device.

Steps are traced as for a GPU or a TPU (`core.backend.compiling_for`), at sizes at which every axis
has more than 64 numbers, and not compiled. Activations are bfloat16 or float16 there but float32 on
a CPU, so numbers that are computed on a CPU do not show such sums. Sums inside the kernels of
vendors (cuDNN, splash) are not seen.
"""

import dataclasses
import functools
import math
import tempfile
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.core import backend, config
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.families.union import EncoderDecoderFamily, EncoderFamily, Family
from jaxlm.nn.linear import Linear
from jaxlm.objectives.config import Objective
from jaxlm.ops.kernels import Target
from jaxlm.optim import build as optimizers
from jaxlm.optim.config import Optimizer, Sgd
from jaxlm.parallel import hlo
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.train.programs import without_data
from tests.nn import reference
from tests.recipes.accumulation import Sum, narrow_sums

FAMILIES = {arm().family: arm for arm in get_args(Family)}
ENCODERS = {arm().family for arm in get_args(EncoderFamily)}
PAIRED = EncoderDecoderFamily().family
OBJECTIVES = [arm().name for arm in get_args(Objective)]
OPTIMIZERS = [arm().name for arm in get_args(Optimizer)]
EXPERTS = [name for name, arm in FAMILIES.items() if "experts" in arm.__dataclass_fields__]
TIED = [name for name, arm in FAMILIES.items() if "tied" in arm.__dataclass_fields__]

# Every axis is longer than the 64 numbers that may be summed. No product of features is as long as
# LEAST_ROWS, and on every device of every mesh below there are more rows: so a shape shows if it
# has an axis of tokens.
ROWS, LENGTH, LEAST_ROWS = 2**19, 128, 2**15
SIZES = {"vocab": 4160, "depth": 2, "width": 72 * 72, "hidden": 96, "heads": 72, "kv_heads": 72}


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Sums that may have 16 bits, if each token has its own: never what is summed over tokens."""

    kinds: tuple[str, ...]
    why: str
    axes: frozenset[str] = frozenset()

    def covers(self, total: Sum) -> bool:
        """Return True if the sum is allowed by this entry."""
        of_tokens = max(total.shape, default=0) >= LEAST_ROWS
        return of_tokens and total.kind in self.kinds and self.axes >= set(total.axes)


ALLOWED = (
    Allowed(
        ("dot_general", "ragged_dot_general"),
        "activations come out of a product: cuBLAS and the matrix units of TPUs add up in "
        "float32 and round once",
    ),
    Allowed(
        ("scan carry",),
        "the residual stream and its gradient: two additions a layer, in the dtype of "
        "activations as in the models' "
        "own implementations; and with microbatches of a pipeline the places where activations "
        "wait",
    ),
    Allowed(
        ("psum", "psum_invariant"),
        "each device of `tensor` has rounded its part of an activation once, and there are as "
        "many parts as devices "
        "with fast wires between them; stages (`pipe`) add equal parts, all but one of them "
        "zero or copies",
        frozenset({"tensor", "pipe"}),
    ),
    Allowed(
        ("reduce_scatter",),
        "devices without an expert of the token add zeros: at most top_k numbers differ from zero",
        frozenset({"expert"}),
    ),
)


def forbidden(sums):
    """The sums of a program that no entry of the list allows."""
    return [str(each) for each in sums if not any(entry.covers(each) for entry in ALLOWED)]


def settings_of(family, settings):
    """The settings of a run of this family, whose sizes hide no sum."""
    arm = FAMILIES[family]
    fields = arm.__dataclass_fields__
    sizes = {name: size for name, size in SIZES.items() if name in fields}
    if "head_dim" in fields:
        sizes |= {"width": 264, "head_dim": 72}
    if "experts" in fields:
        sizes["experts"] = max(arm().experts, 72)
    objective = "masked" if family in ENCODERS else "span" if family == PAIRED else "causal"
    return (
        {
            "model.family": family,
            "objective.name": objective,
            "train.batch": 2 * ROWS,
            "train.microbatches": 2,
            "data.sequence": LENGTH,
            "precision.compute": "bfloat16",
        }
        | {f"model.{name}": size for name, size in sizes.items()}
        | settings
    )


def engine_of(settings, mesh):
    """The engine of a run, its mesh of fake devices, and the shapes of a state and a batch.

    For `backend.compiling_for`.
    """
    run = config.load(Run, None, [(path, str(value)) for path, value in settings.items()]).value
    sizes = {"data": 1} | (mesh or {})
    grid = meshes.build(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(grid):
        engine = without_data(run, grid, collectives.vocabulary(run))
        return grid, engine, (engine.abstract(), collectives.abstract_batch(run, grid))


@functools.cache
def traced(family, platform, program, mesh, settings):
    """Sums in 16 bits of a program of the engine, traced for a platform.

    Args:
      family: the model family.
      platform: the platform to trace for.
      program: the program of the engine.
      mesh: axis sizes of the mesh.
      settings: values by path.
    """
    settings = settings_of(family, dict(settings))
    with backend.compiling_for(platform):
        grid, engine, arguments = engine_of(settings, dict(mesh))
        with jax.set_mesh(grid):
            jaxpr = getattr(engine, program).trace(*arguments, **engine.extra_inputs).jaxpr
    count = len(jax.tree.leaves(arguments[0])) if program == "step" else 0
    return narrow_sums(jaxpr, [(number, number) for number in range(count)])


def sums(family, settings=None, *, platform="gpu", mesh=None, program="step"):
    """Sums in 16 bits of a run's step, or of another program of its engine.

    Args:
      family: the model family.
      settings: values by path.
      platform: the platform to trace for.
      mesh: axis sizes of the mesh.
      program: the program of the engine.
    """
    settings = settings or {}
    if mesh:
        settings = settings | {f"mesh.{axis}": size for axis, size in mesh.items()}
    pairs = (tuple(sorted(pairing.items())) for pairing in (mesh or {}, settings))
    return traced(family, platform, program, *pairs)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_sums_in_float32(family):
    assert not forbidden(sums(family))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", sorted(set(TIED) - set(EXPERTS)))
def test_tied_models_untied_and_untied_models_tied_sum_in_float32(family):
    settings = {"model.tied": not FAMILIES[family]().tied, "loss.chunk": 2**20}
    assert not forbidden(sums(family, settings))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_limited_capacity_sum_in_float32(family):
    """With all settings of a router, and tied; `test_every_family...` has them without a limit."""
    settings = {"capacity": 1.25, "shared": 96, "balance_bias": 1e-3, "router_z": 0.1, "tied": True}
    assert not forbidden(sums(family, {f"model.{name}": v for name, v in settings.items()}))


@pytest.mark.few(2)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_sums_in_float32(objective):
    settings = {"objective.name": objective, "loss.z_loss": 1e-4}
    if objective == "distill":
        settings["objective.teacher"] = "runs/a"
    if objective in ("preference", "reward"):
        settings |= {"data.kind": "pairs", "data.train": "pairs.jsonl", "loss.z_loss": 0}
    if objective == "process":
        settings |= {"data.kind": "steps", "data.train": "steps.jsonl", "loss.z_loss": 0}
    if objective in ("policy", "ppo"):
        settings |= {"data.kind": "prompts", "data.train": "prompts.jsonl", "loss.z_loss": 0}
        settings |= {"reward.functions": "number"}
    assert not forbidden(sums("gpt2", settings))


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_sums_and_averages_in_float32(optimizer):
    """State that persists between steps is a running sum too, as are parameters and averages."""
    assert not forbidden(sums("qwen2", {"optim.name": optimizer, "average.name": "ema"}))


LONG = {"train.attention": "blockwise", "data.sequence": 8 * LENGTH, "train.batch": 2 * ROWS // 8}
VARIANTS = {
    "float16": ("gpt2", {"precision.compute": "float16"}),
    "float16 experts": ("mixtral", {"precision.compute": "float16"}),
    "int8": ("gpt2", {"precision.products": "int8"}),
    "fp8": ("gpt2", {"precision.products": "fp8"}),
    "groups of queries": ("qwen2", {"model.heads": 144, "model.kv_heads": 2}),
    "unrolled": ("gpt2", {"train.stack": "unroll"}),
    "recomputed": ("gpt2", {"train.remat": "full/dots"}),
    "one batch": ("gpt2", {"train.microbatches": 1, "log.every": 10}),
    "chunks": ("bert", {"loss.chunk": 2**20, "loss.label_smoothing": 0.1}),
    "parallel heads": ("llama", {"objective.name": "mtp", "objective.heads": "parallel"}),
    "blockwise": ("qwen2", LONG),
    "blockwise latents": ("deepseek_v3", LONG),
    "dropped": (
        "gpt2",
        {f"regularization.{part}_dropout": 0.1 for part in ("embedding", "attention", "residual")}
        | {"regularization.layer_drop": 0.1, "regularization.embedding_noise": 5.0},
    ),
    "QK-clip": ("deepseek_v3", {"regularization.qk_clip": 100.0}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_to_compute_a_step_sums_in_float32(name):
    assert not forbidden(sums(*VARIANTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["observe", "gradient"])
def test_what_watches_a_step_sums_in_float32(program):
    layers = {"log.layers": "('norms', 'activations', 'attention', 'noise')"}
    for family in ("bert", "mixtral"):
        assert not forbidden(sums(family, layers, program=program))


def test_a_tpu_sums_in_float32(monkeypatch):
    monkeypatch.setattr(setup, "target", lambda mesh: Target("tpu"))
    for family in ("gpt2", "gemma2"):
        assert not forbidden(sums(family, {"train.attention": "splash"}, platform="tpu"))


MESHES = [
    ("gpt2", {}, {"data": 2, "fsdp": 2, "tensor": 2}),
    ("bert", {"mesh.zero": 1}, {"fsdp": 4}),
    ("llama", {"objective.name": "mtp"}, {"context": 4}),
    ("mixtral", {}, {"expert": 2, "context": 2, "tensor": 2}),
    ("mixtral", {}, {"pipe": 2, "data": 2, "tensor": 2}),
    ("deepseek_v3", {"model.capacity": 1.25}, {"expert": 2, "context": 2, "tensor": 2}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "settings", "mesh"), MESHES, ids=str)
def test_devices_add_up_gradients_in_float32(family, settings, mesh):
    """Collectives of the program; `test_the_compiler...` has those that the compiler adds."""
    assert not forbidden(sums(family, settings, mesh=mesh))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "settings", "mesh"),
    [
        ("gpt2", {"loss.chunk": 2**20}, {}),
        ("t5", {"loss.chunk": 2**20}, {}),
        ("deepseek_v3", {"model.capacity": 1.25}, {}),
        ("mixtral", {"model.depth": 4}, {"pipe": 2}),
        ("mixtral", {}, {"expert": 2, "fsdp": 2}),
    ],
    ids=str,
)
def test_parameters_of_16_bits_have_gradients_summed_in_float32(family, settings, mesh):
    """Within a step.

    What parameters and moments lose from step to step is a matter of their updates.
    """
    narrow = sums(family, {"precision.params": "bfloat16"} | settings, mesh=mesh)
    assert not forbidden(each for each in narrow if each.kind != "state")


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_that_shall_be_summed_in_16_bits_have_a_norm_in_float32(dtype):
    """`precision.reduce` is the dtype of products and of their sum over micro-batches only."""
    clips = {"optim.clip_norm": 1.0, "optim.clip_groups": "('stack/*=1.0',)"}
    narrow = forbidden(sums("gpt2", {"precision.reduce": dtype} | clips))
    kinds = {text.partition(": ")[2].partition(" ")[0] for text in narrow}
    assert kinds == {"dot_general", "scan"}, narrow


def test_the_norm_of_many_gradients_in_16_bits_is_that_of_the_same_in_float32():
    config = Sgd(clip_norm=1.0)
    grads = {str(number): jnp.full((3,), 0.5, jnp.bfloat16) for number in range(1000)}
    optimizer = optimizers.build(
        config, lambda count: -1.0, jax.tree.map(lambda _: ("mlp",), grads)
    )
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads, rate=1.0)
    norm = np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in updates.values()))
    assert norm == pytest.approx(1.0, rel=4e-3), "one rounding of each number, 2^-9"


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_gradient_of_a_bias_over_many_tokens_is_the_sum_of_their_gradients(platform):
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    tokens, width = 65_536, 8
    draw = np.random.default_rng(0)
    incoming = jnp.asarray(0.3 + draw.normal(size=(1, tokens, width)), jnp.bfloat16)
    with backend.compiling_for(platform):
        linear, _ = reference.moved(
            lambda key, init: Linear({"embed": 4}, {"mlp": width}, key=key, init=init, bias=True),
            precision=precision,
        )
        graph, state = nnx.split(linear)
        x = jnp.zeros((1, tokens, 4), precision.activations)

        @jax.jit
        def backward(incoming):
            return jax.vjp(lambda state: nnx.merge(graph, state)(x), state)[1](incoming)

        (grads,) = backward(incoming.astype(precision.activations))
        grad = nnx.to_pure_dict(grads)["bias"]
    expected = np.asarray(incoming, np.float64).sum((0, 1))
    error = np.linalg.norm(np.asarray(grad, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 1e-6


@pytest.fixture
def uncached():
    """Programs are compiled in this test, also those that a cache has: their dumps are read."""
    before = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


PARTITIONED = [
    ("gpt2", {"data": 2, "tensor": 2}),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("bert", {"fsdp": 4}),
            ("qwen2", {"fsdp": 2, "tensor": 2}),
            ("mixtral", {"data": 2, "expert": 2}),
            ("gpt2", {"pipe": 2, "data": 2}),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), PARTITIONED, ids=str)
def test_the_compiler_adds_up_no_gradient_over_devices_in_16_bits(family, mesh, uncached):
    """Read behind its partitioner: what follows in XLA for CPUs makes every reduction float32."""
    small = {"width": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "hidden": 32, "vocab": 128}
    fields = FAMILIES[family].__dataclass_fields__
    settings = settings_of(
        family,
        {f"model.{name}": size for name, size in small.items() if name in fields}
        | {f"mesh.{axis}": size for axis, size in mesh.items()}
        | {"train.batch": 8, "train.microbatches": 1, "data.sequence": 16},
    )
    with tempfile.TemporaryDirectory() as folder, backend.compiling_for("gpu"):
        grid, engine, arguments = engine_of(settings, mesh)
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        with jax.set_mesh(grid):
            engine.step.lower(*arguments).compile(compiler_options=options)
        (text,) = (path.read_text() for path in Path(folder).glob("*after_spmd-partitioning*"))
    added = [
        (each, shape, each.axes(grid.shape))
        for each in hlo.read_collectives(text)
        if each.kind in ("all-reduce", "reduce-scatter")
        for shape in each.shapes
    ]
    over = {axis for _, shape, axes in added if shape.dtype == "f32" for axis in axes}
    assert over >= set(mesh) - {"pipe", "tensor"}, "gradients are added up over these"
    wrong = [
        f"{each.source}: {each.kind} of {shape} over {', '.join(axes)}"
        for each, shape, axes in added
        if shape.dtype in ("bf16", "f16")
        and not set(axes) <= {"tensor", "pipe"}
        and (each.kind, axes) != ("reduce-scatter", ("expert",))
    ]
    assert not wrong
