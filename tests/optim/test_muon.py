import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.optim import build as optim
from jaxlm.optim import moments, muon
from jaxlm.optim.config import Muon

AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "norm": {"scale": ("embed",)},
    "stack": {
        "out": {"weight": ("layers", "heads", "head_dim", "embed"), "bias": ("layers", "embed")},
        "query": {"weight": ("layers", "embed", "heads", "head_dim")},
        "up": {"weight": ("layers", "embed", "mlp")},
    },
}
SHAPES = {
    "embedding": {"table": (7, 4)},
    "norm": {"scale": (4,)},
    "stack": {
        "out": {"weight": (3, 2, 3, 4), "bias": (3, 4)},
        "query": {"weight": (3, 4, 2, 3)},
        "up": {"weight": (3, 4, 9)},
    },
}
MATRICES = {  # path: (inputs, outputs) of a layer
    "stack/out/weight": (6, 4),
    "stack/query/weight": (4, 6),
    "stack/up/weight": (4, 9),
}


def draw(rng):
    return jax.tree.map(
        lambda s: rng.normal(size=s).astype(np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def reference_orthogonal(x, steps):
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = x.shape[0] > x.shape[1]
    y = (x.T if flip else x) / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if flip else y


def test_muon_is_the_published_update_of_each_layer_for_50_steps():
    config = Muon(lr=0.02, adam_lr=0.005, newton_schulz_dtype="float32", clip_norm=None)
    rng = np.random.default_rng(0)
    params = draw(rng)
    expected = {path: x.astype(np.float64) for path, x in tree.leaves(params).items()}
    m = {path: 0 * x for path, x in expected.items()}
    v = {path: 0 * x for path, x in expected.items()}
    optimizer = optim.build(config, lambda step: jnp.float32(0.02), AXES)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for t in range(1, 51):
        grads = draw(rng)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for path, leaf in tree.leaves(grads).items():
            g = leaf.astype(np.float64)
            if path in MATRICES:
                ins, outs = MATRICES[path]
                m[path] = 0.95 * m[path] + 0.05 * g
                ahead = (0.95 * m[path] + 0.05 * g).reshape(3, ins, outs)
                moved = np.stack([reference_orthogonal(layer, 5) for layer in ahead])
                expected[path] -= 0.02 * (moved * max(1, outs / ins) ** 0.5).reshape(g.shape)
            else:
                m[path] = 0.9 * m[path] + 0.1 * g
                v[path] = 0.95 * v[path] + 0.05 * g * g
                mean, square = m[path] / (1 - 0.9**t), v[path] / (1 - 0.95**t)
                expected[path] -= 0.005 * mean / (np.sqrt(square) + 1e-8)
    for path, value in expected.items():
        np.testing.assert_allclose(
            tree.leaves(params)[path], value, rtol=2e-3, atol=2e-4, err_msg=path
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 64, 16), (1, 32, 32)])
def test_singular_values_end_near_one(dtype, shape):
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32) * 1e-3
    values = jnp.linalg.svd(muon.newton_schulz(x, 5, dtype).astype(jnp.float32), compute_uv=False)
    assert float(values.max()) < 1.3
    # Random square matrices have singular values near zero, which five steps do not lift all the way.
    assert float(jnp.median(values)) > 0.6


def test_only_matrices_of_blocks_are_orthogonalised_and_they_need_no_second_moment():
    assert moments.inputs(("layers", "embed", "heads", "head_dim")) == (1,)
    assert moments.inputs(("layers", "heads", "head_dim", "embed")) == (1, 2)
    for axes in (
        ("vocab", "embed"),
        ("positions", "embed"),
        ("embed", "vocab"),
        ("layers", "embed"),
        ("embed",),
    ):
        assert moments.inputs(axes) == ()
    state = optim.build(Muon(), lambda step: 0.02, AXES).init(draw(np.random.default_rng(0)))
    second = tree.leaves(state)
    assert {
        p
        for p in MATRICES
        if second[next(k for k in second if k.endswith(f"second/{p}"))].shape == ()
    } == set(MATRICES)
