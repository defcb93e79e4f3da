"""FSDP: bytes on each device, layout of gradients, and losses equal to those of one device.

tests/distributed/test_axes.py compares losses and gradients of all splits, also with other axes.
"""

import functools
import math
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.objectives.loss import Loss
from jaxlm.optim import build as optimizers
from jaxlm.optim.config import AdamW, Muon, Optimizer, Soap
from jaxlm.parallel import host, logical, mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.step import StepSpec
from tests.training.test_step import GUARD, pieces, trajectory

STEPS = 5
FSDP = {"data": 1, "fsdp": 4}
MORE = [{"data": 1, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}]
# Three compiled steps take more than ten seconds: one in the fast tier, all in the slow one.
CASES = [pytest.param(1, FSDP, id="zero 1")] + [
    pytest.param(zero, sizes, id=f"zero {zero}, {sizes}", marks=pytest.mark.slow)
    for zero in (1, 2, 3)
    for sizes in (FSDP, *MORE)
    if (zero, sizes) != (1, FSDP)
]


def grid_of(sizes):
    return mesh.build(MeshConfig(**sizes), jax.devices()[:4])


@functools.cache
def alone():
    return trajectory(mesh.build(MeshConfig(data=1), jax.devices()[:1]), STEPS)[0]


@functools.cache
def split(zero, sizes):
    return trajectory(grid_of(dict(sizes)), STEPS, zero=zero, microbatches=2)[:2]


def held(values):
    """Bytes of a tree on each device."""
    sizes = {}
    for leaf in jax.tree.leaves(values):
        for shard in leaf.addressable_shards:
            sizes[shard.device.id] = sizes.get(shard.device.id, 0) + shard.data.nbytes
    assert len(sizes) == 4
    (size,) = set(sizes.values())
    return size


def predicted(values, axes, sizes, *, is_split):
    """Every leaf's bytes, over the product of the mesh axes that split it."""

    def ways(name):
        axes = () if name is None else logical.RULES[name] or ()
        axes = (axes,) if isinstance(axes, str) else axes
        return math.prod(sizes.get(axis, 1) for axis in axes if is_split or axis != "fsdp")

    parts = jax.tree.map(
        lambda leaf, names: leaf.nbytes // math.prod(map(ways, names)), values, axes
    )
    return sum(jax.tree.leaves(parts))


@pytest.mark.parametrize(("zero", "sizes"), CASES)
def test_each_device_holds_the_bytes_of_the_closed_form(zero, sizes):
    _, state = split(zero, tuple(sizes.items()))
    blueprint, optimizer, _ = pieces()
    axes = optimizers.state_axes(AdamW(), optimizer, blueprint.shapes, blueprint.axes)
    assert held(state.params) == predicted(state.params, blueprint.axes, sizes, is_split=zero == 3)
    assert held(state.opt_state) == predicted(state.opt_state, axes, sizes, is_split=True)
    assert held(state.opt_state) < 0.6 * tree.size_bytes(state.opt_state)


@pytest.mark.slow
def test_splitting_the_optimizers_state_changes_no_loss():
    seen, _ = split(1, tuple(FSDP.items()))
    np.testing.assert_allclose(seen[:, 0], alone()[:, 0], rtol=1e-5)
    np.testing.assert_allclose(seen[0, 1], alone()[0, 1], rtol=1e-6)
    np.testing.assert_allclose(seen[:, 1], alone()[:, 1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("arm", typing.get_args(Optimizer), ids=lambda arm: arm().name)
def test_what_is_split_changes_no_loss_of_any_optimizer(arm, zero):
    """Two micro-batches change no loss either. Signs of gradients near zero may differ.

    If SOAP's first gradient has no rank, rounding chooses the basis: on one device, two
    micro-batches move its losses by 3e-4.
    """
    settings = {"newton_schulz_dtype": "float32"} if arm is Muon else {}
    one, *_ = trajectory(
        mesh.build(MeshConfig(data=1), jax.devices()[:1]), STEPS, arm=arm, **settings
    )
    seen, state, _ = trajectory(
        grid_of(FSDP), STEPS, zero=zero, microbatches=2, arm=arm, **settings
    )
    np.testing.assert_allclose(seen[0], one[0], rtol=1e-6)
    np.testing.assert_allclose(seen[:, 0], one[:, 0], rtol=3e-3 if arm is Soap else 3e-4)
    assert one[-1, 0] != one[0, 0]
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert not moments or held(moments) < 0.6 * tree.size_bytes(moments)


@pytest.mark.few(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_and_their_sums_are_split_from_the_second_on(zero):
    """In the compiled step of one matrix: the optimizer's input and the carry of the loop."""
    grid, rows, width = grid_of(FSDP), 32, 24
    splits, copies = (NamedSharding(grid, PartitionSpec(axis)) for axis in ("fsdp", None))
    layouts = []

    def loss(params, batch, key):
        out = jnp.square(params["w"][batch.tokens]).sum()
        return Loss(Mean(out, jnp.float32(1)), {"loss_nats": Mean(out, jnp.float32(1))})

    def spied(grads, state, params=None):
        jax.debug.inspect_array_sharding(grads["w"], callback=layouts.append)
        return grads, state

    optimizer = optax.chain(
        optax.GradientTransformation(lambda _: optax.EmptyState(), spied), optax.scale_by_adam()
    )
    step = steps.build_step(
        StepSpec(
            loss=loss,
            optimizer=optimizer,
            schedule=lambda _: jnp.float32(1),
            key=jax.random.key(0),
            precision=Precision.float32(),
            guard=GUARD,
            shardings={"w": splits if zero >= 2 else copies},
            microbatches=2,
        )
    )
    with jax.set_mesh(grid):
        params = {"w": jax.device_put(jnp.ones((rows, width)), splits if zero == 3 else copies)}
        state = states.init_state(params, optimizer, GUARD)
        ids = np.arange(8 * 4, dtype=np.int32).reshape(8, 4)
        batch = host.put(grid, Tokens(*[ids] * 5))
        text = jax.jit(step).lower(state, batch).compile().as_text()
    (sharding,) = layouts
    assert sharding.is_equivalent_to(splits if zero >= 2 else copies, 2)
    carried = re.findall(r"= \(([^)]*)\) while\(", text)
    mine, whole = f"f32[{rows // 4},{width}]", f"f32[{rows},{width}]"
    accumulators = [shapes for shapes in carried if mine in shapes or whole in shapes]
    assert accumulators
    assert all((mine in shapes) == (zero >= 2) for shapes in accumulators)
    # Parts of gradients are summed where they belong or everywhere.
    assert "reduce-scatter(" in text or "all-reduce(" in text
