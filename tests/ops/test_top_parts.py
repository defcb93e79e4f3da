"""Log-probabilities of a few ids and of all others, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxlm.ops.top_parts import LEAST, top_parts

IDS = 40


def expected(logits, ids):
    """The parts and their derivatives by the logits [.., K + 1, V], float64."""
    log_p = scipy.special.log_softmax(np.asarray(logits, np.float64), -1)
    chosen = np.take_along_axis(log_p, ids, -1)
    others = log_p.copy()
    np.put_along_axis(others, ids, -np.inf, -1)
    last = scipy.special.logsumexp(others, axis=-1, keepdims=True)
    shares = np.exp(others - np.where(np.isfinite(last), last, 0.0))
    hot = np.concatenate([np.eye(logits.shape[-1])[ids], shares[..., None, :]], -2)
    parts = np.concatenate([chosen, np.maximum(last, LEAST)], -1)
    return parts, hot - np.exp(log_p)[..., None, :]


@pytest.mark.parametrize(
    ("top", "spread"), [(4, 1.0), (4, 60.0), (1, 0.0), (IDS, 3.0), (IDS - 1, 300.0)]
)
def test_parts_and_gradients_are_those_of_float64(top, spread):
    """Also if all others have a probability that float32 rounds to 0, or there is no other."""
    draw = np.random.default_rng(top)
    logits = (spread * draw.normal(size=(2, 3, IDS))).astype(np.float32)
    ids = np.argsort(-logits, -1)[..., :top]
    grad = draw.normal(size=(2, 3, top + 1)).astype(np.float32)
    parts, slopes = expected(logits, ids)
    if top == IDS:
        slopes[..., -1, :] = 0.0  # of the constant LEAST
        grad[..., -1] = 0.0

    @jax.jit
    def computed(logits):
        values, pull = jax.vjp(lambda x: top_parts(x, jnp.asarray(ids)), logits)
        return values, pull(jnp.asarray(grad))[0]

    values, gradient = computed(logits)
    np.testing.assert_allclose(values, parts, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        gradient, np.einsum("btk,btkv->btv", grad, slopes), rtol=2e-4, atol=2e-5
    )
