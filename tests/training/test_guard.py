"""The guard alone: what it lets through, and what it remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.training import guard
from jaxlm.training.config import GuardConfig

CONFIG = GuardConfig(window=128, sigmas=6.0)


@jax.jit
def judged(state, losses, norms):
    """The verdicts of a series of steps, and the guard after them."""

    def one(state, values):
        step = state.filled + state.skipped
        _, verdict, state = guard.judge(state, *values, CONFIG, step=step)
        return state, verdict

    return jax.lax.scan(one, state, (losses, norms))


def series(count, seed=0, level=1.0, spread=0.1):
    return jnp.asarray(
        np.random.default_rng(seed).normal(level, spread * level, count), jnp.float32
    )


def test_a_steady_series_is_let_through():
    state, verdicts = judged(guard.init_guard(CONFIG), series(5000), series(5000, 1))
    # Six robust deviations of a normal distribution are met about once in 10^9 values.
    assert int(state.skipped) == int((verdicts != 0).sum()) == 0
    assert int(state.filled) == 5000


@pytest.mark.parametrize(("sigmas", "is_spike"), [(5.9, False), (6.1, True)])
def test_c5_a_spike_of_the_gradient_is_told_by_the_deviations_above_the_median(sigmas, is_spike):
    state, _ = judged(guard.init_guard(CONFIG), series(400), series(400, 1, spread=0.25))
    window = np.asarray(state.norms)
    middle = np.median(window)
    spread = 1.4826 * np.median(np.abs(window - middle))
    for is_clipped, distance in ((False, sigmas), (True, guard.CLIPPED * sigmas)):
        values = jnp.float32(1.0), middle + distance * spread
        options = {"step": 400, "is_clipped": is_clipped}
        _, verdict, after = guard.judge(state, *values, CONFIG, **options)
        assert int(verdict) == (guard.GRAD_SPIKE if is_spike else 0)
        assert bool((after.norms == state.norms).all()) == is_spike


@pytest.mark.parametrize(("loss", "norm"), [(3.0, 1.0), (1.0, 5.0), (3.0, 5.0)])
def test_spikes_that_recur_are_data_and_one_now_and_then_is_none(loss, norm):
    for every, least, most in ((50, 5, 40), (1000, 5, 5)):
        is_high = jnp.arange(5000) % every == every - 1
        levels = [jnp.where(is_high, level, 1.0) for level in (loss, norm)]
        values = [level * series(5000, seed, spread=0.03) for seed, level in enumerate(levels)]
        _, verdicts = judged(guard.init_guard(CONFIG), *values)
        skipped = np.flatnonzero(np.asarray(verdicts))
        assert is_high[skipped].all()
        assert least <= len(skipped) <= most


@pytest.mark.parametrize("level", [0.1, 5.0])
def test_values_that_hardly_differ_have_the_deviation_of_a_share_of_their_median(level):
    steady = jnp.full(400, level, jnp.float32)
    state, _ = judged(guard.init_guard(CONFIG), steady, steady)
    for sigmas, is_spike in ((5.9, False), (6.1, True)):
        norm = jnp.float32(level * (1 + sigmas * guard.MIN_SPREAD_NORM))
        loss = jnp.float32(level * (1 + sigmas * guard.MIN_SPREAD_LOSS))
        verdicts = [
            guard.judge(state, *each, CONFIG, step=400)[1]
            for each in ((level, norm), (loss, level))
        ]
        expected = [guard.GRAD_SPIKE, guard.LOSS_SPIKE] if is_spike else [0, 0]
        assert [int(each) for each in verdicts] == expected


def test_c5_a_level_that_stays_is_taken_up_within_two_windows(record_property):
    norms = jnp.concatenate([series(400), series(2 * CONFIG.window, 2, level=5.0)])
    state, verdicts = judged(guard.init_guard(CONFIG), series(len(norms), 3), norms)
    skipped = np.flatnonzero(np.asarray(verdicts))
    assert len(skipped) == guard.LEVEL_SHIFT <= CONFIG.window
    record_property("C5", f"a new level taken up after {len(skipped)} skipped")
    assert (verdicts[-CONFIG.window :] == 0).all()
    assert float(jnp.median(state.norms)) == pytest.approx(5.0, rel=0.1)


def test_a_loss_that_stays_high_is_not_taken_up():
    losses = jnp.concatenate([series(200), series(100, 2, level=9.0)])
    state, verdicts = judged(guard.init_guard(CONFIG), losses, series(300, 3))
    assert (verdicts[200:] == guard.LOSS_SPIKE).all()
    assert int(state.in_a_row) == 100


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_steps_that_are_not_finite_make_no_new_level_of_a_spike(value):
    bad = jnp.full(guard.LEVEL_SHIFT, value)
    norms = jnp.concatenate([series(400), bad, jnp.full(1, 50.0)])
    losses = series(len(norms), 3).at[400:-1].set(jnp.nan)
    state, verdicts = judged(guard.init_guard(CONFIG), losses, norms)
    assert int(verdicts[-1]) == guard.GRAD_SPIKE
    assert (int(state.filled), int(state.skipped)) == (400, guard.LEVEL_SHIFT + 1)


def test_a_loss_that_is_not_finite_among_gradient_spikes_keeps_the_windows():
    norms = jnp.concatenate([series(400), jnp.full(guard.LEVEL_SHIFT + 1, 50.0)])
    losses = series(len(norms), 3).at[-1].set(jnp.nan)
    state, verdicts = judged(guard.init_guard(CONFIG), losses, norms)
    assert int(verdicts[-1]) == guard.LOSS_NOT_FINITE + guard.GRAD_SPIKE
    assert int(state.filled) == 400


@pytest.mark.parametrize("is_empty", [False, True])
def test_steps_that_are_not_finite_or_empty_raise_no_limit_of_spikes(is_empty):
    count, config = 400, CONFIG
    state, _ = judged(guard.init_guard(config), series(count), series(count, 1))
    for step in range(count, count + 20):
        loss = jnp.float32(1.0 if is_empty else jnp.nan)
        options = {"step": step, "is_empty": is_empty}
        _, _, state = guard.judge(state, loss, jnp.float32(0), config, **options)
    _, _, state = guard.judge(state, jnp.float32(1), jnp.float32(1), config, step=count + 20)
    _, verdict, _ = guard.judge(state, jnp.float32(9), jnp.float32(1), config, step=count + 21)
    assert int(verdict) == guard.LOSS_SPIKE


def test_c4_one_nan_then_500_good_steps_skip_exactly_one(record_property):
    losses = series(600).at[99].set(jnp.nan)
    norms = series(600, 1).at[99].set(jnp.nan)
    state, verdicts = judged(guard.init_guard(CONFIG), losses, norms)
    assert np.flatnonzero(np.asarray(verdicts)).tolist() == [99]
    assert int(state.skipped) == 1
    record_property("C4", "1 of 600 skipped")
    assert np.isfinite(state.losses).all()
    assert np.isfinite(state.norms).all()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_c3_loss_and_gradient_are_told_apart(value):
    fresh, good = guard.init_guard(CONFIG), jnp.float32(1)
    bad = jnp.float32(value)
    for loss, norm, words in (
        (bad, good, "loss not finite"),
        (good, bad, "gradient not finite"),
        (bad, bad, "loss not finite, gradient not finite"),
    ):
        is_good, verdict, after = guard.judge(fresh, loss, norm, CONFIG, step=0)
        assert not is_good
        assert guard.describe_verdict(int(verdict)) == words
        assert int(after.skipped) == 1
        assert int(after.filled) == 0


def test_the_first_steps_are_no_spikes_and_a_window_of_equal_values_is_none_either():
    norms = jnp.concatenate([jnp.asarray([100.0, 1.0, 30.0]), jnp.ones(200), jnp.full(1, 1.1)])
    _, verdicts = judged(guard.init_guard(CONFIG), jnp.ones(204), norms)
    assert (verdicts == 0).all()


def test_without_sigmas_only_what_is_not_finite_is_skipped():
    config = GuardConfig(window=8, sigmas=None)
    state = guard.init_guard(config)
    for norm, is_good in ((1.0, True), (1e30, True), (jnp.nan, False)):
        is_applied, _, state = guard.judge(state, jnp.float32(1), jnp.float32(norm), config, step=0)
        assert bool(is_applied) == is_good


def test_select_leaves_no_trace_of_what_is_not_chosen():
    old, new = {"a": jnp.arange(3.0)}, {"a": jnp.asarray([jnp.nan, jnp.inf, 1.0])}
    np.testing.assert_array_equal(guard.select(jnp.bool_(False), new, old)["a"], old["a"])
    np.testing.assert_array_equal(guard.select(jnp.bool_(True), new, old)["a"], new["a"])
