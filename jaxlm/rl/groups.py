"""Groups of samples, those of a prompt: their advantages, and groups that are drawn again."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxlm.objectives.config import Sampling
from jaxlm.objectives.policy_config import Truncated
from jaxlm.ops.advantage import advantages, is_dead
from jaxlm.rl.scoring import ScoredSamples, mean

# Samples of other prompts in the place of some groups, of an attempt from 1 on.
Redraw = Callable[[Sequence[int], int], ScoredSamples]


class Groups(NamedTuple):
    """The samples of a rollout, `samples` of each prompt one after another."""

    scored: ScoredSamples
    objective: Sampling
    samples: int

    @property
    def rewards(self) -> Float[np.ndarray, "P S"]:
        """The reward of each sample; NaN if it has none, or was cut and is masked."""
        reasons = [each.reason for each in self.scored.samples]
        return by_group(self.scored.rewards, reasons, self.samples, self.objective.truncated)

    def redrawn(self, redraw: Redraw, most: int) -> tuple["Groups", int]:
        """Return groups of other prompts in place of those without a gradient, and how many.

        Those that still have none are replaced again, up to `most` times.
        """
        groups, replaced = self, 0
        for attempt in range(1, most + 1):
            dead = np.flatnonzero(is_dead(groups.rewards)).tolist()
            if not dead:
                break
            replaced += len(dead)
            others = redraw(dead, attempt)
            scored = groups.scored.with_groups(dead, others, self.samples)
            groups = groups._replace(scored=scored)
        return groups, replaced

    def advantages(self) -> list[float | None]:
        """Return the advantage of each sample; None if it is not trained on."""
        rewards, terms = self.rewards, self.objective.terms
        is_left = np.isnan(rewards)
        if terms.has_group_baseline and self.objective.dead_groups != "keep":
            is_left = is_left | is_dead(rewards)[:, None]
        values = advantages(rewards, baseline=terms.baseline, scale=terms.scale)
        pairs = zip(is_left.flat, values.flat, strict=True)
        return [None if is_out else float(value) for is_out, value in pairs]

    def figures(self) -> dict[str, float]:
        """Return the spread of rewards in a group, and the share of groups without one."""
        rewards = self.rewards
        known = [group[~np.isnan(group)] for group in rewards]
        return {
            "reward_std": mean(np.array([group.std() for group in known if len(group)])),
            "dead_groups": float(is_dead(rewards).mean()),
        }


def by_group(
    rewards: Float[np.ndarray, "N"], reasons: Sequence[str], samples: int, truncated: Truncated
) -> Float[np.ndarray, "P S"]:
    """Return the reward of each sample of a prompt; NaN if it has none, or was cut and is masked.

    `reasons` are those for which each sample ended, and `samples` is the number of a prompt.
    """
    if truncated == "mask":
        rewards = np.where(np.array([each == "length" for each in reasons]), np.nan, rewards)
    return rewards.reshape(-1, samples)
