"""Edit distance, the nearest word, and the nearest divisors."""

import time

import pytest

from jaxlm.core.nearest import (
    adjacent_divisors,
    distance,
    nearest_divisors,
    nearest_word,
    notations,
)
from jaxlm.monitor.chips import CHIPS
from tests import machine


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
    assert nearest_word("trian", ["train", "eval"]) == "train"
    assert nearest_word("zebra", ["train", "eval"]) is None
    assert nearest_word("x", []) is None


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
    assert nearest_word(word, words) is None


@pytest.mark.parametrize("chip", CHIPS)
def test_no_chip_is_a_slip_of_another(chip):
    assert nearest_word(chip, set(CHIPS) - {chip}) is None


def test_a_letter_behind_a_number_scales_counts_alone():
    assert "2000" in list(notations("2k"))
    assert "1500000" in list(notations("1.5M"))
    for text, unit in (("10M", "seconds"), ("24G", "GiB"), ("1m", ""), ("24GB", "")):
        assert set(notations(text, unit)) == {text}, text


def test_divisors_come_nearest_first():
    assert nearest_divisors(12, 5) == [6, 4, 3, 2, 1, 12]
    assert nearest_divisors(7, 4)[0] == 7
    assert sorted(nearest_divisors(1000, 1)) == [n for n in range(1, 1001) if 1000 % n == 0]


@pytest.mark.parametrize(
    ("number", "target", "expected"),
    [
        (16, 9, [8, 16]),
        (60, 14, [15, 12]),
        (16, 3, [2, 4]),
        (16, 4, [4]),
        (16, 20, [16]),
        (7, 3, [1, 7]),
    ],
)
def test_adjacent_divisors_are_the_divisors_on_both_sides(number, target, expected):
    assert adjacent_divisors(number, target) == expected


@pytest.mark.parametrize("number", [2**31, 2**63, 2**61 - 1])
def test_a_huge_number_takes_no_time(number):
    begun = time.monotonic()
    assert nearest_divisors(number, 12)[-1] in (1, number)
    machine.require_clock(time.monotonic() - begun, 2)
