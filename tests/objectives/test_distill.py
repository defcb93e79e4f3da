"""Distillation: the loss against a float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import Distill, LossConfig
from jaxlm.objectives.distill import divergence
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")

FAMILY = Llama(vocab=64, width=32, depth=2, heads=4, kv_heads=2, hidden=64)
WEIGHT, TEMPERATURE = 0.7, 2.0


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(FAMILY.build(), Precision.float32())


@pytest.fixture(scope="module")
def models(blueprint):
    return [draw_params(blueprint, seed) for seed in (0, 1)]


def rows(shape=(2, 16)):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 64, shape).astype(np.int32)
    weights = draw.random(shape).astype(np.float32)
    segments = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    targets = np.roll(tokens, -1, 1)
    return Tokens(*map(jnp.asarray, (tokens, targets, weights, segments, positions)))


def loss_of(blueprint, student, teacher, **settings):
    config = Distill(teacher="runs/a", weight=WEIGHT, temperature=TEMPERATURE)
    objective = build(config, LossConfig(**settings))

    def loss(student, teacher):
        return objective.loss(blueprint.merge(student), rows(), None, blueprint.merge(teacher))

    return jax.jit(loss)(student, teacher)


def logits_of(blueprint, params):
    batch = rows()
    model = blueprint.merge(params)
    logits = model.logits(model.hidden(batch.tokens, positions=batch.positions).values)
    return np.asarray(logits, np.float64)


def log_softmax(x):
    return (
        x
        - x.max(-1, keepdims=True)
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


def test_the_loss_is_that_of_the_paper(blueprint, models):
    student, teacher = (logits_of(blueprint, params) for params in models)
    batch = rows()
    log_p, log_q = log_softmax(teacher / TEMPERATURE), log_softmax(student / TEMPERATURE)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    nll = -np.take_along_axis(log_softmax(student), np.asarray(batch.targets)[..., None], -1)[
        ..., 0
    ]
    taught = -np.take_along_axis(log_softmax(teacher), np.asarray(batch.targets)[..., None], -1)
    weights = np.asarray(batch.weights, np.float64)
    expected = (weights * ((1 - WEIGHT) * nll + WEIGHT * TEMPERATURE**2 * kl)).sum() / weights.sum()
    loss = loss_of(blueprint, *models)
    np.testing.assert_allclose(float(loss.value), expected, rtol=1e-5)
    figures = {name: float(mean.value) for name, mean in loss.metrics.items()}
    np.testing.assert_allclose(
        figures["loss_nats"], (weights * nll).sum() / weights.sum(), rtol=1e-5
    )
    np.testing.assert_allclose(
        figures["teacher_kl_nats"], (weights * kl).sum() / weights.sum(), rtol=1e-4
    )
    np.testing.assert_allclose(
        figures["teacher_nats"], (weights * taught[..., 0]).sum() / weights.sum(), rtol=1e-5
    )


@pytest.mark.slow
def test_chunks_of_logits_change_nothing(blueprint, models):
    whole, chunked = (loss_of(blueprint, *models, chunk=chunk) for chunk in (None, 4))
    np.testing.assert_allclose(float(whole.value), float(chunked.value), rtol=1e-6)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(blueprint, models):
    student = models[0]
    objective = build(Distill(teacher="runs/a", weight=1.0), LossConfig())

    def loss(params):
        model, teacher = blueprint.merge(params), blueprint.merge(student)
        return objective.loss(model, rows(), None, teacher).value

    value, grads = jax.jit(jax.value_and_grad(loss))(student)
    assert abs(float(value)) < 1e-6
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) < 1e-5


def test_the_divergence_has_no_gradient_for_the_teacher_and_is_never_negative():
    draw = np.random.default_rng(1)
    teacher, student = (jnp.asarray(draw.normal(0, 5, (64, 32))) for _ in range(2))
    assert float(divergence(teacher, student, 1.0).min()) >= 0
    assert np.isfinite(divergence(100 * teacher, -100 * student, 1.0)).all()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["reverse", "jsd"])
def test_other_divergences_are_those_of_a_float64_reference(blueprint, models, kind):
    student, teacher = (logits_of(blueprint, params) for params in models)
    log_p, log_q = log_softmax(teacher / TEMPERATURE), log_softmax(student / TEMPERATURE)
    p, q, beta = np.exp(log_p), np.exp(log_q), 0.25
    mixed = np.log(beta * p + (1 - beta) * q)
    parts = {
        "reverse": q * (log_q - log_p),
        "jsd": beta * p * (log_p - mixed) + (1 - beta) * q * (log_q - mixed),
    }
    weights = np.asarray(rows().weights, np.float64)
    expected = (weights * parts[kind].sum(-1)).sum() / weights.sum()
    settings = Distill(teacher="a", weight=1.0, temperature=TEMPERATURE, divergence=kind, beta=beta)
    objective = build(settings, LossConfig(chunk=4))

    def loss(params, teacher):
        result = objective.loss(blueprint.merge(params), rows(), None, blueprint.merge(teacher))
        return result.value, result.metrics

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, metrics), grads = run(*models)
    np.testing.assert_allclose(value, TEMPERATURE**2 * expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["divergence_nats"].value, expected, rtol=1e-4)
    kl = (weights * (p * (log_p - log_q)).sum(-1)).sum() / weights.sum()
    np.testing.assert_allclose(metrics["teacher_kl_nats"].value, kl, rtol=1e-4)
    (value, _), grads = run(models[0], models[0])
    assert abs(float(value)) < 1e-6
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) < 1e-5
