"""Intervals cover what they promise; tests agree with scipy's and with counting by hand."""

import numpy as np
import pytest
from scipy import stats

from jaxlm.evals.statistics import difference, estimate, holm, mcnemar

DRAWS = 2000


def coverage(intervals, truth):
    """Share of the intervals that contain the truth."""
    return np.mean([low <= truth <= high for low, high in intervals])


def drawn(rng, share, groups, size, spread=0.0):
    """Yes or no of `size` items in each of some groups, whose shares differ by `spread`.

    Args:
      rng: the generator.
      share: mean share of yes.
      groups, size: number of groups, items of each.
      spread: deviation of the shares of groups.
    """
    share_g = np.clip(share + spread * rng.standard_normal(groups), 0, 1)
    return (rng.random((groups, size)) < share_g[:, None]).astype(float).ravel()


@pytest.mark.parametrize("items", [20, 400])
def test_95_of_100_intervals_of_a_share_contain_it(items):
    rng = np.random.default_rng(0)
    inside = []  # of one share alone the number of right items is too coarse
    for share in rng.uniform(0.05, 0.95, DRAWS):
        inside.append(coverage([estimate(drawn(rng, share, items, 1))[2:]], share))
    assert 0.94 <= np.mean(inside) <= 0.96


@pytest.mark.parametrize("items", [12, 200])
def test_95_of_100_intervals_of_a_win_rate_with_ties_contain_it(items):
    rng = np.random.default_rng(6)
    inside, ends = [], []
    for share in rng.uniform(0.1, 0.9, DRAWS):
        values = (rng.random((items, 2)) < share).mean(1)  # 0, one half or 1
        interval = estimate(values, is_share=True)[2:]
        inside.append(coverage([interval], share))
        ends += interval
    assert 0.94 <= np.mean(inside) <= 0.97
    assert 0 <= min(ends) < max(ends) <= 1


def test_95_of_100_clustered_intervals_contain_the_share():
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(80), 5)
    draws = [drawn(rng, 0.5, 80, 5, 0.2) for _ in range(DRAWS)]
    assert 0.94 <= coverage([estimate(x, None, groups)[2:] for x in draws], 0.5) <= 0.96
    assert coverage([estimate(x)[2:] for x in draws], 0.5) < 0.92  # groups are needed


def test_95_of_100_intervals_of_a_weighted_mean_contain_it():
    rng = np.random.default_rng(2)
    intervals = []
    for _ in range(DRAWS):
        weights = rng.integers(20, 200, 100).astype(float)  # tokens of a document
        intervals.append(estimate(3 + rng.gamma(4, 0.2, 100), weights)[2:])
    assert 0.94 <= coverage(intervals, 3.8) <= 0.96


@pytest.mark.parametrize("size", [1, 4])
def test_95_of_100_intervals_of_a_paired_difference_contain_it(size):
    rng = np.random.default_rng(3)
    groups = None if size == 1 else np.repeat(np.arange(200), size)
    intervals, rejections = [], 0
    for _ in range(DRAWS):
        first = drawn(rng, 0.5, 200, size)
        flip = np.repeat(rng.random(200) < 0.4, size)  # a group changes as one
        second = np.where(flip, drawn(rng, 0.5, 200, size), first)
        result = difference(first, second, None, groups)
        intervals.append((result.low, result.high))
        rejections += result.p_value < 0.05
    assert 0.94 <= coverage(intervals, 0.0) <= 0.96
    assert 0.02 <= rejections / DRAWS <= 0.06


def test_the_smallest_detectable_difference_is_detected_4_times_of_5():
    rng = np.random.default_rng(4)
    first = rng.normal(3.0, 0.5, 150)
    noise = rng.normal(0, 0.2, (DRAWS, 150))
    smallest = difference(first, first + noise[0]).smallest
    detected = [difference(first, first + smallest + each).p_value < 0.05 for each in noise]
    assert 0.7 <= np.mean(detected) <= 0.9


