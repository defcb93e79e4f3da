"""scripts/bench_grpo.py measures iterations of jaxlm, and of TRL where it is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_grpo.py"


@pytest.mark.slow
def test_a_side_has_the_seconds_of_each_iteration():
    words = ["--size=tiny", "--rounds=3", "--sides=jaxlm", "--json"]
    command = [sys.executable, str(SCRIPT), *words]
    env = os.environ | {"XLA_FLAGS": ""}  # one device
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)["jaxlm"]
    assert len(seconds) == 3
    assert all(each > 0 for each in seconds)


def test_an_unknown_side_is_refused():
    command = [sys.executable, str(SCRIPT), "--sides=tlr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no 'tlr'" in done.stderr
