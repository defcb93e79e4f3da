"""Experts on several devices: the loss, the gradients and the drops of one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.nn.config import MoeConfig
from jaxlm.nn.moe import Moe
from jaxlm.parallel import context, hlo, rules
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import MeshConfig
from tests.nn.reference import moved

ROWS, LENGTH, WIDTH = 4, 8, 8
PLAIN = MoeConfig(experts=4, top_k=2, hidden=8, balance=0.1, router_z=0.01)
KINDS = {
    "dropless": PLAIN,
    "capacity": dataclasses.replace(PLAIN, capacity=0.7, shared=4, router="sigmoid", bias_rate=0.1),
}
MESHES = [{"expert": 4}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 2}]
SLOW_MESHES = [
    {"data": 4},
    {"expert": 2},
    {"expert": 2, "fsdp": 2},
    {"expert": 2, "data": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 2, "context": 2, "tensor": 2},
]
COUNTED = jnp.ones((ROWS, LENGTH)).at[1, 5:].set(0.0)


def grid(sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return meshes.build(MeshConfig(**{"data": 1} | sizes), devices)


def results(config, order=None, **rest):
    """Loss, outputs, means and gradients of a jitted layer, also of tokens in another order."""
    moe, _ = moved(lambda key, init: Moe(WIDTH, config, key=key, init=init))
    graphdef, state = nnx.split(moe)
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))
    order = np.arange(LENGTH) if order is None else order

    def loss(state, x):
        y, means = nnx.merge(graphdef, state)(x, COUNTED[:, order], **rest)
        y = y * COUNTED[:, order][..., None]
        values = {name: mean.value for name, mean in means.items()}
        return jnp.square(y).sum() + means["moe_loss"].total, (y, values)

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    x = rules.constrain(x[:, order], "batch", "length", None)
    (value, (y, values)), (grads, x_grad) = step(state, x)
    back = np.argsort(order)
    return (
        {"loss": value, "y": y[:, back], "x": x_grad[:, back]}
        | values
        | tree.leaves(nnx.to_pure_dict(grads))
    )


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        size = float(jnp.abs(value).max())
        np.testing.assert_allclose(
            other[name], value, rtol=1e-5, atol=1e-5 * max(size, 1e-12), err_msg=name
        )


@pytest.fixture(scope="module", params=KINDS)
def alone(request):
    config = KINDS[request.param]
    return config, results(config)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes",
    [*MESHES, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SLOW_MESHES)],
    ids=str,
)
def test_a_mesh_changes_neither_outputs_nor_gradients(alone, sizes):
    config, expected = alone
    assert (float(expected["moe_dropped"]) > 0.1) == (config.capacity is not None)
    with jax.set_mesh(grid(sizes)):
        assert_same(expected, results(config))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("capacity", ["all-to-all", "all-to-all"]),
        ("dropless", ["all-gather", "reduce-scatter"]),
    ],
)
def test_places_are_exchanged_and_tokens_without_a_limit_are_gathered(kind, sent):
    """Forward traffic of `expert` in arrays as wide as the stream."""
    moe, _ = moved(lambda key, init: Moe(WIDTH, KINDS[kind], key=key, init=init))
    graphdef, state = nnx.split(moe)
    mesh = grid({"expert": 4})
    with jax.set_mesh(mesh):
        x = rules.constrain(jnp.zeros((ROWS, LENGTH, WIDTH)), "batch", "length", None)
        step = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, COUNTED)[0])
        text = step.lower(state, x).compile().as_text()
    kinds = [
        each.kind
        for each in hlo.read_collectives(text)
        if each.axes(mesh.shape) == ("expert",) and each.shapes[0].sizes[-1:] == (WIDTH,)
    ]
    assert sorted(kinds) == sent


@pytest.mark.slow
def test_tokens_dealt_over_a_ring_take_the_places_of_their_row():
    config = KINDS["capacity"]
    with jax.set_mesh(grid({"expert": 2, "context": 2})):
        zigzag = results(config, context.zigzag_order(LENGTH, 2), is_zigzag=True)
    assert_same(results(config), zigzag)


@pytest.mark.slow
def test_stages_of_a_pipeline_have_experts_of_their_own():
    """The layer under `vmap` over stages, as the pipeline runs it, forward and backward."""
    moe, _ = moved(lambda key, init: Moe(WIDTH, PLAIN, key=key, init=init))
    graphdef, state = nnx.split(moe)
    states = jax.tree.map(lambda x: jnp.stack([x, x + 0.1]), state)
    x = jax.random.normal(jax.random.key(1), (2, 2, LENGTH, WIDTH))

    def one(state, x):
        return nnx.merge(graphdef, state)(x, COUNTED[:2])[0]

    def loss(states, x, run):
        return jnp.square(run(states, x)).sum()

    expected = jax.jit(jax.grad(lambda s: loss(s, x, jax.vmap(one))))(states)
    with jax.set_mesh(grid({"pipe": 2, "expert": 2})):
        run = jax.vmap(one, spmd_axis_name="pipe")
        got = jax.jit(jax.grad(lambda s: loss(s, x, run)))(states)
    assert_same(tree.leaves(nnx.to_pure_dict(expected)), tree.leaves(nnx.to_pure_dict(got)))
