"""The balance of guesses: it loses little time if they do not pay, and keeps what they gain."""

import random

import pytest

from jaxlm.generate.balance import CallTimes, DraftBalance

SECONDS, ROWS, NOISE = 0.03, 4, 0.2
CALL = 2 * SECONDS  # of a call of the device, apart from its passes


def balance_of(ratio):
    return DraftBalance(CallTimes(CALL, SECONDS), CallTimes(CALL, SECONDS * ratio))


def speed(balance, passes, tokens, ratio, *, call, seed):
    """Return the speed over that without guesses.

    Args:
      balance: chooses the calls.
      passes: passes that the texts take without guesses.
      tokens: mean tokens of a row in a pass with guesses.
      ratio: time of such a pass over that of one without.
      call: most passes of a call.
      seed: of the noise.
    """
    draw, seconds, left = random.Random(seed), 0.0, passes * ROWS
    plain = passes * (SECONDS + CALL / call)

    shares = [(tokens - 1) / 4] * 4

    def timed(count, mean):
        return CALL + sum(mean * draw.lognormvariate(-(NOISE**2) / 2, NOISE) for _ in range(count))

    while left > 0:
        chosen = balance.next_call(min(call, max(1, left // ROWS)))
        rows = chosen.passes * ROWS
        if chosen.is_guessed:
            drawn = rows + sum(draw.random() < stands for _ in range(rows) for stands in shares)
            took = timed(chosen.passes, SECONDS * ratio)
            balance.add_guessed(took, passes=chosen.passes, row_passes=rows, tokens=drawn)
        else:
            drawn, took = rows, timed(chosen.passes, SECONDS)
            balance.add_plain(took, passes=chosen.passes)
        seconds, left = seconds + took, left - drawn
    return (passes * ROWS - left) / (passes * ROWS) * plain / seconds


def speeds(passes, tokens, ratio, call, measured=None):
    """Return the speeds of five texts in order, each with another balance.

    Args:
      passes, tokens, ratio, call: as in `speed`.
      measured: the ratio that the start has measured; by default the right one.
    """
    return sorted(
        speed(balance_of(measured or ratio), passes, tokens, ratio, call=call, seed=seed)
        for seed in range(5)
    )


@pytest.mark.parametrize("call", [1, 32])
@pytest.mark.parametrize(("tokens", "ratio"), [(1, 1.3), (1, 2.1), (1.5, 1.7), (1.8, 2.1)])
def test_guesses_that_do_not_pay_lose_less_than_two_percent(tokens, ratio, call):
    assert speeds(1000, tokens, ratio, call)[2] > 0.98
    # The ratio that the start measured was wrong.
    assert speeds(1000, tokens, ratio, call, measured=ratio / 1.5)[2] > 0.96


@pytest.mark.parametrize("call", [1, 32])
@pytest.mark.parametrize(("tokens", "ratio"), [(1.6, 1.3), (2.2, 1.5), (3, 1.3), (2.9, 2.1)])
def test_guesses_that_pay_keep_most_of_their_gain(tokens, ratio, call):
    gains = speeds(1000, tokens, ratio, call)
    overhead = CALL / SECONDS / call
    assert gains[2] > 0.95 * tokens * (1 + overhead) / (ratio + overhead)


def test_guesses_come_back_and_go_when_the_texts_change():
    balance = balance_of(1.5)
    for tokens, least in ((1, 0.97), (3, 1.2), (1, 0.97)):
        assert speed(balance, 3000, tokens, 1.5, call=1, seed=1) > least


def test_the_draft_reads_prompts_only_if_that_pays_too():
    """Two tokens a pass of 1.5 times the time pay, but not with a long prompt for each call."""
    balance, seconds, drawn = balance_of(1.5), 0.0, 0
    while seconds < 2000 * SECONDS:
        chosen = balance.next_call(8)
        if chosen.is_guessed:
            reading, took = 8 * SECONDS, 1.5 * SECONDS * chosen.passes
            balance.add_reading(reading)
            balance.add_guessed(took, passes=chosen.passes, row_passes=8, tokens=16)
            seconds, drawn = seconds + reading + took, drawn + 2 * chosen.passes
        else:
            balance.add_plain(SECONDS * chosen.passes, passes=chosen.passes)
            seconds, drawn = seconds + SECONDS * chosen.passes, drawn + chosen.passes
    assert drawn * SECONDS / seconds > 0.97
