"""Seeded faults of rollouts, scores and groups: each is caught by a named test."""

import pytest

from jaxlm.core.errors import Diverged
from jaxlm.recipes.train.rollouts import Rollouts
from jaxlm.rl.groups import Groups
from jaxlm.rl.scoring import PromptScorer, ScoredSamples
from tests.mutation import mutate
from tests.recipes.train import test_rollouts
from tests.rl import test_groups, test_scoring

redrawn = test_groups.test_groups_without_a_gradient_are_replaced_in_their_places
scored = test_scoring.test_each_sample_has_its_own_score_and_seed_though_others_end_before
room = test_scoring.test_a_tool_reads_the_last_turn_and_has_the_room_that_the_row_leaves
passed = test_scoring.test_an_evaluation_has_the_share_of_prompts_that_k_samples_pass
others = test_rollouts.test_groups_that_are_drawn_again_have_other_prompts_and_keys_of_their_own
in_a_row = test_rollouts.test_rollouts_without_a_gradient_end_a_run_if_they_are_in_a_row


def dropped():
    test_groups.test_each_advantage_is_over_the_samples_that_count("group", "mask", "drop")


def lagged():
    test_rollouts.test_each_rollout_is_drawn_once_from_the_parameters_of_a_lag_before(1)


# Name: the owner, its function, the text that changes, that of the fault, and the check.
MUTANTS = {
    "samples without a score are trained on": (
        *(Groups, "advantages", "is_left = np.isnan(rewards)\n", "is_left = rewards > 9\n"),
        dropped,
    ),
    "dead groups are trained on": (
        *(Groups, "advantages", 'dead_groups != "keep"', 'dead_groups == "keep"'),
        dropped,
    ),
    "advantages of other groups": (
        *(Groups, "advantages", "values.flat", "values[::-1].flat"),
        dropped,
    ),
    "rewards from before drawing again": (
        *(Groups, "redrawn", "is_dead(groups.rewards)", "is_dead(self.rewards)"),
        redrawn,
    ),
    "one attempt too many": (Groups, "redrawn", "most + 1", "most + 2", redrawn),
    "a group replaces another": (
        *(ScoredSamples, "with_groups", "column[group * count : (group + 1) * count]",
          "column[place * count : (place + 1) * count]"),
        redrawn,
    ),
    "a group keeps its verdicts": (
        *(ScoredSamples, "with_groups", "joined(self.verdicts, others.verdicts)", "self.verdicts"),
        redrawn,
    ),
    "verdicts in the order of their ends": (
        *(PromptScorer, "score", "sorted(waiting)", "waiting"),
        scored,
    ),
    "samples in the order of their ends": (
        *(PromptScorer, "score", "[samples[number] for number in range(len(repeated))]",
          "[*samples.values()]"),
        scored,
    ),
    "one seed for all rewards": (
        *(PromptScorer, "score", "[number], drawn, seeds[number]", "[number], drawn, seeds[0]"),
        scored,
    ),
    "the completion has all turns": (
        *(PromptScorer, "_sample", "drawn.last_turn", "drawn.ids"),
        scored,
    ),
    "tokens of a tool count": (
        *(PromptScorer, "_sample", "int(drawn.mask.sum())", "len(drawn.ids)"),
        scored,
    ),
    "a tool has the room of its prompt": (
        *(PromptScorer, "score", "len(ids[document]) + len(drawn.ids)", "len(ids[document])"),
        room,
    ),
    "samples of one prompt for those of another": (
        *(PromptScorer, "evaluate", "reshape(-1, samples).sum(1)", "reshape(samples, -1).sum(0)"),
        passed,
    ),
    "the keys of training": (
        *(PromptScorer, "evaluate", 'root_key(seed, "held out")', "root_key(seed)"),
        passed,
    ),
    "greedy samples are drawn": (
        *(PromptScorer, "evaluate", "is_greedy=True", "is_greedy=False"),
        passed,
    ),
    "prompts that were drawn before": (
        *(Rollouts, "_scored", "(number + 1) * prompts, attempt)", "(number + 1) * prompts, 0)"),
        others,
    ),
    "keys that were drawn before": (
        *(Rollouts, "_scored", 'f"redraw {attempt}" if attempt else "rollout"', '"rollout"'),
        others,
    ),
    "keys in the order of dead groups": (
        *(Rollouts, "_scored", "[np.array(groups)]", "[: len(groups)]"),
        others,
    ),
    "a lag that is one too large": (Rollouts, "_draw_ahead", "rl.lag + 1", "rl.lag + 2", lagged),
    "no lag": (Rollouts, "_draw_ahead", "rl.lag + 1", "1", lagged),
    "the step of another rollout": (
        *(Rollouts, "_draw_ahead", "(number - rollout) * rl.steps", "0"),
        lagged,
    ),
    "dead rollouts that are not in a row": (
        *(Rollouts, "_count_dead", "if drawing.is_dead else 0",
          "if drawing.is_dead else self._dead"),
        in_a_row,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_fault_is_caught(name, monkeypatch):
    owner, function, old, new, check = MUTANTS[name]
    check()
    mutate(monkeypatch, owner, function, old, new)
    with pytest.raises((AssertionError, pytest.fail.Exception, KeyError, Diverged)):
        check()
