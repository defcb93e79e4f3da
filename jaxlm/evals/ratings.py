"""Choices of people between texts of two runs: win rates, strengths, position bias, agreement.

Example:
  >>> choice = Rating(id="1", run_a="x", run_b="y", choice="a", rater="ann", is_left=True)
  >>> summarize([choice] * 3).pairs[0].win_rate.mean
  0.0
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jaxlm.evals import statistics
from jaxlm.evals.statistics import Estimate

Choice = Literal["a", "b", "tie", "skip"]
DRAWS = 2000  # of the bootstrap
PRIOR = 0.5  # wins in each direction of each compared pair, so that strengths are finite
STEPS = 10_000  # of the iteration for the strengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rating:
    """A choice between the texts of runs A and B for one prompt.

    Args:
      id: of the prompt and its two texts.
      run_a, run_b: the runs.
      choice: the better text.
      rater: name of the person.
      is_left: the text of A was shown on the left.
    """

    id: str
    run_a: str
    run_b: str
    choice: Choice
    rater: str
    is_left: bool

    @property
    def score(self) -> float:
        """Return 1 if B is preferred, 0 if A is, one half for a tie."""
        return {"a": 0.0, "b": 1.0}.get(self.choice, 0.5)

    @property
    def pair(self) -> tuple[str, str]:
        """Return the runs in alphabetical order."""
        first, second = sorted((self.run_a, self.run_b))
        return first, second

    @property
    def preferred(self) -> str:
        """Return the preferred run, "tie" or "skip"."""
        return {"a": self.run_a, "b": self.run_b}.get(self.choice, self.choice)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairResult:
    """Counts of choices between two runs, and the share of B: wins and half of the ties."""

    run_a: str
    run_b: str
    wins_a: int
    wins_b: int
    ties: int
    skips: int
    prompts: int
    raters: int
    win_rate: Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingSummary:
    """Results of all ratings.

    Args:
      pairs: each compared pair of runs.
      strengths: Bradley-Terry log-odds of each run with a mean of 0, the strongest first.
      left_share: share of the left text among choices of one text; 0.5 without position bias.
      agreement: share of equal choices among two raters of one prompt; None without such.
      alpha: Krippendorff's alpha of the choices: 1 for full agreement, 0 for that of chance.
      rated_twice: number of prompts with several raters.
    """

    pairs: list[PairResult]
    strengths: dict[str, Estimate]
    left_share: Estimate | None
    agreement: float | None
    alpha: float | None
    rated_twice: int

    def record(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        values = dataclasses.asdict(self)
        pairs = [each | {"win_rate": each["win_rate"]._asdict()} for each in values["pairs"]]
        strengths = {run: each._asdict() for run, each in self.strengths.items()}
        left = self.left_share and self.left_share._asdict()
        return values | {"pairs": pairs, "strengths": strengths, "left_share": left}


def summarize(ratings: Sequence[Rating], seed: int = 0) -> RatingSummary:
    """Return results of ratings; the last choice of a rater for a pair of texts counts.

    Intervals are of a bootstrap that draws both raters and prompts with replacement; a single rater
    is kept. An interval of a win rate is at least that of prompts as independent items.

    Source: Owen 2007, The pigeonhole bootstrap (both factors are drawn).
    """
    last = list({(each.id, each.rater): each for each in ratings}.values())
    decided = [each for each in last if each.choice != "skip"]
    rng = np.random.default_rng(seed)
    weight_dn = _drawn(decided, rng)
    by_pair: dict[tuple[str, str], list[Rating]] = {}
    for each in last:
        by_pair.setdefault(each.pair, []).append(each)
    one_text = [each for each in decided if each.choice != "tie"]
    left = [float(each.is_left == (each.choice == "a")) for each in one_text]
    agreement, alpha, rated_twice = _agreement(decided)
    return RatingSummary(
        pairs=[
            _pair_result(pair, each, decided, weight_dn) for pair, each in sorted(by_pair.items())
        ],
        strengths=_strengths(decided, weight_dn),
        left_share=statistics.estimate(left, None, [each.id for each in one_text])
        if left
        else None,
        agreement=agreement,
        alpha=alpha,
        rated_twice=rated_twice,
    )


def bradley_terry(wins_drr: Float[np.ndarray, "D R R"]) -> Float[np.ndarray, "D R"]:
    """Return the strengths of R runs by maximum likelihood, for each of D tables of wins.

    wins[d, i, j] is the number of wins of i over j, with ties as half a win of each. Run i wins
    over j with probability 1 / (1 + exp(strength_j - strength_i)).

    Source: Hunter 2004, MM algorithms for generalized Bradley-Terry models, equation 3.
    """
    total_drr = wins_drr + wins_drr.transpose(0, 2, 1)
    wins_dr = wins_drr.sum(2)
    odds_dr = np.ones(wins_dr.shape)
    for _ in range(STEPS):
        shared_drr = total_drr / (odds_dr[:, :, None] + odds_dr[:, None, :])
        new_dr = wins_dr / shared_drr.sum(2)
        new_dr /= np.exp(np.log(new_dr).mean(1, keepdims=True))
        change = np.abs(np.log(new_dr / odds_dr)).max(initial=0.0)
        odds_dr = new_dr
        if change < 1e-9:
            break
    return np.log(odds_dr)


def _drawn(ratings: Sequence[Rating], rng: np.random.Generator) -> Float[np.ndarray, "D N"]:
    """Return the weight of each rating in each bootstrap draw of raters and prompts."""
    weight_dn = np.ones((DRAWS, len(ratings)))
    for names in ([each.id for each in ratings], [each.rater for each in ratings]):
        known, index_n = np.unique(names, return_inverse=True)
        if len(known) > 1:
            shares = np.full(len(known), 1 / len(known))
            weight_dn *= rng.multinomial(len(known), shares, DRAWS)[:, index_n]
    return weight_dn


def _pair_result(
    pair: tuple[str, str],
    ratings: Sequence[Rating],
    decided: Sequence[Rating],
    weight_dn: Float[np.ndarray, "D N"],
) -> PairResult:
    counts = Counter(each.preferred for each in ratings)
    inside = [number for number, each in enumerate(decided) if each.pair == pair]
    scores = [_score(decided[number], pair[1]) for number in inside]
    prompts = [decided[number].id for number in inside]
    win_rate = Estimate(0.5, None, None, None)
    if scores:
        win_rate = statistics.estimate(scores, None, prompts, is_share=True)
        weight_dn = weight_dn[:, inside]
        drawn_d = weight_dn.sum(1)
        means = (weight_dn @ np.asarray(scores))[drawn_d > 0] / drawn_d[drawn_d > 0]
        win_rate = _widened(win_rate, means)
    return PairResult(
        run_a=pair[0],
        run_b=pair[1],
        wins_a=counts[pair[0]],
        wins_b=counts[pair[1]],
        ties=counts["tie"],
        skips=counts["skip"],
        prompts=len({each.id for each in ratings}),
        raters=len({each.rater for each in ratings}),
        win_rate=win_rate,
    )


def _score(rating: Rating, run: str) -> float:
    return rating.score if rating.run_b == run else 1 - rating.score


def _widened(known: Estimate, draws: Float[np.ndarray, "D"]) -> Estimate:
    """Return an estimate whose interval also covers the bootstrap's."""
    low, high = np.quantile(draws, [0.025, 0.975])
    if known.low is None or known.high is None:
        return known
    error = max(known.standard_error or 0.0, float(draws.std()))
    return Estimate(known.mean, error, min(known.low, float(low)), max(known.high, float(high)))


