import time

import pytest

from jaxlm.core import divisors


def test_divisors_come_nearest_first():
    assert divisors.nearest(12, 5) == [6, 4, 3, 2, 1, 12]
    assert divisors.nearest(7, 4)[0] == 7
    assert sorted(divisors.nearest(1000, 1)) == [n for n in range(1, 1001) if 1000 % n == 0]


@pytest.mark.parametrize(
    ("number", "wanted", "expected"),
    [(16, 9, [8, 16]), (60, 14, [15, 12]), (16, 3, [2, 4]), (16, 4, [4]), (16, 20, [16]), (7, 3, [1, 7])],
)  # fmt: skip
def test_neighbours_are_the_divisors_on_both_sides(number, wanted, expected):
    assert divisors.neighbours(number, wanted) == expected


@pytest.mark.parametrize("number", [2**31, 2**63, 2**61 - 1])
def test_a_number_that_nobody_meant_takes_no_time(number):
    begun = time.monotonic()
    assert divisors.nearest(number, 12)[-1] in (1, number)
    assert time.monotonic() - begun < 2
