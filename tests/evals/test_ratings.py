"""Ratings of texts: strengths equal those of maximum likelihood, agreement those of a textbook."""

import numpy as np
import pytest
from scipy import optimize

from jaxlm.evals.ratings import Rating, bradley_terry, summarize


def rating(prompt, choice, rater="ann", runs=("x", "y"), is_left=True):
    return Rating(
        id=str(prompt),
        run_a=runs[0],
        run_b=runs[1],
        choice=choice,
        rater=rater,
        is_left=is_left,
    )


def test_strengths_are_those_of_maximum_likelihood():
    wins = np.random.default_rng(0).integers(1, 20, (4, 4)).astype(float)
    np.fill_diagonal(wins, 0)

    def loss(strengths):
        gaps = strengths[:, None] - strengths[None]
        return (wins * np.logaddexp(0, -gaps)).sum() + strengths.sum() ** 2

    best = optimize.minimize(loss, np.zeros(4), tol=1e-12).x
    assert bradley_terry(wins[None])[0] == pytest.approx(best, abs=1e-5)


def test_counts_win_rate_and_bias_of_a_pair():
    ratings = [rating(n, "b", is_left=n % 2 == 0) for n in range(12)]
    ratings += [rating(n, "a", is_left=n % 2 == 0) for n in range(12, 16)]
    ratings += [rating(16, "tie"), rating(17, "skip"), rating(18, "a"), rating(18, "b")]
    summary = summarize(ratings)
    (pair,) = summary.pairs
    assert (pair.wins_a, pair.wins_b, pair.ties, pair.skips) == (4, 13, 1, 1)  # 18: the last
    assert pair.win_rate.mean == pytest.approx(13.5 / 18)
    assert 0.5 < pair.win_rate.low < 0.6 < 0.9 < pair.win_rate.high
    assert list(summary.strengths) == ["y", "x"]
    strength = summary.strengths["y"]
    assert 2 * strength.mean == pytest.approx(np.log(14 / 5))  # half a win more for each
    assert strength.low < strength.mean < strength.high
    assert summary.left_share.mean == pytest.approx((6 + 2) / 17)
    assert summary.agreement is None


def test_runs_in_either_role_are_one_pair_and_three_runs_are_ranked():
    ratings = [rating(n, "a", runs=("x", "y")) for n in range(8)]
    ratings += [rating(n, "b", runs=("y", "x")) for n in range(8, 16)]
    ratings += [rating(n, "a", runs=("y", "z")) for n in range(16, 22)]
    summary = summarize(ratings)
    assert [(each.run_a, each.run_b) for each in summary.pairs] == [("x", "y"), ("y", "z")]
    assert (summary.pairs[0].wins_a, summary.pairs[0].win_rate.mean) == (16, 0.0)
    assert summary.pairs[0].win_rate.high == pytest.approx(0.194, abs=1e-3)  # Wilson's of 0 of 16
    assert list(summary.strengths) == ["x", "y", "z"]


def test_agreement_of_raters_is_krippendorffs_alpha():
    # Two raters and ten units of two values, from Krippendorff 2011, part A: alpha is 0.095.
    first, second = "0100000010", "1110010000"
    ratings = [rating(n, "ab"[int(x)], "ann") for n, x in enumerate(first)]
    ratings += [rating(n, "ab"[int(x)], "bob") for n, x in enumerate(second)]
    summary = summarize(ratings)
    assert summary.agreement == pytest.approx(0.6)
    assert summary.alpha == pytest.approx(0.095, abs=1e-3)
    assert summary.rated_twice == 10


def test_a_rater_of_another_opinion_widens_the_interval():
    alone = [rating(n, "b" if n % 3 else "a", f"rater {n}") for n in range(60)]
    crowd = [rating(n, "b" if n < 40 else "a", f"rater {n // 20}") for n in range(60)]
    independent, clustered = (summarize(each).pairs[0].win_rate for each in (alone, crowd))
    assert independent.mean == clustered.mean
    assert clustered.high - clustered.low > 1.5 * (independent.high - independent.low)


def test_nothing_is_summarized_without_choices():
    summary = summarize([rating(1, "skip")])
    assert (summary.strengths, summary.left_share, summary.alpha) == ({}, None, None)
    assert summary.pairs[0].win_rate.low is None
    assert summary.record()["pairs"][0]["win_rate"]["mean"] == 0.5
