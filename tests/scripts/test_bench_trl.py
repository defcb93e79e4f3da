"""scripts/bench_trl.py compares windows of one round, and its sides of jaxlm as named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_trl.py"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_side_of_jaxlm_takes_steps(precision):
    words = ["--size=llama-tiny", "--rounds=1", "--steps=1", "--json", f"--precision={precision}"]
    command = [sys.executable, str(SCRIPT), "--arms=jaxlm full,jaxlm chat,jaxlm lora", *words]
    env = {**os.environ, "XLA_FLAGS": ""}  # on one device, as the rows are fewer than eight
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    sides = json.loads(done.stdout)
    assert len(sides) == 3
    assert all(len(side["speeds"]) == 1 and side["speeds"][0] > 0 for side in sides.values())


def test_an_unknown_side_is_refused():
    command = [sys.executable, str(SCRIPT), "--arms=trl lorra"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no 'trl lorra'" in done.stderr
