"""scripts/bench_step.py, which builds the step by hand and so breaks where its parts change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_step.py"


@pytest.mark.slow
def test_both_sides_are_the_same_model_and_are_timed():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds=2", "--steps=2", "--json"],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
        # The hand-written side is as a person would write it, ranks promoted.
        env=os.environ | {"XLA_FLAGS": "", "JAX_NUMPY_RANK_PROMOTION": "allow"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["ratios"]) == 2
    assert min(found["tokens_per_second"].values()) > 0
