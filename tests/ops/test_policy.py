"""Losses of policy gradients against float64, and estimates of a divergence by enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import policy
from jaxlm.ops.advantage import gae

DRAW = np.random.default_rng(0)
LOG_P, OLD = DRAW.normal(size=(2, 200)) * 0.4 - 1
RATIO, ADVANTAGE = np.exp(LOG_P - OLD), DRAW.normal(size=200)
LETTERS, LENGTH = 3, 3
ANSWERS = [*itertools.product(range(LETTERS), repeat=LENGTH)]


def clipped(log_p):
    ratio = np.exp(log_p - OLD)
    return -np.minimum(ratio * ADVANTAGE, np.clip(ratio, 0.8, 1.28) * ADVANTAGE)


def weighted(log_p):
    return -np.minimum(RATIO, 1.5) * ADVANTAGE * log_p


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x, r, a: policy.clipped(r, a, low=0.2, high=0.28), clipped),
        (lambda x, r, a: policy.weighted(x, r, a, high=0.5), weighted),
    ],
)
def test_each_loss_is_that_of_float64_with_its_gradient(loss, expected):
    def of(log_p):
        return loss(log_p, jnp.exp(log_p - OLD.astype(np.float32)), ADVANTAGE.astype(np.float32))

    values = LOG_P.astype(np.float32)
    np.testing.assert_allclose(of(values), expected(LOG_P), rtol=2e-5, atol=1e-6)
    slope = (expected(LOG_P + 1e-6) - expected(LOG_P - 1e-6)) / 2e-6
    gradient = jax.grad(lambda x: of(x).sum())(values)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5)


def test_tokens_without_a_gradient_are_those_counted_as_clipped():
    limits = {"low": 0.2, "high": 0.28}
    slope = (clipped(LOG_P + 1e-6) - clipped(LOG_P - 1e-6)) / 2e-6
    counted = policy.is_clipped(jnp.asarray(RATIO), jnp.asarray(ADVANTAGE), **limits)
    assert np.array_equal(counted, np.abs(slope) < 1e-8)
    assert 0 < counted.sum() < len(RATIO)


@pytest.fixture(scope="module")
def tables():
    """Logits by the two letters before: those of a policy and those of a reference."""
    shape = (LETTERS + 1, LETTERS + 1, LETTERS)
    return [jnp.asarray(DRAW.normal(size=shape), jnp.float32) for _ in range(2)]


PLACES = tuple(
    jnp.asarray([[(LETTERS, LETTERS, *a)[t + back] for t in range(LENGTH)] for a in ANSWERS])
    for back in range(3)
)  # the two letters before each letter of each answer, and the letter


@jax.jit
def log_p_of(table):
    """Log-probability of each letter of each answer."""
    return jax.nn.log_softmax(table)[PLACES]


def divergence(table, reference):
    log_p, log_q = log_p_of(table).sum(1), log_p_of(reference).sum(1)
    return (jnp.exp(log_p) * (log_p - log_q)).sum()


def expected_gradient(table, loss):
    """The mean, over all answers with their probability, of the gradient of their loss."""
    probability = jnp.exp(log_p_of(table).sum(1))[:, None]
    return jax.jit(jax.grad(lambda x: (probability * loss(log_p_of(x))).sum()))(table)


def test_a_policy_gradient_is_in_expectation_that_of_the_mean_reward(tables):
    table, rewards = tables[0], jnp.asarray(DRAW.normal(size=len(ANSWERS)), jnp.float32)
    exact = jax.grad(lambda x: -(jnp.exp(log_p_of(x).sum(1)) * rewards).sum())(table)
    old = log_p_of(table)
    each = {
        "clip": lambda x: policy.clipped(jnp.exp(x - old), rewards[:, None], low=0.2, high=0.2),
        "weight": lambda x: policy.weighted(x, jnp.exp(x - old), rewards[:, None], high=1.0),
    }
    for loss in each.values():
        np.testing.assert_allclose(expected_gradient(table, loss), exact, atol=2e-6)


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_advantages_over_values_leave_the_policy_gradient_exact(tables, lam):
    """With lam = 1 any values do; with less, those of the policy, and no other ones."""
    table, rewards = tables[0], DRAW.normal(size=len(ANSWERS))
    exact = jax.grad(
        lambda x: -(jnp.exp(log_p_of(x).sum(1)) * jnp.asarray(rewards, jnp.float32)).sum()
    )(table)
    old = log_p_of(table)
    p = np.exp(np.asarray(old, np.float64).sum(1))
    answers, last = np.array(ANSWERS), np.zeros((len(ANSWERS), LENGTH))
    last[:, -1] = rewards
    true = np.empty_like(last)  # the mean reward of the answers that begin in the same way
    for row in range(len(ANSWERS)):
        for slot in range(LENGTH):
            is_same = (answers[:, :slot] == answers[row, :slot]).all(1)
            true[row, slot] = (p * rewards)[is_same].sum() / p[is_same].sum()
    others = np.full_like(true, 2.0)
    others[:, 1:] = true[:, 1:] + answers[:, :-1] - 1  # of the letter before

    def gradient(values):
        drawn = np.ones(values.shape, bool)
        advantages = jnp.asarray(gae(last, values, drawn, gamma=1.0, lam=lam), jnp.float32)
        return expected_gradient(
            table, lambda x: policy.clipped(jnp.exp(x - old), advantages, low=0.2, high=0.2)
        )

    np.testing.assert_allclose(gradient(true), exact, atol=5e-6)
    is_exact = float(jnp.abs(gradient(others) - exact).max()) < 5e-6
    assert is_exact == (lam == 1.0)


def test_gradients_of_a_divergence_are_as_documented(tables):
    """Exact in the reward, of the reverse divergence in the loss, of each token if weighted."""
    table, reference = tables
    is_drawn = jnp.ones((len(ANSWERS), LENGTH), bool)
    log_q, old = log_p_of(reference), log_p_of(table)
    exact = jax.grad(divergence)(table, reference)

    def in_reward(x):
        return jnp.exp(x - old) * policy.k1_to_go(old, log_q, is_drawn)

    np.testing.assert_allclose(expected_gradient(table, in_reward), exact, atol=5e-6)
    # The mean of k3 is the divergence, its gradient is not.
    p = jnp.exp(old.sum(1))[:, None]
    value = (p * policy.k3(old, log_q)).sum()
    assert float(value) == pytest.approx(float(divergence(table, reference)), rel=1e-5)
    plain = expected_gradient(table, lambda x: policy.k3(x, log_q))
    assert float(jnp.abs(plain - exact).max()) > 0.01

    def of_tokens(x):  # the divergence of each letter, after beginnings of the old policy
        log_p, log_r = jax.nn.log_softmax(x), jax.nn.log_softmax(reference)
        at = (jnp.exp(log_p) * (log_p - log_r)).sum(-1)
        return (p * at[PLACES[:2]]).sum()

    weighted = expected_gradient(table, lambda x: jnp.exp(x - old) * policy.k3(x, log_q))
    np.testing.assert_allclose(weighted, jax.grad(of_tokens)(table), atol=5e-6)
