import pytest

from jaxlm.monitor import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (1.5, "1.50"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (1_234_567, "1.23M"),
        (4e12, "4T"),
        (None, "-"),
    ],
)
def test_counts_keep_three_digits(value, text):
    assert formatting.count(value) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(512, "512 B"), (1536, "1.50 KiB"), (1.5 * 2**30, "1.50 GiB"), (2**40, "1 TiB"), (None, "-")],
)
def test_sizes_are_binary(amount, text):
    assert formatting.size(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.21, "4.2s"),
        (59.7, "1:00"),
        (185, "3:05"),
        (3723, "1:02:03"),
        (None, "-"),
        (float("inf"), "-"),
    ],
)
def test_durations_read_like_a_clock(seconds, text):
    assert formatting.duration(seconds) == text
