"""Rotary positions against complex numbers in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import rope
from tests.nn import reference

ROWS, LENGTH, HEADS, SIZE = 2, 11, 3, 8


def rotated(x, positions, theta=10_000.0):
    return rope.rotate(x, *rope.angles(jnp.asarray(positions, jnp.int32), x.shape[-1], theta))


def heads(seed=0, rows=ROWS, length=LENGTH, size=SIZE):
    return jax.random.normal(jax.random.key(seed), (rows, length, HEADS, size))


@pytest.mark.few(4)
@pytest.mark.parametrize("theta", [100.0, 10_000.0, 5e5])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_rotation_is_a_product_of_complex_numbers(size, theta):
    x = heads(size=size)
    positions = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH))
    expected = reference.rotated(np.asarray(x, np.float64), positions, theta)
    np.testing.assert_allclose(rotated(x, positions, theta), expected, rtol=1e-4, atol=3e-5)


def test_a_far_position_is_as_exact_as_its_angle_in_float32():
    x, far = heads(rows=1, length=1), 131_071
    expected = reference.rotated(np.asarray(x, np.float64), np.array([[far]]), 5e5)
    # An angle of 1e5 radians is rounded to 1/128 of a radian at most.
    np.testing.assert_allclose(rotated(x, [[far]], 5e5), expected, atol=0.02)


def test_products_depend_on_the_distance_alone():
    query, key = heads(0, 1, 1), heads(1, 1, 1)

    def product(i, j):
        return np.sum(rotated(query, [[i]]) * rotated(key, [[j]]), axis=-1)

    for shift in (1, 100, 1000):
        np.testing.assert_allclose(product(7, 3), product(7 + shift, 3 + shift), rtol=1e-3)
    assert np.abs(product(7, 3) - product(8, 3)).min() > 1e-3
    assert np.abs(product(7, 3) - product(3, 7)).min() > 1e-3


def test_position_zero_turns_nothing_and_no_position_changes_a_length():
    x = heads()
    np.testing.assert_array_equal(rotated(x, np.zeros((ROWS, LENGTH))), x)
    turned = rotated(x, np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH))
    lengths = [np.linalg.norm(each, axis=-1) for each in (x, turned)]
    np.testing.assert_allclose(*lengths, rtol=1e-5)
    assert float(jnp.abs(turned - x)[1].max()) > 0.1


def test_low_precision_is_turned_in_float32():
    x, positions = heads().astype(jnp.bfloat16), np.full((ROWS, LENGTH), 50)
    out = rotated(x, positions)
    assert out.dtype == jnp.bfloat16
    exact = reference.rotated(np.asarray(x, np.float64), positions, 10_000.0)
    # Half a unit in the last of bfloat16's eight bits.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-8, atol=1e-4)
    cosine, _ = rope.angles(jnp.asarray(positions, jnp.int32), SIZE, 10_000.0)
    assert cosine.dtype == jnp.float32


def test_a_document_that_reaches_far_has_factors_of_its_own():
    x = heads(rows=2, length=9)
    factors, others = (1.0, 0.5, 0.25, 0.125), (0.3, 0.2, 0.1, 0.05)
    # A short document, one that reaches slot 4, padding; one that continues, as after a cache.
    positions = np.array([[0, 1, 0, 1, 2, 3, 4, 0, 0], [3, 4, 5, 6, 7, 8, 9, 10, 11]])
    far = np.array([[0, 0, 1, 1, 1, 1, 1, 0, 0], [1] * 9], bool)
    turns = rope.angles(
        jnp.asarray(positions, jnp.int32), SIZE, 100.0, factors=factors, beyond=(4, others)
    )
    for is_far, row_factors in ((False, factors), (True, others)):
        expected = reference.rotated(
            np.asarray(x, np.float64), positions, 100.0, factors=np.array(row_factors)
        )
        np.testing.assert_allclose(
            np.asarray(rope.rotate(x, *turns))[far == is_far],
            expected[far == is_far],
            rtol=1e-4,
            atol=3e-5,
        )
