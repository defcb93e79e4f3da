import threading
import time

import pytest

from jaxlm.core.span import Span
from jaxlm.monitor.config import WatchConfig
from jaxlm.monitor.watchdog import MEASURED, Watchdog, dump_stacks


def config(**limits):
    return WatchConfig(**{name: Span.parse(text) for name, text in limits.items()})


class Time:
    """A clock that a test moves, a second at a time, with a look at the watch after each."""

    def __init__(self, **limits):
        self.now = 0.0
        self.watch = Watchdog(config(**limits), on_overdue=self.fail, now=lambda: self.now)

    def fail(self, output):
        raise AssertionError(output)

    def pass_by(self, seconds):
        output = ""
        for _ in range(seconds):
            self.now += 1
            output = output or self.watch.overdue_message()
        return output


def steps(clock, *seconds):
    for each in seconds:
        clock.watch.enter("step")
        assert clock.pass_by(each) == ""
    clock.watch.enter("data")


@pytest.mark.parametrize(
    ("phase", "limit"),
    [("start", 1800), ("compile", 1800), ("data", 1200), ("eval", 3600), ("save", 1200)],
)
def test_a_phase_may_take_its_limit_and_not_longer(phase, limit):
    clock = Time()
    clock.watch.enter(phase)
    assert clock.pass_by(limit) == ""
    output = clock.pass_by(1)
    assert f"nothing has moved in '{phase}' for {limit + 1} s" in output
    assert f"its limit is {limit} s" in output


def test_e9_what_a_phase_is_busy_with_is_named():
    clock = Time(data="5s")
    clock.watch.details["data"] = "reading texts/*.txt from shards"
    clock.watch.enter("data")
    output = clock.pass_by(6)
    assert output.startswith(
        "nothing has moved in 'data', reading texts/*.txt from shards, for 6 s"
    )


def test_d5_a_step_may_take_ten_times_the_median_and_a_minute_at_least():
    clock = Time()
    steps(clock, 2, 2, 2)
    assert clock.watch.limit("step") == 60
    steps(clock, 20, 20, 20, 20)
    assert clock.watch.limit("step") == 200
    steps(clock, 60)  # three times as long as any
    clock.watch.enter("step")
    assert clock.pass_by(200) == ""
    assert clock.pass_by(1)


def test_the_first_steps_may_take_as_long_as_compiling():
    clock = Time()
    assert MEASURED == 3
    steps(clock, 1, 1)
    clock.watch.enter("step")
    assert clock.pass_by(1800) == ""


def test_d5_time_in_a_save_or_an_evaluation_is_not_the_steps():
    clock = Time()
    steps(clock, 1, 1, 1)
    clock.watch.enter("step")
    for phase in ("compile", "eval", "save"):
        with clock.watch.phase(phase):
            assert clock.pass_by(1000) == ""
    assert clock.pass_by(60) == ""
    assert "'step' for 61 s" in clock.pass_by(1)


def test_d5_who_waits_for_a_busy_peer_is_not_overdue_until_its_limit_after_that():
    clock = Time()
    busy = [True]
    clock.watch = Watchdog(
        config(), on_overdue=clock.fail, is_peer_busy=lambda: busy[0], now=lambda: clock.now
    )
    steps(clock, 1, 1, 1)
    clock.watch.enter("step")
    assert clock.pass_by(600) == ""
    busy[0] = False
    assert clock.pass_by(60) == ""
    assert "'step' for 61 s" in clock.pass_by(1)


def test_a_verification_may_take_its_limit_from_the_last_byte_that_was_read():
    clock = Time()
    clock.watch.enter("start")
    with clock.watch.phase("verify"):
        for _ in range(5):
            assert clock.pass_by(1200) == ""
            clock.watch.bytes_read()
        assert clock.pass_by(1200) == ""
        assert "nothing has moved in 'verify' for 1201 s; its limit is 1200 s" in clock.pass_by(1)


def test_bytes_that_are_read_are_nothing_to_another_phase():
    clock = Time(save="5s")
    clock.watch.enter("save")
    for _ in range(5):
        assert clock.pass_by(1) == ""
        clock.watch.bytes_read()
    assert "'save' for 6 s" in clock.pass_by(1)


def test_a_process_that_has_verified_its_part_waits_as_long_as_another_reads():
    clock = Time()
    busy = [True]
    clock.watch = Watchdog(
        config(), on_overdue=clock.fail, is_peer_busy=lambda: busy[0], now=lambda: clock.now
    )
    clock.watch.enter("verify")
    assert clock.pass_by(5000) == ""
    busy[0] = False
    assert clock.pass_by(1200) == ""
    assert "'verify' for 1201 s" in clock.pass_by(1)


def test_peers_are_told_that_a_verification_goes_on():
    clock = Time()
    clock.watch.enter("verify")
    phases = set()
    for _ in range(10):
        clock.pass_by(120)
        clock.watch.bytes_read()
        phases.add(clock.watch.long_phase())
    assert len(phases) == 10
    phases.clear()
    for _ in range(9):
        clock.pass_by(120)
        phases.add(clock.watch.long_phase())
    ((phase, limit, _),) = phases
    assert (phase, limit) == ("verify", 1200)


def test_what_takes_long_is_told():
    clock = Time()
    clock.watch.enter("data")
    assert clock.watch.long_phase() is None
    clock.pass_by(3)
    assert clock.watch.long_phase() == ("data", 1200)


def test_d10_a_process_that_stood_still_is_not_overdue():
    clock = Time()
    steps(clock, 1, 1, 1)
    clock.watch.enter("step")
    clock.pass_by(30)
    clock.now += 3600  # Ctrl-Z
    assert clock.watch.overdue_message() == ""
    assert clock.pass_by(29) == ""
    assert "'step' for 61 s" in clock.pass_by(5)


def test_d10_the_wall_clock_is_never_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(time, "time", lambda: calls.append(1) or 0.0)
    with Watchdog(config(step="5s"), on_overdue=calls.append) as watch:
        watch.enter("step")
        time.sleep(0.6)
    assert calls == []


def test_what_is_overdue_is_said_once_and_by_the_watch():
    output, happened = [], threading.Event()

    def overdue(text):
        output.append((threading.current_thread().name, text))
        happened.set()

    with Watchdog(config(save="0.2s"), on_overdue=overdue) as watch, watch.phase("save"):
        assert happened.wait(5)
        time.sleep(0.3)
    assert len(output) == 1
    assert output[0][0] == "watch"
    assert "'save'" in output[0][1]


def test_the_beat_changes_while_python_runs(tmp_path):
    beat = tmp_path / "beat"
    with Watchdog(config(save="1s"), on_overdue=print, heartbeat=beat):
        seen, until = set(), time.monotonic() + 20  # it is on a disk that others write to
        while len(seen) <= 3 and time.monotonic() < until:
            time.sleep(0.05)
            seen.add(beat.read_text() if beat.exists() else "")
    assert len(seen) > 3


def test_the_stacks_of_all_threads_are_written(tmp_path, capfd):
    release = threading.Event()

    def wait_for_the_test():
        release.wait()

    thread = threading.Thread(target=wait_for_the_test)
    thread.start()
    dump_stacks(tmp_path / "stacks")
    release.set()
    thread.join()
    for text in ((tmp_path / "stacks").read_text(), capfd.readouterr().err):
        assert "in wait_for_the_test" in text
        assert "in test_the_stacks_of_all_threads_are_written" in text


def test_a_limit_that_is_no_time_is_refused():
    assert [name for name, _, _ in config(step="5%", save="0s").problems()] == ["step", "save"]
    assert list(WatchConfig().problems()) == []
