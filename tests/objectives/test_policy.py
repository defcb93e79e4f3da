"""Policy gradients: loss, gradient and figures of each algorithm against float64 formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Rollout, Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.policy import DrawnScores, PolicyLearning
from jaxlm.objectives.policy_config import ALGORITHMS, Policy
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")

ROWS, SLOTS, VOCAB, TEMPERATURE = 4, 12, 64, 1.3
FAMILY = Llama(vocab=VOCAB, width=16, depth=1, heads=2, kv_heads=1, hidden=32)
DRAW = np.random.default_rng(0)
ALLOWED = np.arange(VOCAB) < 50
STARTS, STOPS = (2, 3, 1, 4), (7, 12, 4, 6)  # of the sampled targets of each row
ADVANTAGES = (1.5, -0.5, -2.0, 0.7)


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(FAMILY.build(), Precision.float32())


@pytest.fixture(scope="module")
def models(blueprint):
    return [draw_params(blueprint, seed) for seed in (0, 1)]


@functools.cache
def objective(**settings):
    made = build(Policy(**settings), LossConfig())
    assert isinstance(made, PolicyLearning)
    return PolicyLearning(made.settings, LossConfig(), "decoder", TEMPERATURE, ALLOWED)


@functools.cache
def scorer(blueprint):
    return jax.jit(lambda params, batch: objective().score(blueprint.merge(params), batch, None)[0])


@pytest.fixture(scope="module")
def batch(blueprint, models):
    """Rows with one sample each, whose log-probabilities when drawn were other ones."""
    ids = DRAW.integers(0, 50, (ROWS, SLOTS + 1)).astype(np.int32)
    at = np.arange(SLOTS)[None]
    starts, stops = (np.array(each)[:, None] for each in (STARTS, STOPS))
    is_drawn = (at >= starts) & (at < stops)
    segments = np.broadcast_to(at < stops, (ROWS, SLOTS)).astype(np.int32)
    tokens = Tokens(
        *map(jnp.asarray, (ids[:, :-1], ids[:, 1:], is_drawn.astype(np.float32), segments)),
        jnp.broadcast_to(jnp.asarray(at, jnp.int32), (ROWS, SLOTS)),
    )
    log_p = scorer(blueprint)(models[0], tokens).log_p
    old = np.where(is_drawn, log_p + DRAW.normal(size=log_p.shape) * 0.4, 0)
    advantages = np.where(is_drawn, np.array(ADVANTAGES)[:, None], 0)
    columns = [jnp.asarray(each, jnp.float32) for each in (old, advantages)]
    return tokens._replace(rollout=Rollout(*columns, counts=jnp.zeros_like(old)))


def weighted(batch, mean):
    """The batch with the weights and counts of a mean, as the recipe makes them."""
    is_drawn = np.asarray(batch.weights > 0)
    lengths = is_drawn.sum(1, keepdims=True)
    weights = {"sequence": is_drawn / lengths, "constant": is_drawn / 16}.get(mean, is_drawn * 1.0)
    counts = np.zeros_like(weights)
    counts[:, 0] = 1
    counts = is_drawn * 1.0 if mean == "token" else counts
    weights, counts = (jnp.asarray(each, jnp.float32) for each in (weights, counts))
    return batch._replace(weights=weights, rollout=batch.rollout._replace(counts=counts))


def log_ratio(log_p, batch, terms):
    """The logarithm of the ratio of each token, in float64."""
    is_drawn = np.asarray(batch.weights > 0)
    each = np.where(is_drawn, log_p - np.asarray(batch.rollout.log_p, np.float64), 0)
    if terms.ratio == "sequence":
        mean = each.sum(1) / is_drawn.sum(1)
        return np.where(is_drawn, mean[:, None], 0)
    return each


def by_formula(log_p, batch, settings, fixed):
    """The loss in float64; `fixed` has the reference's log-probabilities and the constant ones."""
    terms, is_drawn, (log_q, at) = settings.terms, np.asarray(batch.weights > 0), fixed
    ratio, constant = (np.exp(log_ratio(each, batch, terms)) for each in (log_p, at))
    advantage, penalty = np.asarray(batch.rollout.advantages, np.float64), 0.0
    if settings.kl == "reward_k1":
        k1 = np.where(is_drawn, at - log_q, 0)
        to_go = k1.sum(1, keepdims=True) - k1.cumsum(1) + k1
        advantage = advantage - settings.beta * to_go
    elif settings.kl != "none":
        penalty = settings.beta * (np.exp(log_q - log_p) - 1 - (log_q - log_p))
        penalty = penalty * (ratio if settings.kl == "loss_k3_weighted" else 1.0)
    limited = np.clip(ratio, 1 - terms.clip_low, 1 + terms.clip_high)
    each = {
        "plain": -ratio * advantage,
        "clip": -np.minimum(ratio * advantage, limited * advantage),
        "weight": -np.minimum(constant, 1 + terms.clip_high) * advantage * log_p,
    }[terms.surrogate]
    weighted = np.asarray(batch.weights, np.float64) * (each + penalty)
    return np.where(is_drawn, weighted, 0).sum() / float(batch.rollout.counts.sum())


