"""Laws of a step that trains an adapter: what moves, what does not, and in which dtypes."""

import hashlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import backend, tree
from jaxlm.core.config import load
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.union import SIZES
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim import schedules
from jaxlm.optim.config import AdamW
from jaxlm.optim.schedule_config import Constant
from jaxlm.parallel import mesh
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.train import programs
from jaxlm.training import guard as guards
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.config import GuardConfig
from jaxlm.tune import config, cost, surgery
from tests.models.parameters import draw_params
from tests.tune.test_adapters import batch

LLAMA = Llama(vocab=64, width=16, depth=2, heads=4, kv_heads=2, hidden=24)
GUARD = GuardConfig(window=8)
LOW = Precision.of(PrecisionConfig(params="float32", compute="bfloat16", reduce="float32"))


def pieces(*, precision=None, microbatches=1, **layout):
    """A step that trains LoRA's leaves alone, the state before it, and their axes."""
    precision = precision or Precision.float32()
    plain = Blueprint(LLAMA.build(), precision)
    change = surgery.build(config.Lora(rank=2))
    blueprint = Blueprint(plain.config, precision, surgery=change, **layout)
    base = draw_params(plain, 1)
    whole = surgery.adapted_params(plain, change, base, jax.random.key(2))
    frozen = frozenset(tree.leaves(base))
    axes = tree.drop_leaves(blueprint.axes, frozen)
    rate = schedules.build(Constant(), lr=1e-2, total=20, tokens_per_step=1)
    optimizer = optimizers.build(
        AdamW(lr=1e-2, weight_decay=0.1), rate, axes, state_dtype=precision.moments
    )

    def loss(params, batch, key):
        merged = blueprint.merge(tree.merge_leaves(whole, params))
        return token_nll(merged, batch, key, LossConfig())

    spec = steps.StepSpec(
        loss=loss,
        optimizer=optimizer,
        schedule=rate,
        key=jax.random.key(3),
        precision=precision,
        guard=GUARD,
        axes=axes,
        microbatches=microbatches,
    )
    params = tree.drop_leaves(whole, frozen)
    return states.init_state(params, optimizer, GUARD), steps.build_step(spec)


REMATS = ["none", "dots", "full", "save:attention_out,mlp_out", "offload:layer_in"]
LAYOUTS = [*({"layers": "scan", "remat": each} for each in REMATS), {"layers": "unroll"}]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: "-".join(each.values()))
def test_after_one_step_every_b_of_every_layer_has_moved(layout):
    state, step = pieces(microbatches=2, **layout)
    after = tree.leaves(jax.jit(step)(state, batch())[0].params)
    moved = [path for path in after if path.endswith("lora_b")]
    assert len(moved) == 7
    for path in moved:
        assert len(after[path]) == LLAMA.depth
        assert all(np.abs(layer).max() > 0 for layer in np.asarray(after[path])), path


def digests(value):
    leaves = tree.leaves(value).items()
    return {path: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for path, leaf in leaves}


def test_a_batch_of_weight_0_changes_no_bit_and_is_not_an_update():
    """Moments and weights do not decay: the step is skipped, with a reason of its own."""
    state, step = pieces(microbatches=2)
    step = jax.jit(step)
    state, _ = step(state, batch())
    empty = batch()._replace(weights=jnp.zeros_like(batch().weights))
    after, metrics = step(state, empty)
    assert digests((after.params, after.opt_state)) == digests((state.params, state.opt_state))
    assert (int(after.step), int(after.applied)) == (2, 1)
    assert digests(after.guard.losses) == digests(state.guard.losses)
    assert int(metrics["verdict"]) == guards.NO_WEIGHT
    assert guards.describe_verdict(guards.NO_WEIGHT) == "no trained token"
    assert (float(metrics["tokens"]), float(metrics["trained_share"])) == (0, 0)
    assert int(step(after, batch())[1]["verdict"]) == 0


@pytest.mark.slow
def test_micro_batches_of_uneven_weights_give_one_update():
    rows = batch(rows=4)
    scale = jnp.array([[1.0], [0.01], [0.0], [0.3]])
    uneven = rows._replace(weights=rows.weights * scale)
    updates = {}
    for count in (1, 2, 4):
        state, step = pieces(microbatches=count)
        updates[count] = jax.jit(step)(state, uneven)[0]
    for count in (2, 4):
        for one, other in zip(
            jax.tree.leaves(updates[1].params), jax.tree.leaves(updates[count].params), strict=True
        ):
            np.testing.assert_allclose(other, one, atol=1e-6)
        mu = (tree.leaves(each.opt_state) for each in (updates[1], updates[count]))
        for (path, one), other in zip(next(mu).items(), next(mu).values(), strict=True):
            if "/mu/" in path:
                bound = 1e-6 * float(jnp.abs(one).max())
                np.testing.assert_allclose(other, one, rtol=0, atol=bound, err_msg=path)


