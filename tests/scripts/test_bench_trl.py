"""scripts/bench_trl.py compares windows of one round, and its sides of jaxlm as named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_trl.py"


@pytest.mark.slow
def test_each_side_of_jaxlm_takes_steps():
    words = ["--size=llama-tiny", "--rounds=1", "--steps=1", "--json"]
    command = [sys.executable, str(SCRIPT), "--arms=jaxlm full,jaxlm chat,jaxlm lora", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sides = json.loads(done.stdout)
    assert len(sides) == 3
    assert all(len(side["speeds"]) == 1 and side["speeds"][0] > 0 for side in sides.values())


def test_an_unknown_side_is_refused():
    command = [sys.executable, str(SCRIPT), "--arms=trl lorra"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no 'trl lorra'" in done.stderr
