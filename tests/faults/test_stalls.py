"""Lines D4, D5 and E9 for one process, by the trainer: hangs are ended, slowness is not."""

import html
import itertools
import re
import signal
import time
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.monitor.watchdog import Watchdog
from tests import machine
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize(
    ("phase", "fault", "last"),
    [
        ("eval", "eval:hang@6", 4),
        pytest.param("data", "data.next:hang@6", 4, marks=pytest.mark.slow),
        pytest.param("save", "save.begin:hang@6", 4, marks=pytest.mark.slow),
        # In the background: noticed when the next save waits for it.
        pytest.param("save", "save.digest:hang@6", 4, marks=pytest.mark.slow),
    ],
    ids=["evaluation", "data", "save", "writing"],
)
def test_e9_d4_what_hangs_is_named_and_ends_with_76(
    config, tmp_path, phase, fault, last, record_property
):
    # A save and a wait for data do happen before the one that hangs, and may take seconds on shared
    # cores.
    limit = 3 if phase == "eval" else 10
    flags = (f"--config.watch.{phase}={limit}s", "--config.eval.every=6")
    process = harness.start(harness.words(config, tmp_path / "run", *flags), fault)
    try:
        while not (tmp_path / f"run/checkpoints/{last}").exists():
            time.sleep(0.02)
            assert process.poll() is None
        begun = time.monotonic()
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 76, output
    took = time.monotonic() - begun
    record_property("D4", f"in {phase} {took:.1f} s, limit {limit}")
    machine.require_clock(took, limit + 3 + 3)  # and the steps between, on shared cores
    source = f", reading {Path(config).parent}/*.txt from /" if phase == "data" else " for "
    named = f"nothing has moved in '{phase}'{source}"
    exited = harness.exit_of(tmp_path / "run")
    assert exited["code"] == 76
    assert named in output
    assert named in exited["cause"]
    page = (tmp_path / "run/report.html").read_text()
    assert f"ended with code 76: Stalled: nothing has moved in '{phase}'" in html.unescape(page)
    assert "File " in (tmp_path / "run/stacks.0.txt").read_text()
    assert main(harness.words(config, tmp_path / "run")) == 0


@pytest.mark.slow
def test_d5_what_is_slow_within_its_limit_goes_on(config, tmp_path):
    """Compiling, an evaluation and saves exceed the limit of a step, and one step the median."""
    flags = (
        *("--config.watch.step=3s", "--config.watch.compile=60s", "--config.watch.eval=30s"),
        *("--config.watch.save=30s", "--config.eval.every=6"),
    )
    slow = (
        "compile:sleep=5,step.before:sleep=1@8,eval:sleep=4@6,save.begin:sleep=4@8,"
        "save.digest:sleep=4@10"
    )
    code, output = harness.run(harness.words(config, tmp_path / "run", *flags), slow)
    assert code == 0, output
    log = (tmp_path / "run/log.txt").read_text()
    assert float(re.search(r"compiling the step.* ([\d.]+) ?s", log)[1]) >= 5


@pytest.mark.slow
def test_d4_a_compiler_that_hangs_ends_with_76(config, tmp_path):
    words = harness.words(config, tmp_path / "run", "--config.watch.compile=3s")
    code, output = harness.run(words, "compile:hang")
    assert code == 76, output
    assert "nothing has moved in 'compile' for 3 s" in output
    assert "in _strike" in (tmp_path / "run/stacks.0.txt").read_text()


@pytest.mark.slow
def test_d10_a_wall_clock_that_is_set_changes_nothing_but_the_times_that_are_written(
    config, tmp_path, monkeypatch
):
    """An hour ahead in step 4, and an hour back in step 9 of a second start.

    No limit and no interval notices.
    """
    flags = [f"--config.watch.{phase}=60s" for phase in ("data", "step", "save", "eval")]
    flags += ["--config.eval.every=30m", "--config.log.sinks=tensorboard"]
    quiet = tmp_path / "quiet"
    assert main(harness.words(config, quiet, *flags)) == 0
    now, enter, clock = time.time, Watchdog.enter, {"steps": 0, "ahead": 0.0}

    def count(self, phase):
        clock["steps"] += phase == "step"
        clock["ahead"] = 3600.0 * (4 <= clock["steps"] < 9)
        enter(self, phase)

    monkeypatch.setattr(Watchdog, "enter", count)
    monkeypatch.setattr(time, "time", lambda: now() + clock["ahead"])
    run = tmp_path / "run"
    assert main(harness.words(config, run, *flags, "--stop_at=6")) == 0
    assert main(harness.words(config, run, *flags)) == 0
    assert clock["steps"] == 12
    lines = [line for line in harness.records(run) if line["split"] == "train"]
    written = [line["time_unix"] for line in lines]
    jumps = [later - earlier for earlier, later in itertools.pairwise(written)]
    assert max(jumps) > 3000, "the clock was set"
    assert min(jumps) < -3000, "and set back"
    assert all(0 <= line["step_seconds"] < 600 for line in lines)
    assert all(0 <= line["data_wait_seconds"] < 600 for line in lines)
    assert len([line for line in harness.records(run) if line["split"] != "train"]) == 1
    assert harness.losses(run) == harness.losses(quiet)
    assert harness.state_digest(run) == harness.state_digest(quiet)
    assert len(list((run / "events").iterdir())) == 2


def test_a7_a_sigterm_while_data_is_prepared_says_75(tmp_path):
    """Enough text that preparing it takes seconds."""
    text = "the quick brown fox jumps over the lazy dog " * 20_000
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number} {text}")
    path = tmp_path / "config.py"
    path.write_text(harness.CONFIG.format(folder=tmp_path))
    words = harness.words(str(path), tmp_path / "run")
    process = harness.start(words, JAXLM_CACHE=str(tmp_path / "cache"))
    try:
        while not (tmp_path / "run/log.txt").exists():
            time.sleep(0.02)
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 75, output
    machine.require_clock(time.monotonic() - begun, 20)
    assert "while the data was prepared" in output
    assert harness.exit_of(tmp_path / "run")["code"] == 75
