import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops.cross_entropy import in_chunks, token_scores
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig

RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=(2, 5, 37)) * 8).astype(np.float32)
TARGETS = RNG.integers(0, 37, (2, 5)).astype(np.int32)


def reference(logits, targets):
    wide = logits.astype(np.float64)
    normalizer = np.log(np.exp(wide).sum(-1))
    return normalizer - np.take_along_axis(wide, targets[..., None], -1)[..., 0], normalizer


def test_scores_are_those_of_float64():
    scores = token_scores(LOGITS, TARGETS)
    nll, normalizer = reference(LOGITS, TARGETS)
    np.testing.assert_allclose(scores.nll, nll, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(scores.log_normalizer, normalizer, rtol=1e-6)
    np.testing.assert_allclose(scores.confidence, np.exp(LOGITS.max(-1) - normalizer), rtol=2e-6)
    np.testing.assert_array_equal(scores.correct, LOGITS.argmax(-1) == TARGETS)


def test_a_sure_token_keeps_its_small_loss_under_a_large_offset():
    logits = np.full((1, 3), 1000, np.float32)
    logits[0, 0] += 12
    np.testing.assert_allclose(
        token_scores(logits, np.zeros(1, np.int32)).nll, np.log1p(2 * np.exp(-12.0)), atol=2e-7
    )


def test_the_gradient_is_softmax_minus_onehot_and_that_of_the_z_loss():
    weights = RNG.random((2, 5)).astype(np.float32)

    def loss(logits):
        scores = token_scores(logits, TARGETS)
        return (weights * (scores.nll + 0.01 * scores.log_normalizer**2)).sum()

    _, normalizer = reference(LOGITS, TARGETS)
    softmax = np.exp(LOGITS.astype(np.float64) - normalizer[..., None])
    expected = softmax * (1 + 0.02 * normalizer[..., None]) - np.eye(37)[TARGETS]
    np.testing.assert_allclose(jax.grad(loss)(LOGITS), weights[..., None] * expected, atol=2e-6)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothed_labels_are_those_of_float64_in_value_and_gradient(smoothing):
    weights = RNG.random((2, 5)).astype(np.float32)
    nll, normalizer = reference(LOGITS, TARGETS)
    every = normalizer - LOGITS.astype(np.float64).mean(-1)
    scores = token_scores(LOGITS, TARGETS, smoothing)
    expected = (1 - smoothing) * nll + smoothing * every
    np.testing.assert_allclose(scores.smoothed, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(scores.nll, token_scores(LOGITS, TARGETS).nll)

    def loss(logits):
        scores = token_scores(logits, TARGETS, smoothing)
        return (weights * (scores.smoothed + 0.01 * scores.log_normalizer**2)).sum()

    softmax = np.exp(LOGITS.astype(np.float64) - normalizer[..., None])
    labels = (1 - smoothing) * np.eye(37)[TARGETS] + smoothing / 37
    expected = softmax * (1 + 0.02 * normalizer[..., None]) - labels
    np.testing.assert_allclose(jax.grad(loss)(LOGITS), weights[..., None] * expected, atol=2e-6)


def test_labels_that_are_not_smoothed_cost_nothing():
    assert token_scores(LOGITS, TARGETS).smoothed is None

    def program(*smoothing):
        def loss(logits):
            return token_scores(logits, TARGETS, *smoothing).nll.sum()

        return jax.jit(jax.grad(loss)).lower(LOGITS).as_text()

    assert program() == program(0.0)
    assert "reduce" in program()


@pytest.mark.few(3)
@pytest.mark.parametrize("tokens", [None, 1, 3, 4, 6, 1000])
def test_chunks_give_the_loss_and_gradients_of_float64(tokens):
    """To 1e-6 of the loss, and of the largest gradient."""
    hidden = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    table = RNG.normal(size=(8, 37)).astype(np.float32)
    weights = np.arange(10.0, dtype=np.float32).reshape(2, 5)

    def loss(hidden, table):
        scores = in_chunks(
            lambda h, t: token_scores(jnp.einsum("btd,dv->btv", h, table), t, 0.1),
            hidden,
            TARGETS,
            tokens=tokens,
        )
        assert scores.nll.shape == (2, 5)
        return ((scores.nll + scores.smoothed) * weights).sum()

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, table)
    h, w = hidden.astype(np.float64), table.astype(np.float64)
    logits = h @ w
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = 1.9 * np.eye(37)[TARGETS] + 0.1 / 37
    assert float(value) == pytest.approx(-(labels * log_p * weights[..., None]).sum(), rel=1e-6)
    slopes = weights[..., None] * (2 * np.exp(log_p) - labels)
    for ours, expected in zip(
        grads, (slopes @ w.T, np.einsum("btd,btv->dv", h, slopes)), strict=True
    ):
        assert np.abs(ours - expected).max() <= 1e-6 * np.abs(expected).max()


def test_chunks_keep_less_in_memory_than_the_whole():
    table = jnp.zeros((8, 5000))

    def temporary(tokens, length=64):
        hidden, targets = jnp.zeros((4, length, 8)), jnp.zeros((4, length), jnp.int32)

        def loss(table):
            return in_chunks(
                lambda h, t: token_scores(h @ table, t), hidden, targets, tokens=tokens
            ).nll.sum()

        return jax.jit(jax.grad(loss)).lower(table).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16) < temporary(None) / 4
    assert temporary(16, 256) < 1.1 * temporary(16), "memory grows with the tokens"


@pytest.mark.parametrize(
    ("sizes", "parts"), [({}, 16), ({"data": 2}, 8), ({"fsdp": 2, "context": 2}, 4)]
)
def test_a_chunk_has_as_many_tokens_of_each_device_on_every_mesh(sizes, parts):
    """16 of the 256 tokens: parts of a loss cost a gathered matrix each, so devices add none."""
    hidden, targets = jnp.zeros((4, 64, 8)), jnp.zeros((4, 64), jnp.int32)
    lengths = []

    def function(hidden, targets):
        lengths.append(targets.shape[1])
        return hidden.sum(-1)

    sizes = {"data": 1, "fsdp": 1} | sizes
    grid = mesh.build(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(grid):
        jax.eval_shape(lambda: in_chunks(function, hidden, targets, tokens=16))
    assert 64 // lengths[0] == parts
