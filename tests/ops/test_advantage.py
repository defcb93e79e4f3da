import numpy as np
import pytest

from jaxlm.ops.advantage import EPSILON, advantages, is_dead

REWARDS = np.random.default_rng(0).random((5, 4))


def by_hand(rewards, baseline, scale):
    out = np.zeros_like(rewards)
    for prompt, group in enumerate(rewards):
        for sample, reward in enumerate(group):
            others = np.delete(group, sample)
            less = {"none": 0, "group": group.mean(), "leave_one_out": others.mean()}
            less["batch"] = rewards.mean()
            units = {"none": 1, "group": group.std(ddof=1) + EPSILON}
            units["batch"] = rewards.std(ddof=1) + EPSILON
            out[prompt, sample] = (reward - less[baseline]) / units[scale]
    return out


@pytest.mark.parametrize("baseline", ["none", "batch", "group", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "batch", "group"])
def test_advantages_are_those_of_each_sample_alone(baseline, scale):
    expected = by_hand(REWARDS, baseline, scale)
    np.testing.assert_allclose(
        advantages(REWARDS, baseline=baseline, scale=scale), expected, rtol=1e-12
    )


@pytest.mark.parametrize("baseline", ["batch", "group", "leave_one_out"])
def test_an_answer_without_a_reward_changes_no_other_one(baseline):
    """The advantages are those of a smaller group, and not those of a reward of 0."""
    whole = np.concatenate((REWARDS, np.full((5, 1), np.nan)), axis=1)
    out = advantages(whole, baseline=baseline, scale="group")
    np.testing.assert_allclose(out[:, :4], advantages(REWARDS, baseline=baseline, scale="group"))
    assert not out[:, 4].any()


def test_groups_of_equal_rewards_are_dead():
    rewards = np.array([[1, 1, 1], [0, 0, 1], [np.nan, 2, 2], [np.nan, np.nan, 3], [np.nan] * 3])
    assert is_dead(rewards).tolist() == [True, False, True, True, True]
    assert not advantages(rewards, baseline="group", scale="group")[[0, 2, 3, 4]].any()
