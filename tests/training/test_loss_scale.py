"""The loss scale of float16: how it moves, what it saves, and that it changes nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data.batch import Tokens
from jaxlm.nn.config import MoeConfig
from jaxlm.nn.moe import Moe
from jaxlm.objectives.loss import Loss
from jaxlm.ops.matmul import matmul
from jaxlm.training import gradient as gradients
from jaxlm.training import guard
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.config import GuardConfig
from jaxlm.training.gradient import GradientSpec
from jaxlm.training.step import StepSpec
from tests.nn import reference

CONFIG = GuardConfig(window=16, sigmas=6.0, loss_scale=8.0, loss_scale_growth=3)
FLOAT16 = Precision.of(PrecisionConfig(compute="float16"))
ROWS, LENGTH, WIDTH = 4, 8, 16


def judged(losses, norms, config=CONFIG):
    """Verdict of each step, and the guard after it."""
    state, results = guard.init_guard(config), []
    for loss, norm in zip(losses, norms, strict=True):
        _, verdict, state = guard.judge(
            state, jnp.float32(loss), jnp.float32(norm), config, step=0, is_scaled=True
        )
        results.append((int(verdict), state))
    return results


def test_an_overflow_halves_the_scale_and_is_counted_apart():
    results = judged([1.0] * 4, [1.0, np.inf, np.nan, 1.0])
    assert [verdict for verdict, _ in results] == [0, guard.OVERFLOW, guard.OVERFLOW, 0]
    assert [float(state.scale.factor) for _, state in results] == [8.0, 4.0, 2.0, 2.0]
    last = results[-1][1]
    assert (int(last.scale.overflows), int(last.skipped), int(last.in_a_row)) == (2, 0, 0)
    assert int(last.filled) == 2, "an overflow leaves no value in the windows"


def test_it_doubles_after_so_many_steps_without_one_and_an_overflow_counts_anew():
    norms = [1.0, 1.0, np.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    factors = [float(state.scale.factor) for _, state in judged([1.0] * len(norms), norms)]
    assert factors == [8, 8, 4, 4, 4, 8, 8, 8, 16]


@pytest.mark.slow
def test_it_never_grows_past_what_float32_holds_well():
    config = GuardConfig(window=16, sigmas=None, loss_scale=2.0**24, loss_scale_growth=1)
    assert float(judged([1.0], [1.0], config)[-1][1].scale.factor) == 2.0**24


@pytest.mark.slow
def test_at_a_scale_of_one_the_gradient_itself_is_bad():
    results = judged([1.0] * 5, [np.inf] * 5)
    assert [verdict for verdict, _ in results] == [guard.OVERFLOW] * 3 + [guard.GRAD_NOT_FINITE] * 2
    last = results[-1][1]
    assert (float(last.scale.factor), int(last.scale.overflows), int(last.skipped)) == (1.0, 3, 2)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    ((verdict, state),) = judged([np.nan], [np.nan])
    assert verdict == guard.LOSS_NOT_FINITE + guard.GRAD_NOT_FINITE
    assert (float(state.scale.factor), int(state.scale.overflows), int(state.skipped)) == (8, 0, 1)


def weighed(size, precision):
    """Return a loss whose gradient with respect to each activation is about `size`."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
    target = jnp.asarray(draw.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)

    def loss(params, batch, key):
        rows, expected = x[batch.tokens[:, 0]], target[batch.tokens[:, 0]]
        hidden = matmul(rows, params["first"], precision)
        total = size * jnp.sum(matmul(hidden, params["second"], precision) * expected)
        mean = Mean.of(total, batch.weights.sum())
        return Loss(Mean(total, batch.weights.sum()), {"loss_nats": mean})

    return loss


def tokens():
    """Rows that name themselves."""
    ids = np.repeat(np.arange(ROWS, dtype=np.int32)[:, None], LENGTH, axis=1)
    ones = np.ones((ROWS, LENGTH), np.float32)
    return Tokens(ids, ids, ones, np.ones_like(ids), ids)


