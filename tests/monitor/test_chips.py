import shlex
from types import SimpleNamespace

import jax
import pytest

from jaxlm.core import backend
from jaxlm.core.errors import CommandError
from jaxlm.monitor.chips import CHIPS, SLICES, fastest_dtype, machine, peak_flops, tpu_slice


def test_peaks_add_over_devices():
    assert peak_flops("NVIDIA H100 80GB HBM3", 8) == 8 * 989.4e12
    assert peak_flops("Tesla T4") == 65e12


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v9", ""])
def test_an_unknown_device_is_never_guessed(kind):
    assert peak_flops(kind) is None


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_chip_has_a_source_and_numbers_of_its_time(chip):
    assert chip.source
    assert chip.kinds
    assert all(1e12 < peak < 1e16 for peak in chip.flops.values())
    assert 8e9 <= chip.memory_bytes <= 300e9
    assert 1e11 < chip.memory_speed < 1e13
    assert 1e10 < chip.link_speed < 1e12
    # Fewer FLOPs a byte than 20, or more than 1,200, would be a slip of a digit.
    assert 20 < max(chip.flops.values()) / chip.memory_speed < 1200


def test_no_device_kind_is_listed_twice():
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("name", "devices", "memory"),
    [
        ("h100x8", 8, 80e9),
        ("h200", 1, 141e9),
        ("a100x8", 8, 80e9),
        ("t4", 1, 16e9),
        ("v100x8", 8, 16e9),
        ("v5e-16", 16, 16 * 2**30),
        ("v5p-128", 64, 95 * 2**30),
        ("v6e-256", 256, 32 * 2**30),
        ("tpu7x-16", 16, 96 * 2**30),
        ("rtx4090x2", 2, 24e9),
        ("mi300xx8", 8, 192e9),
        ("mi300x", 1, 192e9),
    ],
)
def test_machines_have_names(name, devices, memory):
    known = machine(name, flag="--on")
    assert (known.name, known.devices, known.chip.memory_bytes) == (name, devices, memory)
    assert (known.topology is None) == (name not in SLICES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100X8", "h100x8"),
        ("H100", "h100"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA-A100", "a100"),
        ("v5e16", "v5e-16"),
        ("v5e-17", "v5e-32"),
        ("v5px8", "v5p-8"),
        ("4090", "rtx4090"),
        ("3090x2", "rtx3090x2"),
        ("2xh100x8", "h100x16"),
        ("2xrtx4090", "rtx4090x2"),
    ],
)
def test_a_machine_spelled_otherwise_is_recognized(name, meant):
    with pytest.raises(CommandError) as caught:
        machine(name, flag="--on")
    assert caught.value.fix == f"--on={meant}"
    assert machine(meant, flag="--on")


@pytest.mark.parametrize("name", ["a11", "h10x8", "rtx4080x2", "h100x0", "mi250", ""])
def test_a_chip_that_is_not_in_the_table_is_never_taken_for_another(name):
    with pytest.raises(CommandError) as caught:
        machine(name, flag="--on")
    flags = shlex.split(caught.value.fix, comments=True)
    on, memory = (flag.partition("=")[2] for flag in flags)
    assert on == (name or "mygpu")
    described = machine(on, flag="--on", memory=memory)
    assert (described.chip.memory_bytes, described.chip.is_known) == (24e9, False)
    assert described.devices == {"h10x8": 8, "rtx4080x2": 2}.get(name, 1)


@pytest.mark.parametrize("name", ["v7-16", "tpu-v9", "v5"])
def test_a_tpu_that_is_not_in_the_table_is_not_made_a_gpu_by_a_memory(name):
    with pytest.raises(CommandError) as caught:
        machine(name, flag="--on")
    assert "--memory" not in caught.value.fix


def test_the_memory_of_a_known_chip_can_be_given():
    described = machine("v100x8", flag="--on", memory="32GB")
    assert (described.devices, described.chip.memory_bytes, described.chip.is_known) == (
        8,
        32e9,
        True,
    )
    assert described.chip.flops == CHIPS["v100"].flops
    assert machine("x", flag="--on", memory="16GiB").chip.memory_bytes == 16 * 2**30


@pytest.mark.parametrize("memory", ["24", "24gbs", "0GB", "-1GB", "lots", ""])
def test_a_memory_without_a_size_is_refused_with_a_line_that_works(memory):
    with pytest.raises(CommandError, match="not a memory size") as caught:
        machine("rtx4080", flag="--on", memory=memory)
    assert machine("x", flag="--on", memory=caught.value.fix.partition("=")[2])


@pytest.mark.parametrize("name", ["v5e-16", "v5p"])
def test_the_memory_of_a_tpu_is_not_changed(name):
    with pytest.raises(CommandError, match="applies to GPUs only"):
        machine(name, flag="--on", memory="24GB")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("v5p-127", "v5p-128"), ("v5e", "v5e-4"), ("tpu7x-9999", "tpu7x-512"), ("h100x8", None)],
)
def test_an_unknown_slice_is_answered_with_one_of_that_chip(name, meant):
    with pytest.raises(CommandError) as caught:
        tpu_slice(name, flag="--topology")
    fix = caught.value.fix.removeprefix("--topology=")
    assert tpu_slice(fix, flag="--topology").topology
    assert meant in (None, fix)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_the_dtype_of_the_plan_is_that_of_the_run(chip, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [chip_device])
    chip_device = SimpleNamespace(compute_capability=str(chip.capability or "gfx942"))
    with backend.compiling_for("tpu" if chip.is_tpu else "gpu"):
        assert fastest_dtype(chip) == backend.fastest_dtype()
