"""Weights in four and eight bits against float64 references, in levels, bits and bounds."""

import statistics
import typing

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.ops.kernels import SCALES_BLOCK
from jaxlm.ops.matmul import matmul, stored_matmul
from jaxlm.ops.weight_codes import LEVELS, Base, WeightFormat

BASES = ("nf4", "nf4_double", "int8", "int4")
ALL = typing.get_args(Base)
SHAPES = {"even": (128, 3, 5), "short last block": (100, 6), "odd": (67, 4), "one block": (24, 2)}


def weight(shape, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal(shape).astype(np.float32) * draw.uniform(0.1, 2, shape[1:])


def reference(values, base, block):
    """Return the rounded weight in float64, block by block, by the distance to each level."""
    flat = values.astype(np.float64).reshape(len(values), -1)
    starts = range(0, len(flat), block)
    largest = np.array([np.abs(flat[n : n + block]).max(0) for n in starts])
    if base in ("int8", "int4"):
        most = 127 if base == "int8" else 7
        scale, grid = largest / most, np.arange(-most, most + 1)
    else:
        scale, grid = largest, np.array(LEVELS)
    used = scale
    if base == "nf4_double":
        centered = (scale - scale.mean()).reshape(-1)
        rounded = np.zeros_like(centered)
        for n in range(0, len(centered), 256):
            part = centered[n : n + 256]
            unit = np.abs(part).max() / 127
            rounded[n : n + 256] = np.round(part / unit) * unit
        used = np.maximum(rounded.reshape(scale.shape) + scale.mean(), 0)
    out = np.zeros_like(flat)
    for number, n in enumerate(starts):
        distance = np.abs(flat[n : n + block, :, None] / scale[number][None, :, None] - grid)
        out[n : n + block] = grid[distance.argmin(-1)] * used[number]
    return out.reshape(values.shape)


def stored(values, base, block=16):
    form = WeightFormat(base, block)
    leaves = jax.jit(form.quantize)(jnp.asarray(values, jnp.float32))
    return leaves, np.asarray(jax.jit(form.dequantize, static_argnums=1)(leaves, len(values)))


@pytest.mark.few(6)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("base", BASES)
def test_a_weight_is_that_of_the_reference(base, shape):
    values = weight(shape).astype(np.float32)
    _, decoded = stored(values, base)
    expected = reference(values, base, 16)
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - values).max() > 1e-4


def test_the_levels_are_quantiles_of_the_normal_distribution():
    """Dettmers et al. 2023: 8 and 9 quantiles of both halves share 0, and are scaled to 1."""
    inverse = statistics.NormalDist().inv_cdf
    last = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    high = [inverse(p) for p in np.linspace(last, 0.5, 9)[:-1]]
    low = [-inverse(p) for p in np.linspace(last, 0.5, 8)[:-1]]
    expected = sorted([*high, 0.0, *low])
    np.testing.assert_allclose(LEVELS, np.array(expected) / max(expected), atol=1e-6)
    assert len(LEVELS) == 16


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_values_that_are_levels_are_exact(base):
    draw = np.random.default_rng(1)
    grid = np.array(LEVELS, np.float32) if base == "nf4" else np.arange(-127, 128, dtype=np.float32)
    scale = np.float32(2.0) ** draw.integers(-3, 4, (4, 1, 6))  # exact products
    values = draw.choice(grid, (4, 16, 6))
    values[:, 0] = grid.max()  # each block has its largest
    values = (values * scale).reshape(64, 6).astype(np.float32)
    leaves, decoded = stored(values, base)
    np.testing.assert_array_equal(decoded, values)
    codes = np.asarray(leaves["codes"])
    assert codes.shape == ((32, 6) if base == "nf4" else (64, 6))


@pytest.mark.few(2)
@pytest.mark.parametrize("base", BASES)
def test_the_error_is_bounded_by_half_of_a_gap(base):
    values = weight((256, 40), 2).astype(np.float32)
    _, decoded = stored(values, base, 64)
    largest = np.abs(values.reshape(4, 64, 40)).max(1)
    gaps = {"int8": 1 / 127, "int4": 1 / 7}
    bound = largest * gaps.get(base, np.diff(LEVELS).max()) / 2
    if base == "nf4_double":  # the scale itself is rounded
        bound = bound + np.abs(largest - largest.mean()).max() / 254
    error = np.abs(decoded - values).reshape(4, 64, 40).max(1)
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > bound.max() / 4


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.5), ("nf4_double", 4.127), ("int8", 8.5)])
def test_the_bits_of_a_weight(base, bits):
    values = weight((1024, 512), 3).astype(np.float32)
    leaves, _ = stored(values, base, 64)
    assert SCALES_BLOCK == 256
    stored_bits = 8 * sum(leaf.nbytes for leaf in leaves.values()) / values.size
    assert stored_bits == pytest.approx(bits, abs=5e-4)


