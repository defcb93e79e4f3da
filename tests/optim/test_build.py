import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.optim import build as optim
from jaxlm.optim.config import Adafactor, AdamW, Lion, Optimizer

AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "stack": {"query": {"weight": ("layers", "embed", "heads"), "bias": ("layers", "heads")}},
    "norm": {"scale": ("embed",)},
}
SHAPES = {
    "embedding": {"table": (6, 4)},
    "stack": {"query": {"weight": (7, 4, 5), "bias": (7, 5)}},
    "norm": {"scale": (4,)},
}
DECAYED = {"embedding/table", "stack/query/weight"}
FREE = {"clip_norm": None}


def schedule(step):
    return 0.01 / (1 + jnp.asarray(step, jnp.float32))


def draw(rng):
    return jax.tree.map(
        lambda s: rng.normal(size=s).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def run(config, steps=50):
    """Our parameters, and the start and gradients as float64 by path."""
    rng = np.random.default_rng(0)
    params, grads = draw(rng), [draw(rng) for _ in range(steps)]
    start = {path: x.astype(np.float64) for path, x in tree.leaves(params).items()}
    optimizer = optim.build(config, schedule, AXES)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return (
        tree.leaves(params),
        start,
        [{p: x.astype(np.float64) for p, x in tree.leaves(g).items()} for g in grads],
    )


def check(ours, expected):
    for path, value in expected.items():
        np.testing.assert_allclose(ours[path], value, rtol=2e-5, atol=2e-6, err_msg=path)


def decay(config, path):
    return config.weight_decay if path in DECAYED else 0.0


def test_adamw_is_the_published_update_for_50_steps():
    config = AdamW(weight_decay=0.3, **FREE)
    ours, params, grads = run(config)
    m = {p: 0 * x for p, x in params.items()}
    v = {p: 0 * x for p, x in params.items()}
    for t, grad in enumerate(grads, 1):
        for p, g in grad.items():
            m[p] = config.b1 * m[p] + (1 - config.b1) * g
            v[p] = config.b2 * v[p] + (1 - config.b2) * g * g
            u = m[p] / (1 - config.b1**t) / (np.sqrt(v[p] / (1 - config.b2**t)) + config.eps)
            params[p] = params[p] - 0.01 / t * (u + decay(config, p) * params[p])
    check(ours, params)


def test_lion_is_the_published_update_for_50_steps():
    config = Lion(**FREE)
    ours, params, grads = run(config)
    m = {p: 0 * x for p, x in params.items()}
    for t, grad in enumerate(grads, 1):
        for p, g in grad.items():
            u = np.sign(config.b1 * m[p] + (1 - config.b1) * g)
            m[p] = config.b2 * m[p] + (1 - config.b2) * g
            params[p] = params[p] - 0.01 / t * (u + decay(config, p) * params[p])
    check(ours, params)


def test_adafactor_is_the_published_update_of_each_layer_for_50_steps():
    config = Adafactor(factor_from=4, weight_decay=0.1, **FREE)
    ours, params, grads = run(config)
    for p in params:
        layers = params[p].shape[0] if p.startswith("stack") else 1
        x = params[p].reshape(
            layers, *(params[p].shape[1:] if p.startswith("stack") else params[p].shape)
        )
        for layer in range(layers):
            w, row, col, full = x[layer].copy(), 0.0, 0.0, 0.0
            for t, grad in enumerate(grads, 1):
                g = grad[p].reshape(x.shape)[layer]
                beta, square = 1 - t**-config.exponent, g * g + config.eps
                if w.ndim == 2:
                    row = beta * row + (1 - beta) * square.sum(1)
                    col = beta * col + (1 - beta) * square.sum(0)
                    second = np.outer(row, col) / row.sum()
                else:
                    second = full = beta * full + (1 - beta) * square
                u = g / np.sqrt(second)
                u = u / max(1, np.sqrt((u * u).mean()))
                u = u * max(config.smallest_scale, np.sqrt((w * w).mean()))
                w = w - 0.01 / t * (u + decay(config, p) * w)
            np.testing.assert_allclose(
                ours[p].reshape(x.shape)[layer], w, rtol=2e-4, atol=2e-5, err_msg=p
            )


def test_values_are_clipped_before_the_norm():
    ours, start, grads = run(
        dataclasses.replace(AdamW(eps=1.0, weight_decay=0.0), clip_norm=0.5, clip_value=0.3), 1
    )
    clipped = {p: np.clip(g, -0.3, 0.3) for p, g in grads[0].items()}
    norm = np.sqrt(sum((g * g).sum() for g in clipped.values()))
    assert norm > 0.5
    check(
        ours,
        {
            p: start[p] - 0.01 * g * 0.5 / norm / (np.abs(g) * 0.5 / norm + 1)
            for p, g in clipped.items()
        },
    )


def test_a_group_with_scale_zero_is_frozen_and_one_with_half_takes_half_the_step():
    plain, start, _ = run(AdamW(), 1)
    grouped, _, _ = run(AdamW(lr_scale=("norm/*=0", "*/weight=0.5")), 1)
    np.testing.assert_array_equal(grouped["norm/scale"], start["norm/scale"])
    p = "stack/query/weight"
    np.testing.assert_allclose(
        grouped[p] - start[p], (plain[p] - start[p]) / 2, rtol=1e-3, atol=1e-6
    )
    np.testing.assert_array_equal(grouped["embedding/table"], plain["embedding/table"])


@pytest.mark.parametrize("arm", typing.get_args(Optimizer))
def test_the_state_of_every_arm_has_axes_that_fit_its_shapes(arm):
    config = arm(factor_from=4) if arm is Adafactor else arm()
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    optimizer = optim.build(config, schedule, AXES)
    placed = optim.state_axes(config, optimizer, shapes, AXES)
    size = {"vocab": 6, "embed": 4, "layers": 7, "heads": 5}
    state = jax.eval_shape(optimizer.init, shapes)
    jax.tree.map(
        lambda leaf, axes: np.testing.assert_equal(leaf.shape, tuple(size[a] for a in axes)),
        state,
        placed,
    )


def test_moments_lie_where_their_parameters_lie():
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    optimizer = optim.build(AdamW(), schedule, AXES)
    adam = optim.state_axes(AdamW(), optimizer, shapes, AXES)[1]
    assert adam.mu == adam.nu == AXES
