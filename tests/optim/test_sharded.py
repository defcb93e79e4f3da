"""Every arm on four devices: sharded state, published updates, the same bits after a restore."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.optim import build as optim
from jaxlm.optim.config import Soap
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig
from jaxlm.training import state as states
from tests.optim.arms import ARMS, AXES, NEAR, extra_args
from tests.optim.test_build import EVERY_ARM, draw, expected, schedule, shapes

STEPS = 4


@pytest.mark.few(4)
@EVERY_ARM
@pytest.mark.parametrize(
    "zero",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_an_arm_is_the_same_in_parts_and_from_a_checkpoint_on(arm, zero, tmp_path):
    known = ARMS[arm]
    config = dataclasses.replace(known.config, clip_norm=None)
    grid = mesh.build(MeshConfig(data=1, fsdp=4), jax.devices()[:4])
    rng = np.random.default_rng(0)
    start, grads = draw(rng), [draw(rng) for _ in range(STEPS)]
    optimizer = optim.build(config, schedule, AXES)
    axes = optim.state_axes(config, optimizer, shapes(), AXES)
    params_at = rules.shardings(grid, AXES, shapes(), is_split=zero == 3)
    grads_at = rules.shardings(grid, AXES, shapes(), is_split=zero >= 2)
    state_at = rules.shardings(grid, axes, jax.eval_shape(optimizer.init, shapes()))

    @jax.jit
    def begin():
        return jax.lax.with_sharding_constraint(optimizer.init(start), state_at)

    def update(grad, params, state, extras):
        updates, state = optimizer.update(grad, state, params, **extras)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(update, out_shardings=(params_at, state_at))

    def follow(params, state, first, last):
        for t, grad in enumerate(grads[first:last], first + 1):
            grad = jax.device_put(grad, grads_at)
            params, state = compiled(grad, params, state, extra_args(config, grad, t))
        return params, state

    with jax.set_mesh(grid):
        half = follow(jax.device_put(start, params_at), begin(), 0, 2)
        ended = follow(*half, 2, STEPS)
        store = Store(tmp_path, CheckpointConfig())
        store.save(2, {"params": half[0], "opt_state": half[1]}, {})
        store.wait()
        targets = {"params": (shapes(), params_at), "opt_state": (half[1], state_at)}
        back = store.restore(2, {name: states.abstract(*pair) for name, pair in targets.items()})
        store.close()
        resumed = follow(back["params"], back["opt_state"], 2, STEPS)
    jax.tree.map(np.testing.assert_array_equal, resumed, ended)
    results, first = tree.leaves(ended[0]), tree.leaves(start)
    leaves = [tree.leaves(grad) for grad in grads]
    for path, value in expected(config, known.direction, first, leaves).items():
        np.testing.assert_allclose(results[path], value[-1], err_msg=path, **NEAR)
    for path, leaf in tree.leaves(ended[1]).items():
        names = tree.leaves(axes, is_leaf=_is_axes)[path]
        assert leaf.sharding.shard_shape(leaf.shape) == tuple(
            n // 4 if axis in ("embed", "basis") else n
            for n, axis in zip(leaf.shape, names, strict=True)
        ), path


def test_a_state_that_cannot_be_split_is_refused_before_anything_is_compiled():
    grid = mesh.build(MeshConfig(data=1, fsdp=4), jax.devices()[:4])
    optimizer = optim.build(Soap(), schedule, AXES)
    axes = optim.state_axes(Soap(), optimizer, shapes(), AXES)
    with pytest.raises(ConfigError, match="basis = 6 does not divide by 4") as caught:
        rules.shardings(grid, axes, jax.eval_shape(optimizer.init, shapes()))
    assert "--config.mesh.fsdp=" in caught.value.fix


def _is_axes(node):
    return type(node) is tuple and all(each is None or isinstance(each, str) for each in node)
