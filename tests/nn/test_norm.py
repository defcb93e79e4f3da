"""Norms against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.config import NormConfig
from jaxlm.nn.norm import Norm
from tests.nn import reference

SIZE = 48
CONFIGS = {
    "rms": NormConfig(kind="rms", eps=1e-5),
    "layer": NormConfig(kind="layer", eps=1e-3),
    "layer with a bias": NormConfig(kind="layer", bias=True),
}


def made(config):
    return reference.moved(lambda key, init: Norm({"embed": SIZE}, config, dtype=init.dtype))


def inputs(shape=(2, 5, SIZE)):
    """Rows away from zero, of sizes from 0.01 to 100."""
    x = 1.0 + jax.random.normal(jax.random.key(2), shape)
    return x * jnp.logspace(-2, 2, shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))


@pytest.mark.parametrize("shape", [(2, 5, SIZE), (2, 5, 3, SIZE)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_norm_is_its_formula(kind, shape):
    norm, params = made(CONFIGS[kind])
    x = inputs(shape)
    expected = reference.norm(np.asarray(x, np.float64), params, CONFIGS[kind])
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_low_precision_comes_in_and_out_and_float32_lies_between(kind):
    norm, params = made(CONFIGS[kind])
    x = inputs().astype(jnp.bfloat16)
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    # Rounded once, at the end: the float64 result in bfloat16, or its neighbor in a near tie.
    expected = reference.norm(np.asarray(x, np.float64), params, CONFIGS[kind])
    rounded = jnp.asarray(expected, jnp.float32).astype(jnp.bfloat16)
    assert float((out == rounded).mean()) > 0.98
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_squares_that_float16_cannot_hold_are_no_matter(kind):
    norm, _ = made(CONFIGS[kind])
    x = jax.random.normal(jax.random.key(3), (1, 2, SIZE)) * 1000
    assert not bool(jnp.isfinite(jnp.square(x.astype(jnp.float16))).all())
    np.testing.assert_allclose(norm(x.astype(jnp.float16)), norm(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_row_of_zeros_has_a_finite_gradient(kind):
    norm, _ = made(CONFIGS[kind])
    gradient = jax.grad(lambda x: norm(x).sum())(jnp.zeros((1, 1, SIZE)))
    assert bool(jnp.isfinite(gradient).all())
