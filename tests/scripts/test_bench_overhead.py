"""The bench of the program's overhead trains on its smallest layout, and fits a line."""

import pytest

from scripts import bench_overhead


def test_a_line_is_fitted_from_one_on():
    assert bench_overhead.fit((1, 2, 4), (3.0, 3.5, 4.5)) == {"at_one": 3.0, "each": 0.5}
    rows = [{"loop_ms": value} for value in (1.0, 9.0, 2.0)]
    assert bench_overhead.medians(rows) == {"loop_ms": 2.0}


@pytest.mark.slow
def test_two_processes_report_their_parts(tmp_path):
    figures = bench_overhead.measure(2, 2, tmp_path / "run", steps=40)
    assert 0 < figures["dispatch_ms"] < figures["loop_ms"]
    assert figures["put_ms"] < figures["loop_ms"]
    assert figures["requests_per_step"] > 0
    assert figures["polls_per_second"] > 0
    assert figures["save_ms"] > figures["save_processor_ms"] > 0
