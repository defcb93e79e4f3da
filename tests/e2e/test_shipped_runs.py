"""The small shipped configs, trained as in their first lines, reach what these promise.

Minutes each, on CPU cores.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import machine

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def trained(config, workdir):
    """Answer of `jaxlm train` in a process with a user's devices, and its seconds."""
    words = ["train", f"--config={config}", f"--workdir={workdir}", "--json"]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["complete"]
    return answer, time.monotonic() - begun


@pytest.mark.parametrize(
    ("config", "method", "minutes"),
    [("quickstart.py", "gzip -9", 3), ("quickstart.py:long", "bz2 -9", 20)],
)
def test_the_quickstart_needs_fewer_bits_than_a_file_compressor(
    config, method, minutes, tmp_path, record_property
):
    """The minutes are those on two cores; other tests make them longer."""
    answer, seconds = trained(f"configs/{config}", tmp_path / "run")
    ours, theirs = answer["bits_per_byte"], answer["baselines"]
    record_property("table", f"{config}: {ours:.4f} bits per byte in {seconds:.0f} s; {theirs}")
    assert 0 < ours < theirs[method]
    machine.require_clock(seconds, 60 * minutes)


def test_the_shakespeare_config_ends_at_or_below_nanogpts_loss(tmp_path, record_property):
    """Its text is no part of this repository: a variable names it."""
    text = os.environ.get("JAXLM_TINYSHAKESPEARE")
    if text is None:
        pytest.skip("JAXLM_TINYSHAKESPEARE names no file; see configs/shakespeare_char.py")
    answer, _ = trained(f"configs/shakespeare_char.py:{Path(text).resolve()}", tmp_path / "run")
    record_property("table", f"shakespeare_char.py: {answer['loss_nats']:.4f} nats")
    assert answer["loss_nats"] <= 1.88
