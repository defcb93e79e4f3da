"""The source of a row: exact shares from any first row."""

import itertools
import time
from fractions import Fraction

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data import mixture
from tests import machine

NONE = np.inf


def _built(*knots: tuple[float, list[float]], caps: list[float] | None = None) -> mixture.Shares:
    size = len(knots[0][1])
    most = np.array(caps or [NONE] * size, float)
    return mixture.build_shares([(r, np.array(w)) for r, w in knots], most, "abcdefgh"[:size])


COURSES = {
    "constant": _built((0, [0.5, 0.3, 0.2])),
    "nearly nothing": _built((0, [0.9999, 0.0001])),
    "lines": _built((0, [1.0, 0.0, 0.0]), (500, [0.2, 0.8, 0.0]), (3000, [0.0, 0.1, 0.9])),
    "a jump": _built((100, [0.9, 0.1]), (101, [0.1, 0.9])),
    "caps": _built((0, [0.5, 0.3, 0.2]), caps=[700, NONE, 100]),
    "caps on lines": _built(
        (0, [0.5, 0.3, 0.2]), (2000, [0.1, 0.1, 0.8]), caps=[300, 1500.0, NONE]
    ),
    "eight": _built((0, [1 / 8] * 8)),
}


@pytest.mark.parametrize("name", COURSES)
def test_each_source_is_read_in_order_by_the_integral_of_its_weight(name: str) -> None:
    course, rows = COURSES[name], 5000
    source, nth, before = course.choose(0, rows)
    assert not before.any()
    size = len(course.caps)
    chosen = source[:, None] == np.arange(size)
    had = np.cumsum(chosen, axis=0)
    assert np.array_equal(nth, had[np.arange(rows), source] - 1), "every turn once, in order"
    assert (had[-1] <= course.caps).all()
    # The integral of the weights by the sum over rows of the weight at the middle of each.
    integral = np.cumsum([course.at(row + 0.5) for row in range(rows)], axis=0)
    assert np.abs(had - integral).max() <= size


@pytest.mark.parametrize("name", COURSES)
def test_rows_are_the_same_wherever_one_begins(name: str) -> None:
    course = COURSES[name]
    source, nth, _ = course.choose(0, 4000)
    for start, stop in ((1, 2), (99, 140), (333, 334), (1234, 2234), (3999, 4000)):
        part = course.choose(start, stop)
        assert np.array_equal(part[0], source[start:stop])
        assert np.array_equal(part[1], nth[start:stop])
        counted = np.bincount(source[:start], minlength=len(course.caps))
        assert np.array_equal(part[2], counted)
        assert np.array_equal(course.counts(start), counted)


def test_constant_weights_follow_the_divisor_method_exactly() -> None:
    weights = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]
    moments = sorted(
        ((2 * j + 1) / (2 * weight), k) for k, weight in enumerate(weights) for j in range(200)
    )
    course = _built((0, [float(weight) for weight in weights]))
    assert course.choose(0, 300)[0].tolist() == [k for _, k in moments[:300]]
    # In the long run to the last row: 8 rows hold 4, 2, 1 and 1.
    assert course.counts(8 * 10**11).tolist() == [4 * 10**11, 2 * 10**11, 10**11, 10**11]


def test_the_weight_of_a_source_at_its_most_goes_to_the_others_in_proportion() -> None:
    course = _built((0, [0.5, 0.3, 0.2]), caps=[100, NONE, NONE])
    assert course.ends == {0: pytest.approx(200)}
    assert course.counts(10**6).tolist() == [100, *map(pytest.approx, (599_940, 399_960))]
    assert course.at(10**6) == pytest.approx([0, 0.6, 0.4])
    every = _built((0, [0.5, 0.5]), caps=[30, 20])
    assert len(every.choose(0, 1000)[0]) == 50
    assert every.ends == {1: pytest.approx(40), 0: pytest.approx(50)}


def test_nothing_to_take_over_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no source has a weight at row 20") as caught:
        _built((0, [1.0, 0.0]), (1000, [1.0, 0.0]), (2000, [0.0, 1.0]), caps=[20, NONE])
    assert "a reached the maximum epochs" in caught.value.why


def test_random_courses_lose_no_row_and_read_none_twice() -> None:
    draw = np.random.default_rng(0)
    for _ in range(40):
        size, knots = draw.integers(1, 8), draw.integers(1, 5)
        at = np.sort(draw.choice(2000, knots, replace=False))
        weights = draw.dirichlet(np.full(size, 0.3), knots) + 1e-9
        caps = np.where(draw.random(size) < 0.4, draw.integers(1, 900, size), NONE)
        caps[draw.integers(size)] = NONE
        course = mixture.build_shares(
            list(zip(at.astype(float), weights, strict=True)), caps, "abcdefgh"[:size]
        )
        edges = [0, *np.sort(draw.choice(np.arange(1, 3000), 6, replace=False)).tolist(), 3000]
        parts = [course.choose(a, b) for a, b in itertools.pairwise(edges)]
        source = np.concatenate([part[0] for part in parts])
        nth = np.concatenate([part[1] for part in parts])
        assert len(source) == 3000
        for k in range(size):
            assert np.array_equal(nth[source == k], np.arange((source == k).sum()))
            assert (source == k).sum() <= caps[k]


def test_a_distant_row_is_located_in_constant_time() -> None:
    course = COURSES["caps on lines"]
    begun = time.perf_counter()
    source, _, counts = course.choose(10**12, 10**12 + 1024)
    machine.require_clock(time.perf_counter() - begun, 2)
    assert counts.sum() == 10**12
    assert set(source.tolist()) == {2}
