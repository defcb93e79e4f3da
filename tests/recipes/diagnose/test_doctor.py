"""`jaxlm doctor` reports problems of a machine with their fixes, and none for a sound machine."""

import json
import sys

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.monitor.host_machine import Hardware
from jaxlm.recipes.diagnose import device_checks, doctor

JAX = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
CUDA13 = JAX | {"jax-cuda13-plugin": "0.12.0", "jax-cuda13-pjrt": "0.12.0"}
H200 = Hardware(gpus=("NVIDIA H200",), driver="580.65.06")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Each timing takes a tenth of its time on a real machine."""
    monkeypatch.setattr(device_checks, "SECONDS", 0.03)


def problems(findings):
    return [(each.said, each.fix) for each in findings if each.verdict == "problem"]


def test_a_machine_that_computes_is_found_well(capsys, tmp_path):
    assert main(["doctor", f"--workdir={tmp_path}/not/there/yet", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    findings = {each["name"]: each for each in answer["findings"]}
    assert {each["verdict"] for each in answer["findings"]} <= {"ok", "warning"}
    for number in range(8):
        numbers = findings[f"device {number}"]["numbers"]
        assert min(numbers.values()) > 1e8
        assert set(numbers) == {"flops_per_second_float32", "flops_per_second_bfloat16"}
    assert "right over 8 devices" in str(findings["all-reduce"])
    assert findings["all-reduce"]["numbers"]["bytes_per_second"] > 1e5
    assert findings["run folder"]["numbers"]["write_bytes_per_second"] > 1e5
    assert findings["memory"]["numbers"]["total_bytes"] > 2**30
    assert not list(tmp_path.iterdir()), "what was written is gone"


@pytest.mark.slow
def test_a_device_that_computes_wrongly_is_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(device_checks.jnp, "matmul", lambda x, y: (x @ y).at[3, 5].add(1e3))
    assert main(["doctor", f"--workdir={tmp_path}"]) == 1
    output = capsys.readouterr().out
    assert "PROBLEM: float32 is off by" in output
    assert "fix: remove the device" in output
    assert output.rstrip().endswith("8 problems")


def test_a_sum_that_is_wrong_is_found(monkeypatch):
    right = device_checks.sum_over_devices(16)
    assert right.verdict == "ok"
    full = np.full
    monkeypatch.setattr(device_checks.np, "full", lambda *words: full(*words) + 1)
    wrong = device_checks.sum_over_devices(16)
    assert (wrong.verdict, wrong.said) == (
        "problem",
        "a sum over 8 devices gives 44.0 to 44.0 instead of 36.0",
    )


def test_a_gpu_that_jax_does_not_use_is_told_with_the_reason(monkeypatch, tmp_path, capsys):
    """Through the command line, with a fake nvidia-smi that reports a GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["doctor", f"--workdir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "WARNING: NVIDIA H200 is not used: JAX_PLATFORMS=cpu keeps JAX from it" in output
    assert "fix: unset JAX_PLATFORMS" in output


@pytest.mark.parametrize(
    ("hardware", "backend", "packages", "platforms", "expected"),
    [
        (H200, "gpu", CUDA13, "", None),
        (Hardware(), "cpu", JAX, "", None),
        (H200, "cpu", JAX, "", "pip install 'jaxlm[cuda]'"),
        (Hardware(("T4",), "535.104"), "cpu", JAX, "", "pip install 'jaxlm[cuda12]'"),
        (H200, "cpu", CUDA13, "", "JAX_PLATFORMS=cuda"),
        (Hardware(has_tpu=True), "cpu", JAX, "", "pip install 'jaxlm[tpu]'"),
        (Hardware(has_tpu=True), "cpu", JAX | {"libtpu": "0.0.50"}, "", "JAX_PLATFORMS=tpu"),
        (Hardware(has_tpu=True), "tpu", JAX | {"libtpu": "0.0.50"}, "", None),
    ],
)
def test_what_is_there_and_not_used_has_a_fix(hardware, backend, packages, platforms, expected):
    fixes = problems(doctor.accelerators(hardware, backend, packages, platforms))
    if expected is None:
        assert not fixes
    else:
        ((_, fix),) = fixes
        assert expected in fix


@pytest.mark.parametrize(
    ("driver", "plugin", "fix"),
    [
        ("580.65.06", 13, None),
        ("570.86.10", 13, "jaxlm[cuda12]"),
        ("535.104", 12, None),
        ("470.1", 12, "a newer driver"),
    ],
)
def test_a_driver_that_is_too_old_for_its_plugin_is_reported(driver, plugin, fix):
    packages = JAX | {f"jax-cuda{plugin}-plugin": "0.12.0"}
    fixes = problems(doctor.accelerators(Hardware(("GPU",), driver), "gpu", packages, ""))
    assert [fix in each for _, each in fixes] == ([True] if fix else [])


def test_plugins_of_another_release_or_of_two_are_reported():
    assert not problems(doctor.versions(CUDA13, (3, 13)))
    ((output, fix),) = problems(doctor.versions(CUDA13 | {"jax-cuda13-plugin": "0.11.2"}, (3, 13)))
    assert "0.11.2 with jaxlib 0.12.0.1" in output
    assert fix == f"{sys.executable} -m pip install 'jax-cuda13-plugin==0.12.0.1'"
    both = CUDA13 | {"jax-cuda12-plugin": "0.12.0"}
    ((output, fix),) = problems(doctor.versions(both, (3, 13)))
    assert "CUDA 12 and 13" in output
    assert fix.endswith("pip uninstall jax-cuda12-plugin")


def test_little_memory_and_a_folder_that_cannot_be_written_are_reported(tmp_path):
    assert doctor.host_memory({}).verdict == "ok"
    assert doctor.host_memory({"MemTotal": 8 * 2**30, "MemAvailable": 2**30}).verdict == "warning"
    (tmp_path / "file").write_text("")
    finding = doctor.disk("run folder", tmp_path / "file", "name a --workdir on another disk")
    assert (finding.verdict, finding.fix) == ("problem", "name a --workdir on another disk")
