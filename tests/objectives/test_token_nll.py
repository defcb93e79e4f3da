import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(
        Llama(vocab=50, width=16, depth=2, heads=2, kv_heads=1).build(), Precision.float32()
    )


@pytest.fixture(scope="module")
def params(blueprint):
    return jax.jit(blueprint.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (2, 3, 8)).astype(np.int32)
    ones = np.ones((3, 8), np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    return Tokens(
        tokens=ids[0],
        targets=ids[1],
        weights=(ids[0] % 3 > 0).astype(np.float32),
        segments=ones,
        positions=positions,
    )


def objective(blueprint, params, batch, **settings):
    return token_nll(blueprint.merge(params), batch, None, LossConfig(**settings))


def test_the_loss_is_the_weighted_sum_over_a_float64_softmax(blueprint, params, batch):
    model = blueprint.merge(params)
    logits = np.asarray(
        model.logits(
            model.hidden(batch.tokens, positions=batch.positions, segments=batch.segments).values
        ),
        np.float64,
    )
    normalizer = np.log(np.exp(logits).sum(-1))
    nll = normalizer - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    loss = objective(blueprint, params, batch, z_loss=0.01)
    assert loss.objective.weight == batch.weights.sum()
    assert float(loss.metrics["loss_nats"].total) == pytest.approx(
        (nll * batch.weights).sum(), rel=1e-5
    )
    assert float(loss.objective.total) == pytest.approx(
        ((nll + 0.01 * normalizer**2) * batch.weights).sum(), rel=1e-5
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [None, 9])
def test_a_cap_smoothing_and_the_z_loss_together_are_those_of_float64(batch, params, chunk):
    capped = Llama(vocab=50, width=16, depth=2, heads=2, kv_heads=1).build()
    capped = Blueprint(dataclasses.replace(capped, logit_softcap=0.05), Precision.float32())
    model = capped.merge(params)
    hidden = model.hidden(batch.tokens, positions=batch.positions, segments=batch.segments).values
    plain = dataclasses.replace(capped.config, logit_softcap=None)
    logits = Blueprint(plain, Precision.float32()).merge(params).logits(hidden)
    logits = 0.05 * np.tanh(np.asarray(logits, np.float64) / 0.05)
    assert np.abs(logits).max() > 0.02, "the cap bends something"
    normalizer = np.log(np.exp(logits).sum(-1))
    nll = normalizer - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    every = normalizer - logits.mean(-1)
    settings = dict(z_loss=0.01, label_smoothing=0.2, chunk=chunk)
    loss = objective(capped, params, batch, **settings)
    expected = ((0.8 * nll + 0.2 * every + 0.01 * normalizer**2) * batch.weights).sum()
    assert float(loss.objective.total) == pytest.approx(expected, rel=1e-6)
    assert float(loss.metrics["loss_nats"].total) == pytest.approx(
        (nll * batch.weights).sum(), rel=1e-6
    )
    smoothed = ((0.8 * nll + 0.2 * every) * batch.weights).sum()
    assert float(loss.metrics["smoothed_nats"].total) == pytest.approx(smoothed, rel=1e-6)
    assert "smoothed_nats" not in objective(capped, params, batch).metrics


def test_chunks_change_neither_loss_nor_gradient(blueprint, params, batch):
    def loss(params, chunk):
        settings = dict(chunk=chunk, label_smoothing=0.1)
        return objective(blueprint, params, batch, **settings).objective.value

    (whole, grads), (cut, others) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, chunk) for chunk in (None, 9)
    )
    assert float(cut) == pytest.approx(float(whole), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, others)


def test_a_token_of_weight_zero_moves_nothing(blueprint, params, batch):
    changed = batch._replace(targets=np.where(batch.weights > 0, batch.targets, 0))
    ours, other = (objective(blueprint, params, b).objective for b in (batch, changed))
    assert jnp.array_equal(ours.total, other.total)
