"""The smallest size of scripts/bench_collect.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_sides_have_a_rate():
    words = [sys.executable, ROOT / "scripts/bench_collect.py", "--turns=1", "--slots=4"]
    one_device = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [*words, "--prompts=16", "--max_tokens=8", "--width=64"],
        capture_output=True,
        text=True,
        env=os.environ | one_device | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The difference of two small collections may be below 0.
    assert re.search(r"^turn 1: collect -?[\d,]+ tokens/s, generate [\d,]+$", done.stdout, re.M)
    assert re.search(r"^collect over generate: -?[\d.]+ \(", done.stdout, re.M)
