import pytest

from jaxlm.monitor.peaks import PEAK_FLOPS, peak_flops


def test_peaks_add_over_devices():
    assert peak_flops("NVIDIA H100 80GB HBM3", 8) == 8 * 989.4e12


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v9", ""])
def test_an_unknown_device_is_never_guessed(kind):
    assert peak_flops(kind) is None


def test_every_peak_has_a_source():
    assert all(peak > 1e13 and source for peak, source in PEAK_FLOPS.values())
