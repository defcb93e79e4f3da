"""The closest matrix of a rank, against NumPy's singular values."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops.low_rank import leading_factors


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)], ids=str)
def test_the_product_is_the_closest_matrix_and_both_factors_are_of_one_size(shape):
    weight = np.random.default_rng(0).standard_normal(shape)
    a, b = leading_factors(jnp.asarray(weight, jnp.float32), 3)
    left, values, right = np.linalg.svd(weight, full_matrices=False)
    closest = (left[:, :3] * values[:3]) @ right[:3]
    np.testing.assert_allclose(a @ b, closest, atol=1e-6 * values[0])  # rounding, on any processor
    for norms in (jnp.linalg.norm(a, axis=0), jnp.linalg.norm(b, axis=1)):
        np.testing.assert_allclose(norms, np.sqrt(values[:3]), rtol=1e-5)


def test_a_weight_of_a_smaller_rank_has_factors_of_zero():
    weight = np.outer(np.arange(1.0, 5), np.arange(1.0, 7)).astype(np.float32)
    for each in (weight, np.zeros_like(weight)):
        a, b = leading_factors(jnp.asarray(each), 2)
        np.testing.assert_allclose(a @ b, each, atol=1e-4)
