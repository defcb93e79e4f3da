"""Best of n: the truth of the answers that a judge prefers, by the number that it chooses from.

Example:
  >>> prompts = [[ScoredAnswer(0.1, 0.0), ScoredAnswer(0.4, 1.0), ScoredAnswer(0.2, 0.0)]]
  >>> best = best_of_n(prompts, 2)
  >>> round(best.truth, 4), round(best.score, 4)
  (0.6667, 0.3333)
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class ScoredAnswer(NamedTuple):
    """The score of an answer by a judge, and its true score."""

    score: float
    truth: float


class BestOfN(NamedTuple):
    """Means over prompts of the answer that is chosen from `samples` answers.

    Args:
      samples: answers that one is chosen from.
      prompts: number of prompts.
      score: score of the chosen answer by the judge.
      truth: its true score.
      possible: true score of the best answer, as the truth itself would choose.
      kl_nats: the most that the choice can differ from the sampler, log n - (n - 1) / n.
    """

    samples: int
    prompts: int
    score: float
    truth: float
    possible: float
    kl_nats: float


def best_of_n(prompts: Sequence[Sequence[ScoredAnswer]], samples: int) -> BestOfN:
    """Return the means over all ways to draw `samples` of the answers of a prompt.

    Of N sorted answers the one of rank i is the best of n in C(i - 1, n - 1) of C(N, n) draws.
    Answers of equal scores are chosen equally often. Prompts with fewer answers are left out.

    Args:
      prompts: the answers of each prompt.
      samples: number n of answers that are drawn.

    Raises ValueError if no prompt has as many answers.

    Source: Nakano et al. 2021, arXiv:2112.09332, appendix I (the estimator); Beirami et al. 2024,
    arXiv:2401.01879, theorem 1 (the bound of the divergence).
    """
    enough = [answers for answers in prompts if len(answers) >= samples]
    if not enough:
        raise ValueError(f"no prompt has {samples} answers")
    chosen = [_chosen(answers, samples) for answers in enough]
    ideal = [_chosen([ScoredAnswer(a.truth, a.truth) for a in each], samples) for each in enough]
    count = len(enough)
    return BestOfN(
        samples,
        count,
        sum(each.score for each in chosen) / count,
        sum(each.truth for each in chosen) / count,
        sum(each.truth for each in ideal) / count,
        math.log(samples) - (samples - 1) / samples,
    )


def _chosen(answers: Sequence[ScoredAnswer], samples: int) -> ScoredAnswer:
    """Return the expected scores of the best of `samples` answers."""
    ranked = sorted(answers, key=lambda each: each.score)
    draws, rank, score, truth = math.comb(len(ranked), samples), 0, 0.0, 0.0
    for value, group in itertools.groupby(ranked, key=lambda each: each.score):
        equal = [each.truth for each in group]
        ways = sum(math.comb(rank + n, samples - 1) for n in range(len(equal)))
        score += ways / draws * value
        truth += ways / draws * sum(equal) / len(equal)
        rank += len(equal)
    return ScoredAnswer(score, truth)
