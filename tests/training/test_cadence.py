import pytest

from jaxlm.core.config import Span
from jaxlm.training.cadence import Cadence


def due(text, total, tokens_per_step=10):
    cadence = Cadence(Span.parse(text), total=total, tokens_per_step=tokens_per_step)
    return [step for step in range(1, total + 1) if cadence.is_due(step)]


def test_steps_shares_and_tokens():
    assert due(4, 10) == [4, 8, 10]
    assert due("50%", 10) == [5, 10]
    assert due("30tok", 10) == [3, 6, 9, 10]


def test_a_share_of_a_short_run_is_at_least_a_step():
    assert due("1%", 5) == [1, 2, 3, 4, 5]


def test_time_is_read_off_the_clock():
    now = [0.0]
    cadence = Cadence(Span.parse("10s"), total=100, tokens_per_step=1, clock=lambda: now[0])
    seen = []
    for step in range(1, 8):
        now[0] += 4.0
        if cadence.is_due(step):
            seen.append(step)
    assert seen == [3, 6]


def shared(pace, *, steps, seconds="10s"):
    """Steps that are due on two ranks with different clocks, and the calls of the second rank."""
    now, views, calls, due = [0.0, 1e6], [], [0], ([], [])

    def first(view):
        views.append(view)
        return view

    def second(_):
        calls[0] += 1
        return views[-1]

    ranks = [
        Cadence(Span.parse(seconds), total=10**9, tokens_per_step=1, clock=clock, share=share)
        for clock, share in ((lambda: now[0], first), (lambda: now[1], second))
    ]
    for step in range(1, steps + 1):
        now = [now[0] + pace(step), now[1] + 0.1]
        for rank, cadence in enumerate(ranks):
            if cadence.is_due(step):
                due[rank].append(step)
    return due, calls[0]


def test_the_first_ranks_clock_is_that_of_all():
    (first, second), asked = shared(lambda step: 0.1, steps=1000)
    assert first == second
    assert first == pytest.approx(list(range(100, 1000, 100)), abs=5)
    assert asked < 100, "a question at every step would be a message at every step"


def test_steps_that_get_slower_delay_it_by_a_few():
    (first, _), _ = shared(lambda step: 0.1 if step <= 50 else 1.0, steps=80)
    assert (
        first[0] <= 76
    )  # 5 s of short steps, then half of what was left, looked at as if steps stayed short


@pytest.mark.parametrize("text", ["3", "10%", "10s"])
def test_the_last_step_is_always_due(text):
    assert 7 in due(text, 7)