@pytest.mark.parametrize(
    ("size", "at"),
    [("gpt2", ("*/attention/*",)), ("gpt2-xl", config.Lora().at), ("llama3-8b", config.Lora().at)],
)
def test_an_adapter_of_rank_8_is_below_a_hundredth_of_its_model(size, at):
    """A checkpoint has the moments too, in the same proportion.

    At 124M parameters that holds for the attention; with the MLP it is 1.07%, as queries, keys and
    values have an A each. With one A for all three, as PEFT's GPT-2 has, it would be 0.95%.
    """
    leaves = list(tensors(SIZES[size].build()))
    trained, base = cost.split(config.Lora(rank=8, at=at), leaves)
    whole = sum(each.size for each in leaves)
    assert sum(each.size for each in base) == whole
    assert 0.001 * whole < sum(each.size for each in trained) < 0.01 * whole


SHAPE = {"model.width": 128, "model.hidden": 352, "model.heads": 4, "model.kv_heads": 2}
SHAPE |= {"model.depth": 2, "model.vocab": 256, "data.sequence": 64, "train.batch": 2}
SHAPE |= {"loss.chunk": "None", "train.stack": "unroll", "precision.compute": "float32"}


@pytest.mark.parametrize(
    ("remat", "most"), [("none", 0.68), pytest.param("full", 0.75, marks=pytest.mark.slow)]
)
def test_a_step_multiplies_nothing_for_the_gradients_of_frozen_weights(remat, most):
    """Two of three products of a weight remain, and three of four with `full`."""

    def flops(**settings):
        changed = SHAPE | {"train.remat": remat} | settings
        run = load(Run, None, [(path, str(value)) for path, value in changed.items()]).value
        grid = mesh.build(run.mesh, jax.devices()[:1])
        engine = programs.without_data(run, grid, run.model.vocab)
        with jax.set_mesh(grid):
            state = jax.eval_shape(engine.abstract_init, engine.base)
            lowered = engine.step.lower(
                state, collectives.abstract_batch(run, grid), **engine.extra_inputs
            )
        return lowered.cost_analysis()["flops"]

    adapter = flops(**{"tune.name": "lora", "tune.rank": 2})
    assert 0.6 < adapter / flops() < most


@pytest.mark.slow
def test_dots_stores_one_result_of_each_adapted_layer():
    """The sum of both products, as large as the one without an adapter, and the product with A."""
    rows = batch()

    def stored(**surgeries):
        blueprint = Blueprint(LLAMA.build(), LOW, layers="scan", remat="dots", **surgeries)

        def loss(params):
            return token_nll(blueprint.merge(params), rows, None, LossConfig()).objective.total

        params = jax.eval_shape(blueprint.init, jax.random.key(0))
        loops = [
            each for each in jax.make_jaxpr(jax.grad(loss))(params).eqns
            if each.primitive.name == "scan" and not each.params["reverse"]
        ]  # fmt: skip
        (forward,) = loops
        carried, *stacked = (each.aval.shape for each in forward.outvars)
        assert carried == (*rows.tokens.shape, LLAMA.width)
        narrow = [shape for shape in stacked if shape[-1] == 2]
        return len(narrow), sorted(math.prod(shape) for shape in stacked if shape not in narrow)

    count, plain = stored()
    assert count == 0
    assert stored(surgery=surgery.build(config.Lora(rank=2))) == (7, plain)


@pytest.mark.slow
def test_an_adapters_step_for_a_gpu_multiplies_bfloat16_and_adds_up_float32():
    """Traced and lowered for a GPU from a machine without one."""
    state, step = pieces(precision=LOW, microbatches=2)
    with backend.compiling_for("gpu"):
        traced = jax.jit(step).trace(state, batch())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    number = r"tensor<(?:\d+x)*(\w+)>"
    products = re.findall(rf"dot_general.* : \({number}, {number}\) -> {number}", text)
    assert len(products) > 20
    assert {factor for *factors, _ in products for factor in factors} == {"bf16"}
    assert "f32" in {result for *_, result in products}, "logits"
    shapes = {"x".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(state.params)}
    sums = re.findall(r"stablehlo\.add .* : tensor<((?:\d+x)*\d+)x(\w+)>", text)
    assert {(shape, dtype) for shape, dtype in sums if shape in shapes} == {
        (shape, "f32") for shape in shapes
    }, "of micro-batches, of moments and of updates"
    after = jax.eval_shape(step, state, batch())[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}
