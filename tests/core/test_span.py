"""Spans: what they read and how many steps they are."""

import pytest

from jaxlm.core.span import Span


@pytest.mark.parametrize(
    ("text", "steps"),
    [(500, 500), ("5%", 50), ("0.01%", 1), ("1e6tok", 245), ("0", 0), ("1e2", 100), ("100%", 1000)],
)
def test_a_span_in_steps_of_a_run_of_1000(text, steps):
    assert Span.parse(text).steps(1000, 4096) == steps


@pytest.mark.parametrize(
    "text", ["", "often", "-5", "1.5", "5 percent", True, "1e999", "1.2.3%", "nan"]
)
def test_what_is_not_a_span_is_refused(text):
    with pytest.raises(ValueError, match="is not a"):
        Span.parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200)])
def test_a_time_is_in_seconds_and_has_no_steps(text, seconds):
    span = Span.parse(text)
    assert (span.unit, span.amount) == ("second", seconds)
    with pytest.raises(ValueError, match="cadence"):
        span.steps(1000, 1)


@pytest.mark.parametrize("text", [500, "5%", "1e6tok", "007", "10m", "5.0"])
def test_a_span_comes_back_from_what_a_file_holds(text):
    span = Span.parse(text)
    assert Span.parse(span.plain()) == span
    assert str(span) == str(text)