def updated(size, precision, *, microbatches=1, scale=2.0**15):
    """Change of the parameters in one SGD step with a rate of 1 / size, and its metrics."""
    config = GuardConfig(window=16, loss_scale=scale)
    draw = np.random.default_rng(1)
    params = {
        name: jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32)
        for name in ("first", "second")
    }
    optimizer = optax.sgd(1.0 / size)
    step = steps.build_step(
        StepSpec(
            loss=weighed(size, precision),
            optimizer=optimizer,
            schedule=lambda count: 1.0,
            key=jax.random.key(0),
            precision=precision,
            guard=config,
            microbatches=microbatches,
        )
    )
    state, metrics = jax.jit(step)(states.init_state(params, optimizer, config), tokens())
    change = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, state.params, params)
    return change, metrics


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_that_float16_cannot_hold_arrive(microbatches):
    size = 2.0**-26  # of each token; half of the smallest number in float16
    exact, _ = updated(size, Precision.float32())
    lost = jax.grad(lambda p: weighed(size, FLOAT16)(p, tokens(), None).objective.total)(
        {"first": jnp.eye(WIDTH) / 64, "second": jnp.eye(WIDTH) / 64}
    )
    assert not np.any(lost["first"]), "without a scale nothing arrives"
    changes, metrics = updated(size, FLOAT16, microbatches=microbatches, scale=2.0**22)
    assert int(metrics["verdict"]) == 0
    for name, change in exact.items():
        # Relative to the largest: operands keep eleven bits.
        error = np.abs(changes[name] - change).max() / np.abs(change).max()
        assert error < 2e-3, (name, error)


@pytest.mark.slow
def test_a_scale_that_is_too_large_leaves_the_parameters_and_the_learning_rate_where_they_were():
    change, metrics = updated(64.0, FLOAT16, scale=2.0**24)
    assert not any(np.any(leaf) for leaf in change.values())
    assert int(metrics["verdict"]) == guard.OVERFLOW
    assert float(metrics["tokens"]) == 0
    assert (float(metrics["loss_scale"]), int(metrics["overflows_total"])) == (2.0**23, 1)
    assert int(metrics["skipped_total"]) == 0


def test_other_dtypes_have_none():
    change, metrics = updated(1.0, Precision.float32())
    assert {"loss_scale", "overflows_total"}.isdisjoint(metrics)
    unscaled, _ = updated(1.0, Precision.float32(), scale=1.0)
    for name, leaf in change.items():
        np.testing.assert_array_equal(unscaled[name], leaf)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_bias_of_a_nearly_even_expert_still_moves_in_float16(microbatches):
    """Its gradient is 2^-30 times a difference of counts, here few tokens, at the lowest scale."""
    config = MoeConfig(experts=4, top_k=2, hidden=8, bias_rate=0.01)
    precision = Precision.of(PrecisionConfig(reduce="float16"))
    moe, _ = reference.moved(
        lambda key, init: Moe(WIDTH, config, key=key, init=init), precision=precision
    )
    graph, state = nnx.split(moe)
    params = nnx.to_pure_dict(state)
    axes = tree.map_with_path(
        lambda path, x: ("balance",) if path == "bias" else (None,) * x.ndim, params
    )
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))

    def loss(params, batch, key):
        state_now = nnx.merge_state(state)
        nnx.replace_by_pure_dict(state_now, params)
        _, means = nnx.merge(graph, state_now)(x[batch.tokens[:, 0]], batch.weights)
        return Loss(means["moe_loss"], {})

    def signs(axes, precision):
        build = gradients.build_gradient(
            GradientSpec(loss=loss, precision=precision, axes=axes, microbatches=microbatches)
        )
        grads, *_ = build(params, tokens(), jax.random.key(0), jnp.float32(1.0))
        return np.sign(np.asarray(grads["bias"], np.float64))

    expected = signs(axes, Precision.float32())
    assert np.any(expected)
    np.testing.assert_array_equal(signs(axes, precision), expected)
    assert not np.any(signs(None, precision)), "in float16 itself it would vanish"