def test_tests_equal_those_of_scipy():
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=(2, 40))
    t_test = stats.ttest_rel(second, first)
    result = difference(first, second)
    assert result.p_value == pytest.approx(t_test.pvalue, rel=1e-12)
    interval = t_test.confidence_interval()
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high), rel=1e-12)
    for rises, falls in ((0, 0), (0, 6), (5, 9), (7, 7)):
        exact = stats.binomtest(rises, rises + falls).pvalue if rises + falls else 1.0
        assert mcnemar(rises, falls) == pytest.approx(exact, rel=1e-12)
    wilson = stats.binomtest(37, 90).proportion_ci(method="wilson")
    share = estimate([1.0] * 37 + [0.0] * 53)
    assert (share.low, share.high) == pytest.approx((wilson.low, wilson.high), rel=1e-12)
    few, of_groups = first[:4], np.repeat(first[:4], 3)
    interval = stats.ttest_1samp(few, 0).confidence_interval()
    for result in (estimate(few), estimate(of_groups, None, np.repeat(range(4), 3))):
        assert (result.low, result.high) == pytest.approx((interval.low, interval.high), rel=1e-12)
    no_change = difference(few, few, None, [0, 0, 1, 1])
    one_more = difference(few, few + 1, None, [0, 0, 1, 1])
    assert (no_change.p_value, one_more.p_value) == (1.0, 0.5)  # of two groups


def test_the_interval_of_paired_answers_adds_half_an_item_to_each_cell():
    both = [1] * 6 + [0] * 5
    first = [*both, *[0] * 8, 1]
    second = [*both, *[1] * 8, 0]
    cells = np.array([[5, 8], [1, 6]]) + 0.5  # wrong and right, of the first and of the second
    share = cells / cells.sum()
    center = share[0, 1] - share[1, 0]
    error = np.sqrt((share[0, 1] + share[1, 0] - center**2) / cells.sum())
    compared = difference(first, second)
    reach = stats.norm.ppf(0.975) * error
    assert (compared.low, compared.high) == pytest.approx((center - reach, center + reach))


def test_holm_multiplies_by_the_number_of_hypotheses_that_are_left():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_intervals_of_shares_stay_inside_0_and_1():
    """Those of Student's t passed both ends."""
    wins = [1.0] * 5 + [0.5]
    low, high = estimate(wins, is_share=True)[2:]
    assert 0.5 < low < np.mean(wins) < high <= 1
    assert estimate(wins).high > 1
    low, high = estimate([0.1, 0.0, 0.0], [3.0, 1.0, 1.0], list("abc"), is_share=True)[2:]
    assert 0 <= low < 0.06 < high < 1
    many = 0.6 + 0.01 * np.random.default_rng(0).standard_normal(400)  # narrower than yes or no
    assert estimate(many, is_share=True)[2:] == pytest.approx(estimate(many)[2:], abs=1e-5)
    assert estimate([2.0, 3.0, 4.0], is_share=True) == estimate([2.0, 3.0, 4.0])


def test_equal_values_have_no_interval_without_a_width():
    """Twenty ties do not show that runs are equal; equal losses have no spread to compute from."""
    low, high = estimate([0.5] * 20, is_share=True)[2:]
    assert (low, high) == pytest.approx((0.288, 0.712), abs=1e-3)  # of 19 degrees of freedom
    assert estimate([0.5], is_share=True).high > 0.9
    assert estimate([1.3] * 20) == pytest.approx((1.3, 0.0, None, None), abs=1e-12)
    weighted = estimate([0.9] * 3, [0.1, 0.2, 0.7])
    assert (weighted.low, weighted.high) == (None, None)


def test_equal_values_and_single_items():
    assert estimate([1.0] * 20).low == pytest.approx(0.8389, abs=1e-4)
    grouped = estimate([1.0] * 20, None, list("aabbccddeeffgghhiijj"))  # Wilson's, of 10 groups
    assert grouped.low == pytest.approx(10 / (10 + stats.t.ppf(0.975, 9) ** 2))
    assert estimate([2.5]) == (2.5, None, None, None)
    assert estimate([0.5, 1.0], None, ["a", "a"]) == (0.75, None, None, None)
    same = difference([1.0, 0.0] * 50, [1.0, 0.0] * 50)
    assert (same.mean, same.p_value, same.rises, same.falls) == (0.0, 1.0, 0, 0)
    assert same.smallest == pytest.approx(0.06)  # 6 of 100 items must change in one direction
    with pytest.raises(ValueError, match="an item with a weight"):
        estimate([])


@pytest.mark.parametrize("groups", [2, 5, 6, 10])
def test_equal_differences_have_the_p_value_of_their_signs(groups):
    """It is 2 of the 2^n choices of signs: those that are all equal."""
    of_items = difference([0.1] * groups, [0.6] * groups)
    names = np.repeat(np.arange(groups), 2)
    of_groups = difference([0.0, 1.0] * groups, [1.0] * 2 * groups, None, names)
    for each in (of_items, of_groups):
        assert (each.mean, each.groups) == (0.5, groups)
        assert each.p_value == 2 / 2**groups
        interval = (0.5, 0.5) if groups >= 6 else (None, None)
        assert (each.low, each.high) == interval
