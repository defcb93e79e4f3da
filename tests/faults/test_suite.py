"""Lines H of the reliability bar that are about the suite, and about what starting costs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

LEFT = """
import subprocess, sys, time
from multiprocessing import shared_memory
import pytest


def test_that_leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])


def test_that_leaves_memory():
    block = shared_memory.SharedMemory(create=True, size=64, track=False)
    block.close()
"""


@pytest.mark.parametrize("name", ["a_process", "memory"])
def test_h4_what_a_test_leaves_behind_fails_the_run(tmp_path, name):
    if name == "memory" and sys.version_info < (3, 13):
        text = LEFT.replace(", track=False", "").replace(
            "    block.close()\n",
            "    block.close()\n    from multiprocessing import resource_tracker\n"
            "    resource_tracker.unregister(block._name, 'shared_memory')\n",
        )
    else:
        text = LEFT
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "test_left.py").write_text(text)
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", f"leaves_{name}", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    for block in set(os.listdir("/dev/shm")) - before:
        Path("/dev/shm", block).unlink()
    assert done.returncode == 1, done.stdout
    assert "left behind" in done.stdout + done.stderr


def test_h6_starting_takes_seconds_and_resuming_hardly_more(tmp_path):
    """With a warm compile cache. Processor time, as the tests share their two cores."""
    config = harness.write_config(tmp_path)

    def seconds(*flags: str) -> float:
        before = os.times()
        code, said = harness.run(harness.words(config, tmp_path / "run", *flags))
        assert code == 0, said
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    seconds("--stop_at=1")
    subprocess.run(["rm", "-rf", str(tmp_path / "run")], check=True)
    begun = time.monotonic()
    start = seconds("--stop_at=1")
    resume = seconds("--stop_at=2")
    assert start <= 20
    assert resume <= start + 5
    assert time.monotonic() - begun < 120
