"""A fast test that takes too long fails, wherever it runs: tests/conftest.py sees to it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import machine

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import subprocess, sys, time
import pytest

LONG = "import time\\nwhile time.process_time() < 0.6: pass"


def test_that_computes():
    exec(LONG.replace("0.6", f"{time.process_time() + 0.6}"))


def test_that_starts_one_that_computes():
    subprocess.run([sys.executable, "-c", LONG], check=True)


def test_that_waits():
    time.sleep(0.6)


def test_that_is_short():
    pass


def test_a3_e12_of_a_line_of_the_bar_that_computes():
    test_that_computes()


@pytest.mark.slow
def test_that_is_marked_and_computes():
    test_that_computes()
"""


# The limit grows with the slowness of a machine, and the 0.6 s of these tests do not.
SHORT = {
    "LONGEST_SECONDS = 10 ": "LONGEST_SECONDS = 0.1 ",
    "SLACK * machine.slowness()": "SLACK",
}


@pytest.fixture
def ended(tmp_path):
    """Outcome of a session of these tests in which 0.3 s of the processor is the limit."""
    ours = CONFTEST.read_text()
    for line, short in SHORT.items():
        assert line in ours
        ours = ours.replace(line, short)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(ours)
    (tmp_path / "tests/test_long.py").write_text(TESTS)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tmp_path / "tests")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "HOME": str(tmp_path)},
    )


def test_a_test_that_computes_for_too_long_fails_and_one_that_waits_does_not(ended):
    assert ended.returncode == 1
    assert "2 failed, 4 passed" in ended.stdout
    for name in ("that_computes", "that_starts_one_that_computes"):
        assert f"FAILED tests/test_long.py::test_{name}" in ended.stdout
    assert ended.stdout.count("make it shorter, or slow") >= 2


CLOCK = re.compile(
    r"assert [^\n]*((monotonic|perf_counter|process_time)\(\) - "
    r"\w+|\b(took|wall|longest|slowest)) <=? "
)


def test_limits_of_time_are_those_of_machine_py_so_that_a_pause_fails_no_test():
    limits = [
        f"{path.name}: {match[0]}"
        for path in CONFTEST.parent.rglob("test_*.py")
        if path != Path(__file__)
        for match in CLOCK.finditer(path.read_text())
    ]
    assert limits == []
    assert CLOCK.search("    assert time.monotonic() - begun < 5"), "and it would be found"
    assert CLOCK.search("    assert took <= 2 + 10")


def test_a_limit_grows_on_a_slow_machine_and_is_one_of_the_processor_or_of_the_clock(monkeypatch):
    monkeypatch.setattr(machine, "slowness", lambda: 2)
    monkeypatch.setattr(machine, "shared", lambda: 3)
    machine.require_processor(2, 1)
    machine.require_clock(6, 1)
    with pytest.raises(machine.TooSlow, match="3.00 s of the processor, 2.00 are allowed"):
        machine.require_processor(3, 1)
    with pytest.raises(machine.TooSlow, match="it took 7.00 s, 6.00 are allowed"):
        machine.require_clock(7, 1)
