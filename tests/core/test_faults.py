import pytest

from jaxlm.core import faults


def test_a_fault_is_read_whole():
    (fault,) = faults.parse("step.before:sleep=2.5@10-12#1")
    assert (fault.point, fault.action, fault.value) == ("step.before", "sleep", 2.5)
    assert (fault.low, fault.high, fault.rank) == (10, 12, 1)


def test_it_strikes_at_its_steps_on_its_rank(monkeypatch):
    monkeypatch.setattr(faults, "_faults", faults.parse("eval:raise@3-4,exit:raise"))
    for step in (1, 2, 5):
        faults.point("eval", step)
    for step in (3, 4):
        with pytest.raises(RuntimeError, match="injected fault at eval"):
            faults.point("eval", step)
    with pytest.raises(RuntimeError):
        faults.point("exit")
    monkeypatch.setattr(faults, "_faults", faults.parse("eval:raise#1"))
    faults.point("eval", 3)


@pytest.mark.parametrize("text", ["nowhere:raise", "eval", "eval:", "eval:raise@x"])
def test_what_is_not_understood_is_no_fault_that_never_strikes(text):
    with pytest.raises(ValueError, match="names no point and action"):
        faults.parse(text)


def test_an_unknown_action_is_said_when_it_should_strike(monkeypatch):
    monkeypatch.setattr(faults, "_faults", faults.parse("eval:explode"))
    with pytest.raises(ValueError, match="explode"):
        faults.point("eval", 1)


def test_a_full_disk_looks_like_one(monkeypatch):
    monkeypatch.setattr(faults, "_faults", faults.parse("save.begin:enospc"))
    with pytest.raises(OSError, match="No space left"):
        faults.point("save.begin", 1)
