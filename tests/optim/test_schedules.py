import math
import typing

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError
from jaxlm.optim import schedules
from jaxlm.optim.schedule_config import (
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    LinearDecay,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Wsd,
    cycle_starts,
)
from jaxlm.recipes.config import Run

TOTAL, TOKENS = 2000, 768
LR = 1e-3
W, E = 100, 1900  # warm-up and end of every case


def values(config, total=TOTAL):
    rate = schedules.build(config, lr=LR, total=total, tokens_per_step=TOKENS)
    return np.asarray(rate(np.arange(total + 10)))


def span(text):
    return Span.parse(text)


def of(arm, **settings):
    """The arm with its parts at W and E, in steps, shares and tokens."""
    end = {"end": span("95%")} if hasattr(arm(), "end") else {}
    return arm(warmup=span(f"{W * TOKENS}tok"), **end, **settings)


def share(t):
    return min(max((t - W) / (E - W), 0), 1)


def half(s):
    return (1 + math.cos(math.pi * s)) / 2


def restarts(t, lengths=(257, 514, 1029), floor=0.1):
    """Cycles of 1 : 2 : 4 in 1800 steps, at whole steps."""
    t -= W
    for length in lengths:
        if t < length:
            return floor + (1 - floor) * half(t / length)
        t -= length
    return floor


# The factor on the peak after the warm-up, by the step, in float64.
CASES = {
    "constant": (of(Constant), lambda t: 1.0),
    "linear": (of(LinearDecay, floor=0.2), lambda t: 1 - 0.8 * share(t)),
    "cosine": (of(Cosine, floor=0.1), lambda t: 0.1 + 0.9 * half(share(t))),
    "cosine, 3 cycles": (
        of(Cosine, floor=0.0, cycles=3),
        lambda t: half((t - W) % 600 / 600) if t < E else 0.0,
    ),
    "cosine, longer cycles": (of(Cosine, cycles=3, growth=2.0), restarts),
    "polynomial": (
        of(Polynomial, floor=0.05, power=3.0),
        lambda t: 0.05 + 0.95 * (1 - share(t)) ** 3,
    ),
    "exponential": (of(Exponential, floor=0.02), lambda t: math.exp(math.log(0.02) * share(t))),
    "inverse_sqrt": (of(InverseSqrt), lambda t: math.sqrt((W + 1) / (t + 1))),
    "step": (
        of(Step, every=span(400), factor=0.5),
        lambda t: 0.5 ** sum(t >= W + 400 * k for k in range(1, 6)),
    ),
    "one_cycle": (of(OneCycle, floor=0.01), lambda t: 0.01 + 0.99 * half(share(t))),
    "wsd": (
        of(Wsd, decay=span("20%"), floor=0.1),
        lambda t: 1 - 0.9 * math.sqrt(min(max((t - 1500) / 400, 0), 1)),
    ),
    "wsd, linear": (
        of(Wsd, decay=span(400), shape="linear"),
        lambda t: 1 - min(max((t - 1500) / 400, 0), 1),
    ),
}


def reference(name):
    config, after = CASES[name]

    def factor(t):
        if t >= W:
            return after(t)
        if isinstance(config, OneCycle):
            return 1 - (1 - config.start) * half(t / W)
        return (t + 1) / (W + 1)

    return LR * np.array([factor(t) for t in range(TOTAL + 10)])


