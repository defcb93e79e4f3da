"""scripts/bench_finetune.py measures what its docstring names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_finetune.py"


@pytest.mark.slow
def test_an_adapter_has_fewer_parameters_and_bytes_than_all_weights():
    words = ["--arms=chat,lora", "--rounds=1", "--steps=1", "--json"]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=SCRIPT.parents[1], check=False
    )
    assert done.returncode == 0, done.stderr
    arms = json.loads(done.stdout)["arms"]
    assert arms["chat"]["state_bytes"] == arms["full"]["state_bytes"]
    assert arms["lora"]["state_bytes"] < 0.15 * arms["full"]["state_bytes"]
    assert all(each["seconds"] > 0 for each in arms.values())
