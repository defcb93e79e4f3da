"""The mean gradient of small weights, and of micro-batches of rollouts without a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Rollout, Tokens
from jaxlm.objectives.loss import Loss
from jaxlm.training import gradient
from jaxlm.training.gradient import GradientSpec

pytestmark = pytest.mark.usefixtures("one_device")


def batch(is_rollout):
    """Eight rows in four micro-batches; the last two of these have no tokens."""
    segments = np.zeros((8, 3), np.int32)
    segments[[0, 1, 4]] = 1
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3) * segments
    weights = segments.astype(np.float32)
    rollout = Rollout(weights, weights, weights) if is_rollout else None
    return Tokens(tokens, tokens, weights, segments, tokens)._replace(rollout=rollout)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_gradient_is_that_of_the_mean_however_small_the_weights_are(scale, microbatches):
    def loss(params, part, key):
        mean = Mean((params["w"] * part.weights * part.tokens).sum(), part.weights.sum())
        added = Mean(params["w"] * (part.segments * part.tokens).sum(), part.segments.sum())
        return Loss(mean, {"loss_nats": mean}, added)

    rows = batch(is_rollout=False)
    weights = rows.weights * np.array([1, 1, 1, 1, 3, 1, 1, 1], np.float32)[:, None] / 3
    rows = rows._replace(weights=scale * weights)
    spec = GradientSpec(loss=loss, precision=Precision.float32(), microbatches=microbatches)
    inputs = {"w": jnp.float32(2)}, rows, jax.random.key(0), jnp.float32(1)
    grads, part, _ = jax.jit(gradient.build_gradient(spec))(*inputs)
    expected = (weights * rows.tokens).sum() / weights.sum() + rows.tokens.sum() / 9
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(part.value, 2 * expected, rtol=1e-5)


@pytest.mark.parametrize("is_rollout", [True, False])
def test_a_micro_batch_of_a_rollout_without_tokens_is_not_computed(is_rollout):
    """The loss of a part without tokens is NaN in this test."""

    def loss(params, part, key):
        total = params["w"] * (part.weights * part.tokens).sum()
        total = total + jnp.where((part.segments > 0).any(), 0.0, jnp.nan)
        mean = Mean(total, part.weights.sum())
        return Loss(mean, {"loss_nats": mean}, None)

    spec = GradientSpec(loss=loss, precision=Precision.float32(), microbatches=4)
    inputs = {"w": jnp.float32(2)}, batch(is_rollout), jax.random.key(0), jnp.float32(1)
    grads, part, _ = jax.jit(gradient.build_gradient(spec))(*inputs)
    tokens = inputs[1].tokens
    expected = tokens.sum() / 9 if is_rollout else np.nan
    np.testing.assert_allclose(part.objective.value, 2 * expected)
    if is_rollout:
        np.testing.assert_allclose(grads["w"], expected)