def slopes_of(log_p, batch, settings, log_q):
    """The numeric gradient of the formula to each drawn token's log-probability."""
    slopes = np.zeros_like(log_p)
    for place in zip(*np.nonzero(np.asarray(batch.weights)), strict=True):
        step = np.zeros_like(log_p)
        step[place] = 1e-6
        high, low = (
            by_formula(log_p + sign * step, batch, settings, (log_q, log_p)) for sign in (1, -1)
        )
        slopes[place] = (high - low) / 2e-6
    return slopes


def figures_by_formula(scores, settings):
    """The figures of a step, means over the drawn tokens in float64."""
    log_p, log_q, entropy, batch = scores
    terms, is_drawn = settings.terms, np.asarray(batch.weights > 0)
    ratio = np.exp(log_ratio(log_p, batch, terms))[is_drawn]
    sign = np.sign(np.asarray(batch.rollout.advantages, np.float64)[is_drawn])
    is_clipped = {
        "plain": np.zeros_like(ratio),
        "clip": np.where(sign > 0, ratio > 1 + terms.clip_high, ratio < 1 - terms.clip_low),
        "weight": ratio > 1 + terms.clip_high,
    }[terms.surrogate]
    gap = (log_p - np.asarray(batch.rollout.log_p, np.float64))[is_drawn]
    distance = (log_p - log_q)[is_drawn]
    figures = {
        "entropy_nats": entropy[is_drawn].mean(),
        "drift_nats": (np.exp(gap) - 1 - gap).mean(),
        "sampler_gap_nats": np.abs(gap).mean(),
        "sampler_gap_high_nats": np.quantile(np.abs(gap), 0.999),
    }
    if settings.kl != "reward_k1":  # whose advantages are other ones
        figures["clipped_share"] = is_clipped.mean()
    if settings.kl != "none":
        figures["kl_nats"] = (np.exp(-distance) - 1 + distance).mean()
    return figures


class Given(PolicyLearning):
    """Learns from scores that are given in place of a model."""

    def score(self, model, batch, key):
        return model, {}


@pytest.fixture(scope="module")
def scores():
    """Rows of samples, and scores of a model and of a reference, without a model."""
    at = np.broadcast_to(np.arange(SLOTS), (ROWS, SLOTS))
    starts, stops = (np.array(each)[:, None] for each in (STARTS, STOPS))
    is_drawn = (at >= starts) & (at < stops)
    log_p, entropy = DRAW.normal(size=at.shape) * 0.4 - 2, DRAW.random(at.shape)
    log_q = log_p + DRAW.normal(size=at.shape) * 0.5
    # The first ratio is within the clip of sequences, the others are outside on both sides.
    middle = np.array([0.0, 0.4, -0.4, 0.2])[:, None]
    noise = DRAW.normal(size=at.shape) * 0.3
    noise = np.where(is_drawn, noise, 0)
    noise = noise - noise.sum(1, keepdims=True) / is_drawn.sum(1, keepdims=True) + middle
    fields = np.zeros_like(at), np.zeros_like(at), is_drawn * 1.0, np.ones_like(at), at
    columns = np.where(is_drawn, log_p + noise, 0), is_drawn * np.array(ADVANTAGES)[:, None]
    rows = Tokens(*fields)._replace(
        rollout=Rollout(*(x.astype(np.float32) for x in columns), counts=np.zeros(at.shape))
    )
    return log_p, log_q, entropy, rows


