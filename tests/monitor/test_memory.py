import subprocess
import sys

import jax

from jaxlm.monitor.host_memory import peak


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_the_fullest_device_counts():
    assert peak([Device({"peak_bytes_in_use": 5}), Device({"peak_bytes_in_use": 9})]) == (
        9,
        "device",
    )


def test_a_cpu_reports_the_whole_process():
    found = peak(jax.local_devices())
    assert found.of == "process"
    assert 2**25 < found.bytes < 2**40


def test_what_a_process_was_started_by_does_not_count():
    program = "from jaxlm.monitor import host_memory; print(host_memory.peak([]).bytes)"
    ballast = b"x" * 2**28
    own = peak([]).bytes
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) < 2**27 < len(ballast) < own, done.stderr


def test_statistics_without_a_peak_are_no_peak():
    assert peak([Device({"bytes_limit": 3})]).of == "process"
