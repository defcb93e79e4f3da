"""Stages of a run: rows of each batch, and the step at which a number of tokens is seen."""

import pytest

from jaxlm.core import batch_schedule as paces
from jaxlm.core.span import Span
from jaxlm.training.cadence import Cadence


def _pace(batches=("4@2", "8@50%"), lengths=("16@1", "32@800tok"), **settings):
    values = {"total": 20, "batch": 12, "sequence": 64, "batches": batches, "lengths": lengths}
    return paces.build(**(values | settings))


def test_stages_follow_each_other_by_steps_shares_and_tokens():
    # 4 x 64 tokens a step at first: 800 are over after 2 steps of 256 and 1 of 512.
    shown = [(stage.first, stage.rows, stage.length) for stage in _pace().phases]
    assert shown == [(0, 4, 16), (1, 4, 32), (2, 8, 32), (3, 8, 64), (10, 12, 64)]
    assert [_pace().phase(number).rows for number in (0, 1, 2, 9, 10, 10**9)] == [
        4,
        4,
        8,
        8,
        12,
        12,
    ]


def test_rows_and_tokens_are_the_sums_over_the_batches_before():
    pace = _pace()
    rows = 0
    for number in range(40):
        assert pace.rows(number) == rows
        assert pace.tokens(number) == rows * 64
        rows += pace.phase(number).rows
    assert pace.rows(10**12) == 4 * 2 + 8 * 8 + 12 * (10**12 - 10)


def test_so_many_tokens_are_so_many_steps():
    pace = _pace()
    for tokens in (0, 1, 255, 256, 257, 511, 512, 513, 4608, 4609, 10**9):
        steps = pace.steps(tokens)
        assert pace.tokens(steps) >= tokens
        assert steps == 0 or pace.tokens(steps - 1) < tokens
        assert Span.parse(f"{tokens}tok").steps(20, pace) == steps


def test_a_cadence_in_tokens_is_due_when_they_have_been_seen():
    pace, amount = _pace(), 1000
    due = Cadence(Span.parse("1000tok"), total=20, tokens_per_step=pace).is_due
    steps = [step for step in range(1, 20) if due(step)]
    expected = [
        next(step for step in range(99) if pace.tokens(step) >= multiple)
        for multiple in range(amount, pace.tokens(19) + 1, amount)
    ]
    assert steps == expected
    assert due(20), "always at the end"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"batches": ("4",)}, "'4' is not SIZE@SPAN"),
        ({"batches": ("4@5m",)}, "ends at a time"),
        ({"batches": ("4@5", "8@3")}, "8@3 ends at step 3, which must be after step 5"),
        ({"batches": ("4@100%",)}, "before the run's last, 20"),
        ({"lengths": ("16@0",)}, "16@0 ends at step 0"),
        ({"lengths": ("16@x",)}, "not a span"),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(settings, why):
    with pytest.raises(ValueError, match=why.replace("(", "\\(")):
        _pace(**settings)
