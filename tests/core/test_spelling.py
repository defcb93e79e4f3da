"""Edit distance and the nearest word."""

import pytest

from jaxlm.core.spelling import distance, nearest, notations
from jaxlm.monitor.chips import CHIPS


@pytest.mark.parametrize(
    ("a", "b", "slips"),
    [
        ("", "", 0),
        ("", "ab", 2),
        ("lr", "rl", 1),
        ("batch", "bacth", 1),
        ("kitten", "sitting", 3),
        ("ca", "abc", 3),
    ],
)
def test_distance_counts_slips_of_the_fingers(a, b, slips):
    assert distance(a, b) == distance(b, a) == slips


def test_nearest_is_silent_where_nothing_is_near():
    assert nearest("trian", ["train", "eval"]) == "train"
    assert nearest("zebra", ["train", "eval"]) is None
    assert nearest("x", []) is None


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("a11", ["a100", "a10", "l4"]),
        ("a10", ["a100"]),
        ("float8", ["float16", "float32"]),
        ("llama3-7b", ["llama3-8b"]),
        ("flot", ["float16", "float32"]),
        ("--lr", ["--help", "--lrs"]),
        ("lr", ["or", "l"]),
    ],
)
def test_a_word_with_another_number_or_too_few_letters_is_not_near(word, words):
    assert nearest(word, words) is None


@pytest.mark.parametrize("chip", CHIPS)
def test_no_chip_is_a_slip_of_another(chip):
    assert nearest(chip, set(CHIPS) - {chip}) is None


def test_a_letter_behind_a_number_scales_counts_alone():
    assert "2000" in list(notations("2k"))
    assert "1500000" in list(notations("1.5M"))
    for text, unit in (("10M", "seconds"), ("24G", "GiB"), ("1m", ""), ("24GB", "")):
        assert set(notations(text, unit)) == {text}, text
