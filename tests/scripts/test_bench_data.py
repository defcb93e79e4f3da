"""scripts/bench_data.py: what it times is there, and a device never waits for batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_data.py"


@pytest.mark.slow
@pytest.mark.alone
def test_a_device_waits_less_than_a_hundredth_of_its_time_at_ten_times_the_rate_it_needs():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json"],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens"] > 1e6
    assert figures["waited"] < 0.01
    # 4.6 to above 5 on the machine of scripts/LOG.md, as its neighbours let it.
    assert figures["tokenize_and_pack_mb_per_second"] > 3