@pytest.mark.parametrize("kl", ["none", "reward_k1", "loss_k3", "loss_k3_weighted"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS])
def test_each_algorithm_is_its_formula_in_float64(scores, algorithm, kl):
    """Loss, gradient to the log-probabilities and figures, with each penalty."""
    settings = Policy(algorithm=algorithm, kl=kl, reference="runs/a", beta=0.3)
    log_p, log_q, entropy, rows = scores
    rows = weighted(rows, settings.terms.mean)
    learning = Given(settings, LossConfig())
    narrow = [jnp.asarray(each, jnp.float32) for each in (log_p, log_q, entropy)]
    teacher = None if kl == "none" else DrawnScores(narrow[1], narrow[2])

    def loss(log_p):
        part = learning.loss(DrawnScores(log_p, narrow[2]), rows, None, teacher)
        return part.objective.value, part.metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(narrow[0])
    assert float(value) == pytest.approx(
        by_formula(log_p, rows, settings, (log_q, log_p)), rel=2e-5
    )
    slopes = slopes_of(log_p, rows, settings, log_q)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=2e-6)
    assert np.abs(slopes).max() > 0.01
    expected = figures_by_formula((log_p, log_q, entropy, rows), settings)
    figures = {name: float(metrics[name].value) for name in expected}
    assert figures == pytest.approx(expected, rel=1e-3)


@functools.cache
def gradient_of(blueprint, **settings):
    def loss(params, reference, batch):
        teacher = None if reference is None else blueprint.merge(reference)
        part = objective(**settings).loss(blueprint.merge(params), batch, None, teacher)
        return part.objective.total, part

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_the_gradient_of_a_model_is_that_of_its_log_probabilities(blueprint, models, batch):
    """It is theirs, times the formula's slopes."""
    settings, batch = Policy(), weighted(batch, "sequence")
    (_, part), gradient = gradient_of(blueprint)(models[0], None, batch)
    log_p, pull = _log_p_and_vjp(blueprint, models[0], batch)
    expected = by_formula(log_p, batch, settings, (log_p, log_p))
    assert float(part.objective.value) == pytest.approx(expected, rel=2e-5)
    divided = jax.tree.map(lambda x: x / part.objective.weight, gradient)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-6),
        divided,
        pull(slopes_of(log_p, batch, settings, log_p)),
    )


def _log_p_and_vjp(blueprint, params, batch):
    log_p, vjp = jax.vjp(lambda x: scorer(blueprint)(x, batch).log_p, params)
    return np.asarray(log_p, np.float64), lambda y: vjp(jnp.asarray(y, jnp.float32))[0]


def test_log_probabilities_are_those_of_the_distribution_drawn_from(blueprint, models, batch):
    """At the temperature, over the ids that may be drawn; the entropy is of them too."""

    @jax.jit
    def forward(params):
        model = blueprint.merge(params)
        return model.logits(model.hidden(batch.tokens, positions=batch.positions).values)

    logits = forward(models[0])
    logits = np.where(ALLOWED, np.asarray(logits, np.float64), -np.inf) / TEMPERATURE
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = scorer(blueprint)(models[0], batch)
    picked = np.take_along_axis(log_p, np.asarray(batch.targets)[..., None], -1)[..., 0]
    is_drawn = np.asarray(batch.weights > 0)
    np.testing.assert_allclose(scores.log_p[is_drawn], picked[is_drawn], rtol=1e-5, atol=1e-5)
    finite = np.where(ALLOWED, log_p, 0)
    entropy = -(np.exp(log_p) * finite).sum(-1)
    np.testing.assert_allclose(scores.entropy[is_drawn], entropy[is_drawn], rtol=1e-5)


