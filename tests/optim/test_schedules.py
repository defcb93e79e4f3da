import math

import numpy as np
import pytest

from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError
from jaxlm.optim import schedules
from jaxlm.optim.config import Constant, Cosine, Linear


def values(config, total=2000):
    rate = schedules.build(config, lr=1e-3, total=total, tokens_per_step=768)
    return np.asarray(rate(np.arange(total + 10)))


def test_cosine_is_nanogpts_schedule():
    def get_lr(it, warmup_iters=100, lr_decay_iters=2000, learning_rate=1e-3, min_lr=1e-4):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    ours = values(Cosine(warmup=Span.parse(100), floor=0.1))
    np.testing.assert_allclose(ours, [get_lr(i) for i in range(2010)], rtol=2e-6)


def test_linear_falls_in_a_straight_line_to_its_floor_and_stays():
    ours = values(Linear(warmup=Span.parse("5%"), end=Span.parse(1100), floor=0.2))
    np.testing.assert_allclose(
        ours[[0, 100, 600, 1100, 2009]], [1e-3 / 101, 1e-3, 6e-4, 2e-4, 2e-4], rtol=1e-5
    )


def test_constant_warms_up_and_stays():
    ours = values(Constant(warmup=Span.parse(10)))
    np.testing.assert_allclose(ours[:11], 1e-3 * np.arange(1, 12) / 11, rtol=1e-6)
    assert (ours[10:] == ours[10]).all()


def test_no_warm_up_starts_at_the_peak():
    np.testing.assert_allclose(values(Cosine(warmup=Span.parse(0)))[0], 1e-3, rtol=1e-6)


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="2000 steps"):
        values(Cosine(warmup=Span.parse(2000)))


def test_a_time_is_refused():
    with pytest.raises(ConfigError, match="schedule.warmup"):
        values(Constant(warmup=Span.parse("10m")))
