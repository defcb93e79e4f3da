"""Edit distance and the nearest word."""

import pytest

from jaxlm.core.spelling import distance, nearest


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
