"""What is assumed of the processor at hand."""

import pytest

from jaxlm.core import processor
from jaxlm.monitor import cpu


@pytest.mark.parametrize(
    ("flags", "times"),
    [("avx512_bf16 amx_bf16 avx512_fp16", 3), ("avx512_bf16 avx512_vbmi", 2), ("avx2", 1)],
)
def test_products_of_bfloat16_are_faster_where_there_is_a_unit_for_them(
    flags, times, tmp_path, monkeypatch
):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(processor, "CPUINFO", path)
    assumed: list[str] = []
    found = cpu.this_machine(2, assumed).chip
    assert found.flops["bfloat16"] == pytest.approx(times * found.flops["float32"])
    assert (f"up to {times} times as fast" in " ".join(assumed)) == (times > 1)


def test_a_machine_that_shows_no_flags_has_no_such_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "nowhere")
    assert not processor.units()
