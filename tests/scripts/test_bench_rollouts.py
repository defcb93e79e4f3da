"""The smallest size of scripts/bench_rollouts.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_slots_that_are_filled_again_need_fewer_passes_than_batches():
    words = [sys.executable, ROOT / "scripts/bench_rollouts.py", "--slots=8", "--samples=96"]
    done = subprocess.run(
        [*words, "--turns=1", "--width=64"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    filled, batches = (int(each) for each in re.findall(r"(\d+) passes", done.stdout))
    assert 1.7 * filled < batches
