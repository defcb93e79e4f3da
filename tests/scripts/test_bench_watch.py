"""scripts/bench_watch.py: what leaving `log.layers` on costs a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_watch.py"
MOST = 0.02  # of a run's time


@pytest.mark.slow
@pytest.mark.alone
def test_watching_everything_of_every_layer_at_its_default_pace_takes_less_than_2_percent():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds=5"],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
        env=os.environ | {"XLA_FLAGS": ""},  # as a run compiles
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[-1]["layers"] == ["norms", "activations", "attention", "noise"]
    assert len(rows) == 5
    assert 0 < max(row["share"] for row in rows) < MOST
