"""Groups of samples: who is trained on with which advantage, and groups that are drawn again."""

import numpy as np
import pytest

from jaxlm.objectives.config import Distill
from jaxlm.objectives.policy_config import Policy, Ppo
from jaxlm.rl.groups import Groups
from jaxlm.rl.rewards import Sample, Verdict
from jaxlm.rl.rollout import DrawnSample
from jaxlm.rl.scoring import ScoredSamples

COUNT = 4  # samples of a prompt
# Cut samples are those with a fraction. The groups: mixed, with an unscorable one, dead, and dead
# without the cut ones.
REWARDS = [[1, 0, 0, 3], [None, 2, 4, 0], [5, 5, 5, 5], [1, 1, 2.5, 0.5]]


def scored(rewards, first=0, seconds=1.0):
    """Samples of prompts from number `first` on; all columns of a sample have its own mark."""
    documents = [first + n for n, group in enumerate(rewards) for _ in group]
    totals = [each for group in rewards for each in group]
    marks = [100 * document + place for place, document in enumerate(documents)]
    samples = [
        Sample(f"p{document}", f"t{mark}", None, None, mark, reason, 1)
        for document, mark, reason in zip(documents, marks, map(_reason, totals), strict=True)
    ]
    drawn = [
        DrawnSample(np.array([n]), np.zeros(1), each.reason)
        for n, each in zip(marks, samples, strict=True)
    ]
    prompts = [np.array([document]) for document in documents]
    verdicts = [Verdict(total, {"r": total}, "") for total in totals]
    texts = [each.completion for each in samples]
    return ScoredSamples(documents, prompts, samples, drawn, verdicts, texts, seconds, seconds)


def _reason(total):
    return "length" if total is not None and total % 1 else "eos_token"


def marks(groups):
    """The marks of the samples, which all columns agree on."""
    rows = groups.scored
    columns = rows.documents, rows.prompts, rows.samples, rows.drawn, rows.texts
    for document, prompt, sample, drawn, text in zip(*columns, strict=True):
        assert prompt.tolist() == [document]
        assert sample.prompt == f"p{document}"
        assert [f"t{n}" for n in drawn.ids] == [text] == [sample.completion]
    return [each.seed for each in rows.samples]


@pytest.mark.parametrize("dead", ["drop", "keep"])
@pytest.mark.parametrize("truncated", ["score", "mask"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch", "none"])
def test_each_advantage_is_over_the_samples_that_count(baseline, truncated, dead):
    """A sample that has no reward, or is cut and masked, is in no mean and is not trained on."""
    settings = Policy(baseline=baseline, scale="none", truncated=truncated, dead_groups=dead)
    groups = Groups(scored(REWARDS), settings, COUNT)
    is_out = [[x is None or (truncated == "mask" and x % 1 > 0) for x in row] for row in REWARDS]
    values = [
        [x for x, out in zip(*rows, strict=True) if not out]
        for rows in zip(REWARDS, is_out, strict=True)
    ]
    expected = []
    for row, out, known in zip(REWARDS, is_out, values, strict=True):
        is_dropped = (
            dead == "drop" and len(set(known)) == 1 and baseline in ("group", "leave_one_out")
        )
        for reward, is_left in zip(row, out, strict=True):
            if is_left or is_dropped:
                expected.append(None)
                continue
            less = {"group": np.mean(known), "batch": np.mean(np.concatenate(values)), "none": 0.0}
            less["leave_one_out"] = (sum(known) - reward) / (len(known) - 1)
            expected.append(pytest.approx(reward - less[baseline]))
    assert groups.advantages() == expected
    assert groups.figures()["dead_groups"] == (0.5 if truncated == "mask" else 0.25)
    assert groups.figures()["reward_std"] == pytest.approx(np.mean([np.std(x) for x in values]))


@pytest.mark.parametrize("objective", [Ppo(), Distill(teacher="runs/a", sampled=0.5)])
def test_objectives_without_a_baseline_of_groups_have_the_rewards(objective):
    groups = Groups(scored(REWARDS), objective, COUNT)
    assert groups.advantages() == [each for row in REWARDS for each in row]


def test_groups_without_a_gradient_are_replaced_in_their_places():
    """By those of other prompts, and again where these have none either; never more than asked."""
    calls = []

    def redraw(dead, attempt):
        calls.append((dead, attempt))
        made = {(2, 1): [6, 6, 6, 6], (3, 1): [0, 1, 1, 1], (2, 2): [7, 7, 7, 8]}
        return scored([made[n, attempt] for n in dead], first=10 * attempt)

    begun = Groups(scored(REWARDS), Policy(truncated="mask", dead_groups="redraw"), COUNT)
    groups, count = begun.redrawn(redraw, 3)
    assert calls == [([2, 3], 1), ([2], 2)]
    assert count == 3
    assert groups.rewards[2:].tolist() == [[7, 7, 7, 8], [0, 1, 1, 1]]
    expected = marks(begun)
    expected[8:] = [*(2000 + n for n in range(4)), *(1100 + n for n in range(4, 8))]
    assert marks(groups) == expected
    assert None not in groups.advantages()[8:]
    assert (groups.scored.draw_seconds, groups.scored.score_seconds) == (3.0, 3.0)
    calls.clear()
    groups, count = begun.redrawn(redraw, 1)
    assert (len(calls), count) == (1, 2)
    assert groups.advantages()[8:12] == [None] * 4  # still dead, so not trained on
