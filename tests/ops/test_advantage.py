import numpy as np
import pytest

from jaxlm.ops.advantage import EPSILON, advantages, gae, is_dead, whitened

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
    none = np.nan  # of an answer without a reward
    rewards = np.array([[1, 1, 1], [0, 0, 1], [none, 2, 2], [none, none, -3], [none] * 3])
    assert is_dead(rewards).tolist() == [True, False, True, True, True]
    assert not advantages(rewards, baseline="group", scale="group")[[0, 2, 3, 4]].any()


def _trajectories():
    draw = np.random.default_rng(1)
    rewards, values = draw.normal(size=(2, 3, 9))
    is_drawn = np.zeros((3, 9), bool)
    is_drawn[0, 2:7] = is_drawn[1, 1:] = True
    is_drawn[2, [1, 2, 5, 6, 7]] = True  # two turns: what is between them is not drawn
    return np.where(is_drawn, rewards, 0), values, is_drawn


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_gae_is_the_discounted_sum_of_errors(gamma, lam):
    """lam = 1: the return less the value. lam = 0: the error of one token."""
    rewards, values, is_drawn = _trajectories()
    out = gae(rewards, values, is_drawn, gamma=gamma, lam=lam)
    for row in range(3):
        r, v = rewards[row][is_drawn[row]], values[row][is_drawn[row]]
        errors = r + gamma * np.append(v[1:], 0) - v
        returns = [sum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))]
        identities = {0.0: errors, 1.0: np.array(returns) - v}
        powers = (gamma * lam) ** np.arange(len(r))
        expected = [(powers[: len(r) - t] * errors[t:]).sum() for t in range(len(r))]
        np.testing.assert_allclose(out[row][is_drawn[row]], expected, rtol=1e-12, atol=1e-14)
        if lam in identities:
            np.testing.assert_allclose(expected, identities[lam], rtol=1e-10, atol=1e-12)
    assert not out[~is_drawn].any()


def test_values_outside_of_an_answer_change_no_advantage():
    rewards, values, is_drawn = _trajectories()
    other = np.where(is_drawn, values, 1e6)
    terms = {"gamma": 0.9, "lam": 0.7}
    one, two = (gae(rewards, each, is_drawn, **terms) for each in (values, other))
    np.testing.assert_array_equal(one, two)
    normal = whitened(one, is_drawn)
    assert normal[is_drawn].mean() == pytest.approx(0, abs=1e-12)
    assert normal[is_drawn].std(ddof=1) == pytest.approx(1, rel=1e-3)
    assert not normal[~is_drawn].any()
