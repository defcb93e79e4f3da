"""Line H3: tests of the bar that are part of every run are repeated, and none may be flaky."""

import collections
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

from tests.house.test_bar import ids_of

PYTEST = [sys.executable, "-m", "pytest", "-q"]
WORKERS = ["-n", "logical", "--maxprocesses=8", "--dist=loadfile"]
# As scripts/test runs them: programs that the compiler made in a hurry.
HURRY = "--xla_backend_optimization_level=0"


def repeat(times: int, words: list[str]) -> int:
    """Run the tests of lines `times` times; return 1 if one failed or did not run.

    Without paths in `words` all of them run.
    """
    names = named(words)
    print(f"{len(names)} tests of lines, {times} times", flush=True)
    failed: collections.Counter[str] = collections.Counter()
    for number in range(1, times + 1):
        begun = time.monotonic()
        ran, bad = run(names)
        print(
            f"{number:3}: {ran} ran, {len(bad)} failed, {time.monotonic() - begun:.0f} s",
            flush=True,
        )
        failed.update(bad)
        if ran != len(names):
            failed["not all of them ran"] += 1
    for name, count in failed.most_common():
        print(f"{count} of {times}: {name}")
    print(f"{len(failed)} of {len(names)} tests failed now and then")
    return 1 if failed or not names else 0


def named(words: list[str]) -> list[str]:
    """The tests whose names begin with the id of a line."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", *words], capture_output=True, text=True, env=environment()
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    return [test for test in tests if ids_of(test.partition("[")[0].rpartition("::")[2])]


def run(names: list[str]) -> tuple[int, list[str]]:
    """Return the number of tests that ran, and the failed ones with their output."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [*PYTEST, *WORKERS, f"--junitxml={report}", *names],
            capture_output=True,
            text=True,
            env=environment(),
        )
        cases = (
            list(xml.etree.ElementTree.parse(report).iter("testcase")) if report.exists() else []
        )
    bad = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr, flush=True)
        bad = bad or ["what the tests left behind"]
    return len(cases), bad


def environment() -> dict[str, str]:
    return os.environ | {"XLA_FLAGS": f"{HURRY} {os.environ.get('XLA_FLAGS', '')}"}
