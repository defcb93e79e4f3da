"""The best of n by a judge, against all draws in float64."""

import itertools
import random

import pytest

from jaxlm.evals.best_of_n import ScoredAnswer, best_of_n


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_each_mean_is_that_of_all_draws(samples):
    draw = random.Random(samples)
    prompts = [
        [
            ScoredAnswer(draw.choice([0.1, 0.5, 0.7, 0.9]), float(draw.random() < 0.4))
            for _ in range(n)
        ]
        for n in (5, 6, 7)
    ]

    def best(answers):
        highest = max(each.score for each in answers)
        truths = [each.truth for each in answers if each.score == highest]
        return highest, sum(truths) / len(truths), max(each.truth for each in answers)

    # Ties are broken at random: by the mean over all orders, not over those of one draw.
    score, truth, possible = (0.0, 0.0, 0.0)
    for answers in prompts:
        draws = [best(each) for each in itertools.combinations(answers, samples)]
        means = [sum(column) / len(draws) for column in zip(*draws, strict=True)]
        score, truth, possible = (
            total + mean / len(prompts)
            for total, mean in zip((score, truth, possible), means, strict=True)
        )
    result = best_of_n(prompts, samples)
    assert result.score == pytest.approx(score, rel=1e-12)
    assert result.possible == pytest.approx(possible, rel=1e-12)
    assert result.truth == pytest.approx(truth, rel=1e-12)
    assert result.prompts == 3


def test_prompts_with_fewer_answers_are_left_out():
    prompts = [[ScoredAnswer(0.0, 1.0)] * 2, [ScoredAnswer(0.0, 0.0)] * 4]
    assert best_of_n(prompts, 3)[:4] == (3, 1, 0.0, 0.0)
    with pytest.raises(ValueError, match="no prompt has 5"):
        best_of_n(prompts, 5)
