"""Assumptions about the local processor."""

import subprocess
import sys
import time

import jax
import pytest

from jaxlm.core import backend
from jaxlm.monitor import chips, host_machine
from jaxlm.monitor.host_machine import peak_memory


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ("avx512_bf16 amx_bf16 GenuineIntel", 3),
        ("avx512_bf16 avx512_vbmi AuthenticAMD", 2),
        ("avx512_bf16 avx512_vbmi GenuineIntel", 1),
        ("avx2", 1),
    ],
)
def test_products_of_bfloat16_are_faster_where_there_is_a_fast_unit_for_them(
    flags, times, tmp_path, monkeypatch
):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(backend, "CPUINFO", path)
    assumed: list[str] = []
    chip = host_machine.this_machine(2, assumed).chip
    assert chip.flops["bfloat16"] == pytest.approx(times * chip.flops["float32"])
    assert (f"up to {times} times as fast" in " ".join(assumed)) == (times > 1)


def test_products_on_one_core_count_where_other_programs_delay_those_on_all(monkeypatch):
    seconds = iter([1.0, 1e-3, 1e-2])  # all cores, one core, copies
    monkeypatch.setattr(host_machine, "_least_seconds", lambda *_: next(seconds))
    flops, copied = host_machine._measured.__wrapped__()
    assert flops == pytest.approx(2 * 64 * 64**3 / 1e-3)
    assert copied == pytest.approx(2 * 32 * 2**20 / 1e-2)


@pytest.mark.parametrize(
    ("kernel", "flags", "times"),
    [("Haswell", "avx512_bf16", 2), ("SkylakeX", "avx512_bf16", 1), ("Haswell", "avx2", 1)],
)
def test_a_blas_of_narrow_vectors_is_not_the_speed_of_the_compiler(
    kernel, flags, times, tmp_path, monkeypatch
):
    path = tmp_path / "cpuinfo"
    path.write_text(f"flags\t\t: fpu {flags}\n")
    monkeypatch.setattr(backend, "CPUINFO", path)
    monkeypatch.setattr(host_machine, "_measured", lambda: (1e11, 1e10))
    monkeypatch.setattr(host_machine, "blas_kernel", lambda: kernel)
    assumed: list[str] = []
    assert host_machine.this_machine(1, assumed).chip.flops["float32"] == times * 1e11
    assert ("half of the vectors" in " ".join(assumed)) == (times == 2)


def test_the_kernel_of_this_blas_has_a_name_or_none():
    assert host_machine.blas_kernel().isalnum() or not host_machine.blas_kernel()


def test_a_slow_call_is_measured_once():
    calls = []

    def call():
        calls.append(time.sleep(0.04 if calls else 0))

    assert 0.04 <= host_machine._least_seconds(call) < 1
    assert len(calls) == 2


def test_a_machine_that_shows_no_flags_has_no_such_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "CPUINFO", tmp_path / "nowhere")
    assert not backend.cpu_units()


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_the_fullest_device_counts():
    assert peak_memory([Device({"peak_bytes_in_use": 5}), Device({"peak_bytes_in_use": 9})]) == (
        9,
        "device",
    )


def test_a_cpu_reports_the_whole_process():
    peak = peak_memory(jax.local_devices())
    assert peak.of == "process"
    assert 2**25 < peak.bytes < 2**40


def test_what_a_process_was_started_by_does_not_count():
    program = "from jaxlm.monitor import host_machine; print(host_machine.peak_memory([]).bytes)"
    ballast = b"x" * 2**28
    before = peak_memory([]).bytes
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) < 2**27 < len(ballast) < before, done.stderr


def test_statistics_without_a_peak_are_no_peak():
    assert peak_memory([Device({"bytes_limit": 3})]).of == "process"


@pytest.mark.parametrize(
    ("rows", "platforms", "machine"),
    [
        (("NVIDIA H100 80GB HBM3, 580.1, 81559 MiB",) * 2, None, ("h100x2", None)),
        (
            ("NVIDIA GeForce RTX 4060 Ti, 580.1, 8188 MiB",),
            None,
            ("nvidia-geforce-rtx-4060-ti", "8188 MiB"),
        ),
        (("Tesla T4, 580.1, 15360 MiB",), "cpu", ("cpu", None)),
        ((), None, ("cpu", None)),
    ],
)
def test_the_machine_of_the_plan_is_the_one_that_jax_would_use(
    rows, platforms, machine, tmp_path, monkeypatch
):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS")
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(host_machine, "CUDA_PLUGINS", ("json",))  # as if installed
    name, memory = host_machine.used_machine()
    assert (name, memory) == machine
    if name != "cpu":
        chips.machine(name, flag="--on", memory=memory)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert host_machine.used_machine() == (name.removesuffix("x2"), memory)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert host_machine.used_machine() == ("cpu", None)
    monkeypatch.setattr(host_machine, "CUDA_PLUGINS", ("no_such_plugin",))
    assert host_machine.used_machine() == ("cpu", None)


def test_a_tpu_has_the_name_of_its_slice(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    assert host_machine.used_machine() == ("v5e-16", None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert host_machine.used_machine() == ("cpu", None)
