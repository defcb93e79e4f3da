"""Averages of the parameters against float64, and what a step that is not applied does to them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.core.span import Span
from jaxlm.data.batch import Tokens
from jaxlm.objectives.loss import Loss
from jaxlm.optim import average, schedules
from jaxlm.optim.average_config import Ema, NoAverage, Swa, first_averaged_update, problems
from jaxlm.optim.schedule_config import Constant
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.config import GuardConfig
from jaxlm.training.step import StepSpec

LENGTH = {"total": 40, "tokens_per_step": 10}


def course(count=40):
    """Parameters after each update, the first before any."""
    return np.cumsum(np.random.default_rng(0).normal(size=(count + 1, 3)), 0)


def ema(points, begin, decay):
    out = points[0]
    for t, p in enumerate(points[1:], 1):
        n = t - begin
        factor = min(decay, (1 + n) / (10 + n))
        out = p if n < 1 else factor * out + (1 - factor) * p
    return out


def swa(points, begin, every):
    return points[begin + every :: every].mean(0)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Ema(decay=0.9), lambda points: ema(points, 0, 0.9)),
        (Ema(decay=0.5, begin=Span.parse("100tok")), lambda points: ema(points, 10, 0.5)),
        (Swa(begin=Span.parse(8), every=Span.parse(4)), lambda points: swa(points, 8, 4)),
        (Swa(begin=Span.parse("50%"), every=Span.parse(1)), lambda points: swa(points, 20, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_average_is_that_of_a_float64_reference(config, expected, dtype):
    points = np.asarray(jnp.asarray(course(), dtype), np.float64)
    update = jax.jit(average.build(config, **LENGTH))
    averages = average.init({"w": jnp.asarray(points[0], dtype)})
    for number, point in enumerate(points[1:], 1):
        averages = update(averages, {"w": jnp.asarray(point, dtype)}, jnp.int32(number))
        if number == first_averaged_update(config, **LENGTH) - 1:
            np.testing.assert_array_equal(averages["w"], point), "until then it is the parameters"
    assert averages["w"].dtype == jnp.float32
    np.testing.assert_allclose(averages["w"], expected(points), rtol=2e-6, atol=1e-6)


def test_the_learning_rate_of_swa_is_its_own_from_its_beginning():
    config = Swa(begin=Span.parse(10), every=Span.parse(5), high=0.4, low=0.2)
    inner = Constant(warmup=Span.parse(4))
    rate = schedules.build(inner, lr=2.0, average=config, **LENGTH)
    plain = schedules.build(inner, lr=2.0, **LENGTH)
    rates = [float(rate(t)) for t in range(25)]
    assert rates[:10] == [float(plain(t)) for t in range(10)]
    np.testing.assert_allclose(rates[10:], [0.8, 0.7, 0.6, 0.5, 0.4] * 3, rtol=1e-6)
    keeps = schedules.build(inner, lr=2.0, average=Swa(high=None), **LENGTH)
    assert [float(keeps(t)) for t in range(40)] == [float(plain(t)) for t in range(40)]


def test_a_step_that_is_not_applied_leaves_the_average_as_it_was():
    """And counts for no cycle: the fifth batch is not finite."""

    def loss(params, batch, key):
        value = Mean(jnp.sum(jnp.square(params["w"] - batch.targets)), jnp.ones(()))
        return Loss(value, {"loss_nats": value})

    config, guard = Swa(begin=Span.parse(2), every=Span.parse(3), high=None), GuardConfig(window=8)
    optimizer = optax.sgd(0.1)
    step = jax.jit(
        steps.build_step(
            StepSpec(
                loss=loss,
                optimizer=optimizer,
                schedule=lambda _: jnp.float32(0.1),
                key=jax.random.key(0),
                precision=Precision.float32(),
                guard=guard,
                average=average.build(config, **LENGTH),
            )
        )
    )
    params = {"w": jnp.zeros(3)}
    state = states.init_state(params, optimizer, guard, average.init(params))
    points, before = [], None
    for number, target in enumerate(course(12)[1:]):
        before = np.asarray(state.average["w"]).tobytes()
        target = np.full(3, np.nan) if number == 4 else target
        ones = jnp.ones(3)
        state, metrics = step(
            state, Tokens(ones, jnp.asarray(target, jnp.float32), ones, ones, ones)
        )
        if number == 4:
            assert metrics["verdict"] > 0
            assert np.asarray(state.average["w"]).tobytes() == before
        else:
            points.append(np.asarray(state.params["w"], np.float64))
    assert len(points) == 11
    np.testing.assert_allclose(
        state.average["w"], np.mean([points[4], points[7], points[10]], 0), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (NoAverage(), None),
        (Ema(), None),
        (Swa(), None),
        (Ema(begin=Span.parse("10m")), "begin"),
        (Swa(every=Span.parse("30s")), "every"),
        (Ema(begin=Span.parse("100%")), "begin"),
        (Swa(begin=Span.parse("95%"), every=Span.parse("10%")), "begin"),
    ],
)
def test_what_averages_nothing_is_refused(config, field):
    assert next((name for name, *_ in problems(config, **LENGTH)), None) == field