@pytest.mark.few(3)
@pytest.mark.parametrize("base", ALL)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(base):
    values = weight((64, 4)).astype(np.float32)
    values[:16, 1] = 0
    leaves, decoded = stored(values, base)
    assert (decoded[:16, 1] == 0).all()
    assert np.isfinite(decoded).all()
    if base in ("int4", "w4a8"):
        assert (np.asarray(leaves["codes"])[:8, 1] == 0x88).all()  # 0 is 8, in both halves
    for bad in (np.nan, np.inf):
        values[20, 2] = bad
        _, decoded = stored(values, base)
        assert not np.isfinite(decoded[16:32, 2]).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("base", ALL)
def test_constant_and_tiny_columns_are_kept_and_one_outlier_costs_its_own_block_alone(base):
    """Not those of nf4_double, whose scales are rounded together."""
    constants = np.array([0.0, 3.0, -3.0, 1e-30, 1e-42], np.float32)
    values = np.broadcast_to(constants, (40, 5)).astype(np.float32)  # the last block is short
    _, decoded = stored(values[:, :1] if base == "nf4_double" else values, base)
    if base == "nf4_double":
        assert (decoded == 0).all()
        _, decoded = stored(values[:, 1:3], base)
        np.testing.assert_allclose(decoded, values[:, 1:3], rtol=1e-6)
    else:
        np.testing.assert_allclose(decoded, values, rtol=1e-5, atol=1e-37)
        extremes = np.full((40, 4), [3e38, -1.7e38, 1e-36, 1e-38], np.float32)
        extremes[::3] = 0
        # Scales below the least normal number are not kept, so that a byte is off by up to 1.5e-36.
        np.testing.assert_allclose(stored(extremes, base)[1], extremes, rtol=1e-5, atol=1.5e-36)
    values = weight((40, 3)).astype(np.float32)
    _, without = stored(values, base)
    values[20, 1] = 1e4
    _, decoded = stored(values, base)
    near = {"nf4_double": 1e-3, "int4_zero": 1 / 30}  # of half a step, for the latter
    assert decoded[20, 1] == pytest.approx(1e4, rel=near.get(base, 1e-6))
    assert np.isfinite(decoded).all()
    if base != "nf4_double":
        is_other = np.ones(values.shape, bool)
        is_other[16:32, 1] = False
        np.testing.assert_array_equal(decoded[is_other], without[is_other])


@pytest.mark.few(2)
@pytest.mark.parametrize("base", BASES)
def test_a_product_has_the_value_and_the_input_gradient_of_the_dequantized_weight(base):
    form, x = WeightFormat(base, 16), jnp.asarray(weight((5, 7, 40), 4), jnp.float32)
    leaves = form.quantize(jnp.asarray(weight((40, 6), 5), jnp.float32))
    dense = form.dequantize(leaves, 40)
    precision = Precision.float32()

    def through(x):
        read = lambda leaves: form.dequantize(leaves, 40)  # noqa: E731
        return stored_matmul(x, leaves, read, precision)

    one, other = (
        jax.vjp(function, x) for function in (through, lambda x: matmul(x, dense, precision))
    )
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1](one[0])[0], other[1](one[0])[0])


@pytest.mark.parametrize("inputs", [64, 67])
@pytest.mark.parametrize("offset", [0.0, 3.0, -3.0], ids=["around 0", "positive", "negative"])
def test_sixteen_codes_span_a_block_and_have_0(offset, inputs):
    values = weight((inputs, 6), 6).astype(np.float32) + np.float32(offset)
    values[5] = 0
    leaves, dequantized = stored(values, "int4_zero")
    assert len(leaves["zeros"]) == -(-inputs // 16)
    for first in range(0, inputs, 16):
        block, read = values[first : first + 16], dequantized[first : first + 16]
        step = (np.maximum(block.max(0), 0) - np.minimum(block.min(0), 0)) / 15
        assert (np.abs(read - block).max(0) <= step / 2 * (1 + 1e-4)).all()
    assert (dequantized[5] == 0).all()
    assert {name: leaf.dtype.name for name, leaf in leaves.items()} == {
        "codes": "uint8", "scales": "float32", "zeros": "uint8"
    }  # fmt: skip


@pytest.mark.parametrize("base", ["int8", "fp8"])
def test_a_scale_for_each_output_is_that_of_its_largest_number(base):
    values = weight((67, 4), 7).astype(np.float32)
    leaves, dequantized = stored(values, base, "all")
    dtype, most = {"int8": (np.int8, 127), "fp8": (ml_dtypes.float8_e4m3fn, 448)}[base]
    scales = np.abs(values).max(0) / np.float32(most)
    np.testing.assert_allclose(leaves["scales"], scales[None], rtol=1e-6)
    unit = values / np.asarray(leaves["scales"])
    expected = (np.round(unit) if base == "int8" else unit).astype(dtype)
    np.testing.assert_array_equal(np.asarray(leaves["codes"]), expected)
    np.testing.assert_array_equal(dequantized, expected.astype(np.float32) * leaves["scales"])