def test_every_schedule_has_its_case():
    assert {type(config) for config, _ in CASES.values()} == set(typing.get_args(Schedule))


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_its_closed_form_at_every_step(name):
    np.testing.assert_allclose(values(CASES[name][0]), reference(name), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("every", [41, 47, 55, 61, 107, 400])
def test_cuts_are_at_their_steps_in_a_compiled_program(every):
    """XLA divides by a constant with its reciprocal, and 61 * (1 / 61) is below 1."""
    config = Step(warmup=span(0), every=span(every), factor=0.5)
    schedule = schedules.build(config, lr=1.0, total=8 * every, tokens_per_step=1)
    compiled = jax.jit(schedule)
    for cut in range(1, 8):
        around = [float(compiled(cut * every + more)) for more in (-1, 0)]
        assert around == [0.5 ** (cut - 1), 0.5**cut]


@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_schedule_meet(name):
    """No two steps differ by more than a slope allows, but where a cut or a restart is meant."""
    config, _ = CASES[name]
    seen = values(config) / LR
    assert seen[W] == pytest.approx(1, rel=1e-5), "the warm-up ends at the peak"
    assert seen.max() <= 1 + 1e-6
    jumps = np.flatnonzero(np.abs(np.diff(seen)) > 0.06) + 1
    meant = {
        "step": [500],  # the later ones are smaller
        "cosine, 3 cycles": [700, 1300],
        "cosine, longer cycles": [357, 871],
    }.get(name, [])
    if name == "step":
        jumps = jumps[:1]
    assert jumps.tolist() == meant


def test_the_default_of_every_schedule_takes_any_number_of_steps():
    for arm in typing.get_args(Schedule):
        for total in (1, 2, 3, 5, 20):
            seen = values(arm(), total)
            assert np.isfinite(seen).all()
            assert 0 <= seen.min() <= seen.max() <= LR * 1.000001


def test_no_warm_up_starts_at_the_peak():
    for arm in set(typing.get_args(Schedule)) - {InverseSqrt}:
        assert values(arm(warmup=span(0)))[0] == pytest.approx(LR, rel=1e-6), arm


def test_cycles_begin_at_whole_steps_and_grow():
    assert cycle_starts(Cosine(cycles=4), 10) == [0, 3, 5, 8, 10]
    assert cycle_starts(Cosine(cycles=3, growth=2.0), 700) == [0, 100, 300, 700]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "cosine", "warmup": "200"}, "200 steps, but the schedule ends at step 200"),
        ({"name": "linear", "warmup": "5%", "end": "8"}, "ends at step 8"),
        ({"name": "linear", "end": "120%"}, "more than the whole run"),
        ({"name": "cosine", "warmup": "100", "cycles": "101"}, "101 cycles in 100 steps"),
        ({"name": "cosine", "cycles": "9", "growth": "3"}, "9 cycles in"),
        ({"name": "wsd", "warmup": "50", "decay": "160"}, "do not fit before step 200"),
        ({"name": "wsd", "decay": "0"}, "at least one step"),
        ({"name": "step", "every": "0"}, "at least a step apart"),
        ({"name": "step", "every": "300"}, "the run ends at 200"),
        ({"name": "step", "warmup": "90%", "every": "30%"}, "the run ends at 200"),
        ({"name": "linear", "end": "4"}, "ends at step 4"),
        ({"name": "linear", "warmup": "1", "end": "1"}, "ends at step 1"),
        ({"name": "constant", "warmup": "200"}, "200 steps, but the run has 200"),
        ({"name": "inverse_sqrt", "warmup": "5000"}, "5000 steps, but the run has 200"),
        ({"name": "inverse_sqrt", "warmup": "0"}, "without one"),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_schedule_that_cannot_be_meant_is_refused_with_a_fix_that_works(settings, reason):
    pairs = [("train.steps", "200")]
    pairs += [(f"schedule.{name}", value) for name, value in settings.items()]
    with pytest.raises(ConfigError) as caught:
        config.load(Run, None, pairs)
    assert reason in caught.value.why
    if caught.value.fix.startswith("jaxlm "):
        assert main(caught.value.fix.split()[1:]) == 0
        return
    path, _, value = caught.value.fix.removeprefix("--config.").partition("=")
    others = [pair for pair in pairs if pair[0] != path]
    config.load(Run, None, [*others, (path, value)])


def test_a_schedule_in_time_gets_no_other_schedule():
    with pytest.raises(ConfigError, match="does not fit") as caught:
        config.load(Run, None, [("schedule.warmup", "10m")])
    assert "is a time" in caught.value.why
    assert caught.value.fix == "jaxlm config explain schedule.warmup"


def test_an_end_beyond_the_run_is_allowed_where_it_is_said_in_steps():
    first = config.load(Run, None, [("train.steps", "200"), ("schedule.end", "1000")]).value
    rate = schedules.build(first.schedule, lr=LR, total=200, tokens_per_step=TOKENS)
    assert rate(200) > 0.9 * LR


def test_a_schedule_that_does_not_fit_is_refused_by_what_builds_it_too():
    with pytest.raises(ConfigError, match="2000 steps, but the schedule ends") as caught:
        values(Cosine(warmup=span(2000)))
    assert caught.value.fix.startswith("--config.schedule.warmup=")
    values(Cosine(warmup=span(caught.value.fix.partition("=")[2])))
    with pytest.raises(ConfigError, match="schedule.warmup") as caught:
        values(Constant(warmup=span("10m")))
    jaxlm, *words = caught.value.fix.split()
    assert (jaxlm, main(words)) == ("jaxlm", 0)