def _strengths(
    decided: Sequence[Rating], weight_dn: Float[np.ndarray, "D N"]
) -> dict[str, Estimate]:
    runs = sorted({run for each in decided for run in each.pair})
    if not runs:
        return {}
    index = {run: number for number, run in enumerate(runs)}
    a_n = np.array([index[each.run_a] for each in decided])
    b_n = np.array([index[each.run_b] for each in decided])
    score_n = np.array([each.score for each in decided])
    wins_drr = np.zeros((DRAWS + 1, len(runs), len(runs)))
    weights = np.concatenate([np.ones((1, len(decided))), weight_dn])
    for i, j in itertools.permutations(range(len(runs)), 2):
        won_n = (b_n == i) * (a_n == j) * score_n + (a_n == i) * (b_n == j) * (1 - score_n)
        is_compared = ((a_n == i) & (b_n == j) | (a_n == j) & (b_n == i)).any()
        wins_drr[:, i, j] = weights @ won_n + PRIOR * is_compared
    first_r, *draws = bradley_terry(wins_drr)
    low_r, high_r = np.quantile(draws, [0.025, 0.975], axis=0)
    error_r = np.std(draws, axis=0)
    estimates = zip(runs, first_r, error_r, low_r, high_r, strict=True)
    results = {run: Estimate(*map(float, values)) for run, *values in estimates}
    return dict(sorted(results.items(), key=lambda each: -each[1].mean))


def _agreement(decided: Sequence[Rating]) -> tuple[float | None, float | None, int]:
    """Return the share of equal choices, Krippendorff's alpha, and prompts with several raters.

    Source: Krippendorff 2011, Computing Krippendorff's alpha-reliability, nominal data.
    """
    by_prompt: dict[str, list[str]] = {}
    for each in decided:
        by_prompt.setdefault(each.id, []).append(each.preferred)
    shared = [choices for choices in by_prompt.values() if len(choices) > 1]
    if not shared:
        return None, None, 0
    pairs = [pair for choices in shared for pair in itertools.combinations(choices, 2)]
    agreement = sum(first == second for first, second in pairs) / len(pairs)
    totals = Counter(choice for choices in shared for choice in choices)
    size = totals.total()
    observed = sum(
        1 - sum(first == second for first, second in itertools.permutations(choices, 2))
        / (len(choices) * (len(choices) - 1))
        for choices in shared
        for _ in choices
    )  # fmt: skip
    expected = (size**2 - sum(count**2 for count in totals.values())) / (size - 1)
    return agreement, 1 - observed / expected if expected else None, len(shared)
