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
        (7e9, "7B"),
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
        (0.0012, "1.2ms"),
        (0.0001, "0.1ms"),
        (0.0000421, "42us"),
        (0.0, "0s"),
        (42, "42s"),
        (59.7, "1m00s"),
        (185, "3m05s"),
        (3723, "1h02m"),
        (86_399, "1d00h"),
        (300_000, "3d11h"),
        (4e7, "1y97d"),
        (None, "-"),
        (float("inf"), "-"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert formatting.duration(seconds) == text


def test_text_wraps_below_its_beginning_and_a_command_remains_whole():
    line = "  data    " + "word " * 12
    command = "  next    jaxlm generate --workdir=" + "x" * 60
    assert formatting.wrapped(f"{line}\n{command}", 40, 10).split("\n") == [
        "  data    word word word word word word",
        "          word word word word word word",
        command,
    ]
