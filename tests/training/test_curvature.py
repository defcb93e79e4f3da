"""Sophia with its estimates against float64: sampled targets, squared means, momentum, clipping."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import random
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.backbone import Hidden
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import sampled_label_nll, token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim.config import Sophia
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.config import GuardConfig
from jaxlm.training.step import StepSpec

IDS, ROWS, LENGTH, STEPS = 6, 4, 16, 50
GUARD = GuardConfig(sigmas=None)
KEY = jax.random.key(7)
CONFIG = Sophia(lr=0.05, every=3, gamma=0.5, clip_norm=None, weight_decay=0.1)


class Table(nnx.Module):
    """A model whose logits are a row of a table for each token."""

    config = SimpleNamespace(has_ring=False)

    def __init__(self, params):
        self.table = nnx.Param(params["table"])

    def read(self, batch, **_):
        values = jax.nn.one_hot(batch.tokens, IDS)
        return Hidden(values, None, {}, values)

    def logits(self, values):
        return values @ self.table[...]


def batch(seed):
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, IDS, (ROWS, LENGTH)).astype(np.int32)
    weights = (draw.random((ROWS, LENGTH)) < 0.8).astype(np.float32)
    segments = np.ones_like(tokens)
    return Tokens(tokens, (tokens * 5 + 1) % IDS, weights, segments, segments)


def pieces(microbatches=1, chunk=None, drawn=sampled_label_nll):
    axes = {"table": ("vocab", "embed")}
    optimizer = optimizers.build(CONFIG, lambda _: jnp.float32(CONFIG.lr), axes)
    config = LossConfig(chunk=chunk)
    step = steps.build_step(
        StepSpec(
            loss=lambda params, batch, key: token_nll(Table(params), batch, None, config),
            optimizer=optimizer,
            schedule=lambda _: jnp.float32(CONFIG.lr),
            key=KEY,
            precision=Precision.float32(),
            guard=GUARD,
            microbatches=microbatches,
            curvature=steps.Curvature(
                lambda params, batch, key: drawn(Table(params), batch, config), CONFIG.every
            ),
        )
    )
    return jax.jit(step), states.init_state({"table": start()}, optimizer, GUARD)


def trained(microbatches, chunk=None):
    step, state = pieces(microbatches, chunk)
    for number in range(STEPS):
        state, _ = step(state, batch(number))
    return np.asarray(state.params["table"])


def start():
    return jnp.asarray(np.random.default_rng(9).normal(size=(IDS, IDS)), jnp.float32)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gumbel(seeds):
    """Return -log(-log(1 - u)) for each seed and id, u being a hash of both over 2^32."""

    def mix(x):
        x = x ^ (x >> 16)
        x = x * 0x21F0AAAD % 2**32
        x = x ^ (x >> 15)
        x = x * 0xD35A2D97 % 2**32
        return x ^ (x >> 15)

    bits = mix(mix(seeds.astype(np.uint64))[..., None] ^ np.arange(IDS, dtype=np.uint64))
    return -np.log(-np.log1p(-(bits + 0.5) / 2**32))


def reference():
    table = np.asarray(start(), np.float64)
    m = h = np.zeros_like(table)
    for number in range(STEPS):
        rows = batch(number)
        shares, weights = softmax(table[rows.tokens]), rows.weights.astype(np.float64)

        def mean(targets, rows=rows, shares=shares, weights=weights):
            out = (shares - np.eye(IDS)[targets]) * weights[..., None]
            grad = np.zeros((IDS, IDS))
            np.add.at(grad, rows.tokens, out)
            return grad / weights.sum()

        m = CONFIG.b1 * m + (1 - CONFIG.b1) * mean(rows.targets)
        if number % CONFIG.every == 0:
            key = random.stream(jax.random.fold_in(KEY, number), "curvature")
            seeds = np.asarray(jax.random.bits(key, (ROWS, LENGTH)) >> 1)
            drawn = (np.log(shares) + gumbel(seeds)).argmax(-1)
            h = CONFIG.b2 * h + (1 - CONFIG.b2) * weights.sum() * mean(drawn) ** 2
        u = np.clip(m / np.maximum(CONFIG.gamma * h, CONFIG.eps), -1, 1)
        table = table - CONFIG.lr * (u + CONFIG.weight_decay * table)
    return table


@pytest.mark.few(1)
@pytest.mark.parametrize(("microbatches", "chunk"), [(1, None), (4, 10)])
def test_fifty_steps_are_those_of_float64_however_the_batch_is_cut(microbatches, chunk):
    np.testing.assert_allclose(trained(microbatches, chunk), reference(), rtol=1e-3, atol=1e-4)


def test_the_expected_estimate_is_the_diagonal_of_gauss_and_newton():
    """For logits themselves that is p (1 - p)."""
    logits = jnp.asarray([1.0, 0.0, -1.0, 0.5, 0.0, -2.0])
    zeros = np.zeros((2, 8), np.int32)
    params = {"table": jnp.tile(logits, (IDS, 1))}

    @jax.jit
    def estimate(key):
        draws = (jax.random.bits(key, zeros.shape) >> 1).astype(jnp.int32)
        rows = Tokens(zeros, draws, np.ones(zeros.shape, np.float32), zeros, zeros)
        grad = jax.grad(
            lambda params: sampled_label_nll(Table(params), rows, LossConfig()).objective.value
        )(params)
        return zeros.size * jnp.square(grad["table"][0])

    estimates = np.asarray(jax.lax.map(estimate, jax.random.split(jax.random.key(0), 8000)))
    p = softmax(np.asarray(logits, np.float64))
    error = estimates.std(0) / np.sqrt(len(estimates))
    assert (np.abs(estimates.mean(0) - p * (1 - p)) < 5 * error).all()
    assert (error < 0.05 * p * (1 - p)).all()


def test_an_estimate_that_is_not_finite_leaves_no_trace():
    """At the fourth update, where the second is due."""

    def drawn(model, batch, config):
        loss = sampled_label_nll(model, batch, config)
        broken = jnp.where(batch.tokens[0, 0] == IDS - 1, jnp.inf, 1.0)
        return loss._replace(objective=loss.objective._replace(total=loss.objective.total * broken))

    step, state = pieces(drawn=drawn)
    first = batch(0)
    good = first._replace(tokens=np.where(first.tokens == IDS - 1, 0, first.tokens))
    bad = good._replace(tokens=np.full_like(good.tokens, IDS - 1))
    for _ in range(3):
        state, metrics = step(state, good)
        assert not metrics["verdict"]
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, bad)
    assert metrics["verdict"] > 0
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    state, metrics = step(state, good)
    assert not metrics["verdict"]
