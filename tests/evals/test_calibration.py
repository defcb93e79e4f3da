import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.evals.calibration import Reliability, bin_sums


def test_the_error_is_that_of_a_hand_made_diagram():
    confidence = jnp.array([0.95, 0.99, 0.5, 0.5, 1.0, 0.9])
    correct = jnp.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    weights = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    result = Reliability.of(np.asarray(bin_sums(confidence, correct, weights)))
    assert result.count[14] == 3
    assert result.count[7] == 2
    assert sum(result.count) == 5
    expected = 3 / 5 * abs(2 / 3 - (0.95 + 0.99 + 1.0) / 3) + 2 / 5 * abs(0.5 - 0.5)
    assert result.expected_error == pytest.approx(expected, rel=1e-6)


def test_nothing_has_no_error():
    assert Reliability.of(np.zeros((3, 15))).expected_error == 0.0
