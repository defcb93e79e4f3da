"""Stochastic rounding is unbiased, keeps exact numbers, and draws on the device of each shard."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.optim import rounding
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig

LOW = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
LEVELS = np.arange(2**16, dtype=np.float32) / 2**16  # every noise that 16 bits can make
KEY = jax.random.key(3)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan]


def numbers(count):
    """Normal numbers of many sizes, some of them next to a power of two, where the step changes."""
    rng = np.random.default_rng(0)
    near = np.float32(2.0) ** rng.integers(-12, 12, count // 2)
    near = np.nextafter(near, np.float32(rng.choice([0, 1e9])))
    wide = rng.standard_normal(count - len(near)) * 10.0 ** rng.integers(-4, 4, count - len(near))
    return np.concatenate([near, wide]).astype(np.float32)


@pytest.mark.few(1)
@LOW
def test_the_mean_over_all_noises_is_the_number_itself(dtype):
    """Over every value of the noise, not over a sample: to half a step of 2^-16 of a distance."""
    x = jnp.asarray(numbers(64))
    rounded_values = jax.jit(lambda x, u: rounding.stochastic(x, dtype, u))(
        x[:, None], LEVELS[None]
    )
    rounded_values = np.asarray(rounded_values, np.float64)
    assert all(len(np.unique(row)) <= 2 for row in rounded_values)
    distance = np.abs(rounded_values.max(1) - rounded_values.min(1))
    gap = np.abs(rounded_values.mean(1) - np.asarray(x, np.float64))
    assert (gap <= distance * 2.0**-16).all()
    if dtype == jnp.bfloat16:
        np.testing.assert_array_equal(rounded_values.mean(1), np.asarray(x, np.float64))


@LOW
def test_what_the_dtype_holds_and_what_is_no_number_stays(dtype):
    held = jnp.asarray([*numbers(200), jnp.finfo(dtype).max], dtype)
    exact = jnp.concatenate([held, -held, jnp.asarray(SPECIAL, dtype)])
    for noise in (0.0, 0.5, 1 - 2**-16):
        rounded_values = rounding.stochastic(
            exact.astype(jnp.float32), dtype, jnp.full(exact.shape, noise)
        )
        bits = (np.asarray(each).view(np.uint16) for each in (rounded_values, exact))
        np.testing.assert_array_equal(*bits)


def test_frozen_leaves_and_numbers_that_are_not_moved_keep_their_bits():
    """A frozen leaf is moved by -0."""
    params = {"w": jnp.asarray([*numbers(500), *SPECIAL], jnp.bfloat16)}
    still = {"w": jnp.full(params["w"].shape, -0.0)}
    rounded_values = rounding.rounded(rounding.add(params, still), params, KEY)
    bits = (np.asarray(tree["w"]).view(np.uint16) for tree in (rounded_values, params))
    np.testing.assert_array_equal(*bits)


def test_small_updates_add_up_to_what_they_are_in_float32():
    """2,000 updates of a hundredth of the distance to the next number."""
    params = {"w": jnp.full(4096, 1.0, jnp.bfloat16)}
    size = 2.0**-7 / 100

    def step(t, params):
        updates = {"w": jnp.full(4096, size)}
        key = jax.random.fold_in(KEY, t)
        return rounding.rounded(rounding.add(params, updates), params, key)

    moved = jax.jit(lambda p: jax.lax.fori_loop(0, 2000, step, p))(params)["w"]
    moved = np.asarray(moved, np.float64) - 1
    noise = np.sqrt(2.0**-7 * 2000 * size / len(moved))
    assert moved.mean() == pytest.approx(2000 * size, abs=4 * noise)
    nearest = params["w"]
    for _ in range(3):
        nearest = nearest + jnp.asarray(size, jnp.bfloat16)
    assert (nearest == params["w"]).all(), "rounded to the nearest, none of them would have moved"


def test_the_noise_is_uniform_and_no_two_positions_leaves_or_steps_share_theirs():
    """By chi-square over 256 classes, and by the correlation of neighbors along each dimension."""
    shape = (16, 128, 256)
    count = np.prod(shape)
    draws = [np.asarray(rounding.uniform(jax.random.fold_in(KEY, n), shape)) for n in range(3)]
    limit = 5 / np.sqrt(count)
    for draw in draws:
        classes = np.bincount((draw * 256).astype(int).ravel(), minlength=256)
        chi_square = np.square(classes - count / 256).sum() / (count / 256)
        assert chi_square < 255 + 5 * np.sqrt(2 * 255)
        low = (draw * 2**16).astype(int) % 256  # the lower half of the 16 bits
        assert np.abs(np.corrcoef(low.ravel(), draw.ravel())[0, 1]) < limit
        for dim in range(3):
            for lag in (1, 2, 8):
                pair = draw, np.roll(draw, lag, dim)
                assert np.abs(np.corrcoef(*(x.ravel() for x in pair))[0, 1]) < limit
        assert np.abs(np.corrcoef(draw.reshape(-1, 256)) - np.eye(2048)).max() < 7 / 16
    for one, other in ((0, 1), (1, 2), (0, 2)):
        correlation = np.corrcoef(draws[one].ravel(), draws[other].ravel())[0, 1]
        assert np.abs(correlation) < limit
    assert draws[0].max() < 1 <= draws[0].max() + 2.0**-10


def test_leaves_and_steps_draw_numbers_of_their_own_and_other_dtypes_are_left_alone():
    x = jnp.full(4096, 1 + 2.0**-8)
    values = {"a": x, "b": x, "f": x, "n": jnp.arange(3)}
    like = {"a": x.astype(jnp.bfloat16), "b": x.astype(jnp.bfloat16), "f": x, "n": jnp.arange(3)}
    rounded_values = rounding.rounded(values, like, KEY)
    assert jax.tree.map(lambda x: x.dtype, rounded_values) == jax.tree.map(lambda x: x.dtype, like)
    np.testing.assert_array_equal(rounded_values["f"], x)
    later = rounding.rounded(values, like, jax.random.fold_in(KEY, 1))
    for one, other in (
        (rounded_values["a"], rounded_values["b"]),
        (rounded_values["a"], later["a"]),
    ):
        assert (one == other).mean() == pytest.approx(0.5, abs=0.05)
    repeated = rounding.rounded({"a": x}, {"a": like["a"]}, KEY)
    np.testing.assert_array_equal(rounded_values["a"], repeated["a"])


def test_a_sharded_leaf_is_rounded_as_a_whole_one_and_nothing_is_sent():
    """No collective in the program, and no array in it larger than a device's part."""
    grid = mesh.build(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    shape, local = (48, 96), (24, 48)
    x = jax.random.normal(jax.random.key(0), shape)
    like = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    place = NamedSharding(grid, PartitionSpec("fsdp", "tensor"))

    def rounded(x):
        return rounding.rounded({"w": x}, {"w": like}, KEY)["w"]

    program = jax.jit(rounded, in_shardings=place, out_shardings=place)
    text = program.lower(x).compile().as_text()
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert name not in text
    sizes = [
        int(np.prod([int(n) for n in dims.split(",")]))
        for dims in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)
    ]
    assert max(sizes) == np.prod(local)
    rounded_values = program(jax.device_put(x, place))
    np.testing.assert_array_equal(np.asarray(rounded_values), np.asarray(jax.jit(rounded)(x)))
