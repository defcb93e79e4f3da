import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.optim import build as optim
from jaxlm.optim.config import AdamW, Optimizer, ScheduleFree
from tests.optim.arms import ARMS, AXES, NEAR, SIZES, Leaf, extra_args

EVERY_ARM = pytest.mark.parametrize("arm", typing.get_args(Optimizer), ids=lambda arm: arm().name)
NAMES = tree.leaves(AXES, is_leaf=lambda node: isinstance(node, tuple))


def shapes():
    return jax.tree.map(
        lambda axes: jax.ShapeDtypeStruct(tuple(SIZES[axis] for axis in axes), jnp.float32),
        AXES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def draw(rng):
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes())


def schedule(step):
    return 0.01 / (1 + jnp.asarray(step, jnp.float32))


def run(config, steps=50):
    """Our parameters by path, after each step, and the start and gradients that led to them."""
    rng = np.random.default_rng(0)
    start, grads = draw(rng), [draw(rng) for _ in range(steps)]
    optimizer = optim.build(config, schedule, AXES)
    params, state = start, optimizer.init(start)
    update = jax.jit(optimizer.update)
    passed = []
    for t, grad in enumerate(grads, 1):
        updates, state = update(grad, state, params, **extra_args(config, grad, t))
        params = optax.apply_updates(params, updates)
        passed.append(tree.leaves(params))
    ours = {path: np.stack([each[path] for each in passed]) for path in NAMES}
    return ours, tree.leaves(start), [tree.leaves(grad) for grad in grads]


def expected(config, direction, start, grads):
    """The parameters after each of the same steps, each layer of a stack for itself."""
    values_by_path = {}
    for path, axes in NAMES.items():
        layers = range(SIZES["layers"]) if axes[0] == "layers" else [...]
        values = []
        for layer in layers:
            leaf = Leaf(path, layer, start[path][layer].astype(np.float64))
            decay = config.weight_decay if leaf.decays else 0.0
            passed = []
            for t, grad in enumerate(grads, 1):
                u = direction(config, leaf, grad[path][layer].astype(np.float64), t)
                leaf.value = leaf.value - 0.01 / t * (u + decay * leaf.value)
                passed.append(leaf.value)
            values.append(passed)
        values_by_path[path] = np.stack(values, axis=1).reshape(len(grads), *start[path].shape)
    return values_by_path


@EVERY_ARM
def test_an_arm_is_its_published_update_for_50_steps(arm, record_property):
    """Compare the parameters, which start as normal draws, after every step."""
    known = ARMS[arm]
    config = dataclasses.replace(known.config, clip_norm=None)
    ours, start, grads = run(config)
    reference = expected(config, known.direction, start, grads)
    for path, value in reference.items():
        np.testing.assert_allclose(ours[path], value, err_msg=path, **NEAR)
    most = max(np.abs(ours[path] - value).max() for path, value in reference.items())
    record_property(
        "table",
        f"{config.name}: deviates by {most:.1e} at most in 50 steps,"
        f" keeps {known.matrix_bytes:.4g} bytes a number of a matrix",
    )


@pytest.mark.few(6)
@EVERY_ARM
def test_an_arm_keeps_the_bytes_that_it_states(arm):
    """For each number of a large matrix of float32."""
    axes = {"up": {"weight": ("layers", "embed", "mlp")}}
    matrix = {"up": {"weight": jax.ShapeDtypeStruct((2, 512, 2048), jnp.float32)}}
    optimizer = optim.build(arm(), schedule, axes)
    state = jax.eval_shape(optimizer.init, matrix)
    state_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim
    )
    assert state_bytes / matrix["up"]["weight"].size == pytest.approx(
        ARMS[arm].matrix_bytes, rel=0.02
    )


@pytest.mark.slow
def test_values_are_clipped_before_the_norm():
    ours, start, grads = run(
        dataclasses.replace(AdamW(eps=1.0, weight_decay=0.0), clip_norm=0.5, clip_value=0.3), 1
    )
    clipped = {p: np.clip(g, -0.3, 0.3) for p, g in grads[0].items()}
    norm = np.sqrt(sum((g * g).sum() for g in clipped.values()))
    assert norm > 0.5
    for p, g in clipped.items():
        moved = start[p] - 0.01 * g * 0.5 / norm / (np.abs(g) * 0.5 / norm + 1)
        np.testing.assert_allclose(ours[p][-1], moved, err_msg=p, **NEAR)


def test_a_group_with_scale_zero_is_frozen_and_one_with_half_takes_half_the_step():
    plain, start, _ = run(AdamW(), 1)
    grouped, _, _ = run(AdamW(lr_scale=("norm/*=0", "*/weight=0.5")), 1)
    np.testing.assert_array_equal(grouped["norm/scale"][-1], start["norm/scale"])
    p = "stack/query/weight"
    np.testing.assert_allclose(
        grouped[p][-1] - start[p], (plain[p][-1] - start[p]) / 2, rtol=1e-3, atol=1e-6
    )
    np.testing.assert_array_equal(grouped["embedding/table"], plain["embedding/table"])


@EVERY_ARM
def test_the_state_of_every_arm_has_axes_that_fit_its_shapes(arm):
    config = ARMS[arm].config
    optimizer = optim.build(config, schedule, AXES)
    placed = optim.state_axes(config, optimizer, shapes(), AXES)
    state = jax.eval_shape(optimizer.init, shapes())

    def check(leaf, axes):
        assert len(leaf.shape) == len(axes)
        assert set(axes) <= {None, "basis", *SIZES}
        # Scales of eight bits are fewer than the numbers that they scale.
        assert all(SIZES.get(axis, n) % n == 0 for n, axis in zip(leaf.shape, axes, strict=True))

    jax.tree.map(check, state, placed)


def test_moments_lie_where_their_parameters_lie():
    optimizer = optim.build(AdamW(), schedule, AXES)
    adam = optim.state_axes(AdamW(), optimizer, shapes(), AXES)[1]
    assert adam.mu == adam.nu == AXES


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=() if arm in (AdamW, ScheduleFree) else pytest.mark.slow)
        for arm in typing.get_args(Optimizer)
    ],
    ids=lambda arm: arm().name,
)
def test_a_rate_is_a_factor_on_the_learning_rate(arm):
    config = ARMS[arm].config
    rng = np.random.default_rng(0)
    start, grads = draw(rng), [draw(rng) for _ in range(2)]
    results = []
    for factor, rate in ((0.5, 1.0), (1.0, 0.5)):
        optimizer = optim.build(config, lambda step, factor=factor: factor * schedule(step), AXES)
        params, state, update = start, optimizer.init(start), jax.jit(optimizer.update)
        for t, grad in enumerate(grads, 1):
            updates, state = update(
                grad, state, params, rate=jnp.float32(rate), **extra_args(config, grad, t)
            )
            params = optax.apply_updates(params, updates)
        results.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *results)
