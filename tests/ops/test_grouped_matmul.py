"""The product of groups of rows by tiles, against each group alone in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.ops import matmul

ROWS, GROUPS, INS, OUTS = 300, 4, 24, 40
SIZES = {
    "even": [75, 75, 75, 75],
    "empty groups": [0, 290, 0, 10],
    "one group": [300, 0, 0, 0],
    "rows after the last": [3, 64, 1, 32],
    "no rows": [0, 0, 0, 0],
}


def precision(compute):
    wide = jnp.dtype(jnp.float32)
    return Precision(params=wide, moments=wide, compute=jnp.dtype(compute), reduce=wide)


def drawn():
    draw = np.random.default_rng(0)
    shapes = (ROWS, INS), (GROUPS, INS, OUTS), (ROWS, OUTS)
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


def expected(x, weights, grad, sizes):
    """The products, and the gradients of x and of the weights, in float64."""
    x, weights, grad = (np.float64(each) for each in (x, weights, grad))
    out, x_grad = np.zeros((ROWS, OUTS)), np.zeros((ROWS, INS))
    weights_grad, first = np.zeros((GROUPS, INS, OUTS)), 0
    for number, size in enumerate(sizes):
        part = slice(first, first + size)
        out[part], x_grad[part] = x[part] @ weights[number], grad[part] @ weights[number].T
        weights_grad[number], first = x[part].T @ grad[part], first + size
    return out, x_grad, weights_grad


@pytest.mark.parametrize("tile", [7, 32, 256])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
def test_each_group_meets_its_own_weight(sizes, tile, compute):
    x, weights, grad = drawn()
    grad[sum(sizes) :] = 0
    low = [
        np.asarray(jnp.asarray(each, compute).astype(jnp.float32)) for each in (x, weights, grad)
    ]

    @jax.jit
    def run(x, weights, grad):
        product = functools.partial(
            matmul.grouped_matmul, sizes=jnp.asarray(sizes), precision=precision(compute), tile=tile
        )
        out, back = jax.vjp(lambda x, weights: product(x, weights), x, weights)
        return out, *back(grad)

    out, x_grad, weights_grad = run(x, weights, grad)
    filled = slice(sum(sizes))
    reference = expected(*low, sizes)
    np.testing.assert_allclose(out[filled], reference[0][filled], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(x_grad[filled], reference[1][filled], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(weights_grad, reference[2], rtol=1e-5, atol=1e-4)
    assert np.isfinite(np.asarray(out)).all()


def test_devices_have_groups_of_their_own_sizes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, weights, grad = drawn()
    sizes = np.array([[20, 30, 0, 25], [75, 0, 0, 0], [0, 0, 0, 75], [1, 2, 3, 69]])
    plain = precision(jnp.float32)

    def part(x, weights, sizes):
        wide = jax.lax.pcast(weights, "data", to="varying")
        return matmul.grouped_matmul(x, wide, sizes[0], plain, 16)

    split = PartitionSpec("data")
    mapped = jax.shard_map(
        part, mesh=mesh, in_specs=(split, PartitionSpec(), split), out_specs=split
    )
    out, back = jax.jit(lambda *inputs: jax.vjp(lambda x, w: mapped(x, w, sizes), *inputs))(
        x, weights
    )
    x_grad, weights_grad = back(grad)
    total = np.zeros(weights.shape)
    for number, each in enumerate(sizes):
        rows = slice(75 * number, 75 * number + 75)
        padded = [np.zeros_like(x), np.zeros_like(grad)]
        padded[0][:75], padded[1][:75] = x[rows], grad[rows]
        reference = expected(padded[0], weights, padded[1], each)
        np.testing.assert_allclose(out[rows], reference[0][:75], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(x_grad[rows], reference[1][:75], rtol=1e-5, atol=1e-4)
        total += reference[2]
    np.testing.assert_allclose(weights_grad, total, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("platform", "rows", "groups", "tile"),
    [
        ("cpu", 255, 8, None),
        ("cpu", 256, 64, 32),
        ("cpu", 4096, 64, 32),
        ("cpu", 4096, 8, 256),
        ("cpu", 2400, 8, 256),
        ("cpu", 100_000, 2, 256),
        ("gpu", 4096, 8, None),
        ("tpu", 4096, 8, None),
    ],
)
def test_a_tile_has_half_the_rows_of_a_group_on_a_cpu(platform, rows, groups, tile, monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: platform)
    assert matmul.group_tile(rows, groups) == tile