@pytest.mark.slow
def test_microbatches_and_a_chunked_loss_change_no_bit_of_the_meaning(blueprint, models, batch):
    batch = weighted(batch, "token")
    (_, whole), gradient = gradient_of(blueprint, mean="token")(models[0], None, batch)
    halves = [jax.tree.map(lambda x, n=n: x[n : n + 2], batch) for n in (0, 2)]
    parts = [gradient_of(blueprint, mean="token")(models[0], None, half) for half in halves]
    assert float(sum(p.objective.total for (_, p), _ in parts)) == pytest.approx(
        float(whole.objective.total), rel=1e-5
    )
    assert float(sum(p.objective.weight for (_, p), _ in parts)) == float(whole.objective.weight)
    summed = jax.tree.map(lambda *x: sum(x), *(grad for _, grad in parts))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), summed, gradient
    )
    figures = Mean.merged(*(part.metrics for (_, part), _ in parts))
    for name in ("entropy_nats", "sampler_gap_nats", "drift_nats", "clipped_share"):
        assert float(figures[name].value) == pytest.approx(
            float(whole.metrics[name].value), rel=1e-5
        )


def test_a_reference_adds_its_penalty_alone(blueprint, models, batch):
    """At the reference itself the penalty and its gradient are 0; elsewhere `kl_nats` is k3."""
    batch = weighted(batch, "sequence")
    function = gradient_of(blueprint, kl="reward_k1", reference="runs/a", beta=0.5)
    plain = gradient_of(blueprint)(models[0], None, batch)
    same = function(models[0], models[0], batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), same[1], plain[1]
    )
    (_, part), other = function(models[0], models[1], batch)
    log_p, log_q = (scorer(blueprint)(each, batch).log_p for each in models)
    is_drawn = np.asarray(batch.weights > 0)
    gap = np.asarray(log_q - log_p, np.float64)[is_drawn]
    assert float(part.metrics["kl_nats"].value) == pytest.approx(
        (np.exp(gap) - 1 - gap).mean(), rel=1e-4
    )
    assert any(
        np.abs(np.asarray(a) - b).max() > 1e-4
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(plain[1]), strict=True)
    )


@pytest.mark.slow
def test_rows_of_weight_0_have_no_gradient_and_no_figure(blueprint, models, batch):
    """The loss does not divide by 0: a step whose groups are all dead is not applied."""
    empty = weighted(batch, "token")
    empty = empty._replace(
        weights=0 * empty.weights, rollout=empty.rollout._replace(counts=0 * empty.weights)
    )
    (_, part), gradient = gradient_of(blueprint)(models[0], None, empty)
    assert float(part.objective.weight) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
    assert np.isnan(float(part.metrics["entropy_nats"].figure))


def test_logits_of_tokens_that_were_not_sampled_are_not_computed(blueprint, models, batch):
    """The loss, its gradient and the figures are those with the logits of all tokens."""
    rows = weighted(batch, "token")

    def result_of(chosen):
        def loss(params):
            made = chosen.loss(blueprint.merge(params), rows, None)
            return made.objective.value, {name: each.value for name, each in made.metrics.items()}

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, has_aux=True))(models[1]))

    whole, limited = objective(), dataclasses.replace(objective(), most=9)  # of 12; all samples fit
    for mine, other in zip(result_of(limited), result_of(whole), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)
    shapes = str(
        jax.make_jaxpr(lambda p: limited.score(blueprint.merge(p), batch, None)[0])(models[1])
    )
    assert f"[{ROWS},9,{VOCAB}]" in shapes
    assert f"[{ROWS},{SLOTS},{VOCAB}]" not in shapes
