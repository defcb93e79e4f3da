import pytest

from jaxlm.core.config import Span
from jaxlm.train.cadence import Cadence


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


@pytest.mark.parametrize("text", ["3", "10%", "10s"])
def test_the_last_step_is_always_due(text):
    assert 7 in due(text, 7)
