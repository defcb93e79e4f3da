"""Scores of completions: the weighted sum of the rewards of a run."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.core.quoting import safe
from jaxlm.rl import verifiers
from jaxlm.rl.reward_config import RewardConfig, Term
from jaxlm.rl.verifiers import Sample, Unscorable

__all__ = ["Rewards", "Sample", "Verdict", "check_scored"]

SHOWN = 60  # characters of a prompt in an error


class Verdict(NamedTuple):
    """The score of a sample.

    Args:
      total: weighted sum; None if a reward could not score the sample.
      by_name: value of each reward by its label, None where there is none.
      problem: the reason, with the label of the reward; empty if there is a total.
    """

    total: float | None
    by_name: dict[str, float | None]
    problem: str


class Rewards:
    """The rewards of a run, in a `with` block.

    `digest` identifies the functions, their weights and their arguments.

    Args:
      settings: the rewards and their limits.
    """

    def __init__(self, settings: RewardConfig) -> None:
        self._terms = settings.terms
        self.digest = hashlib.sha256(repr(self._terms).encode()).hexdigest()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        """End the block."""

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdict on each sample, in their order."""
        return [self._verdict([_value(each, sample) for each in self._terms]) for sample in samples]

    def _verdict(self, values: Sequence[float | str]) -> Verdict:
        """Return the sum of the values of the terms; a text is the reason why there is none."""
        by_name: dict[str, float | None] = {}
        total, problem = 0.0, ""
        for each, value in zip(self._terms, values, strict=True):
            if isinstance(value, str):
                by_name[each.label] = None
                problem = problem or f"{each.label}: {value}"
            else:
                by_name[each.label] = value
                total += each.weight * value
        if not problem and not math.isfinite(total):
            problem = f"the sum of the rewards is {total}"
        return Verdict(None if problem else total, by_name, problem)


def _value(each: Term, sample: Sample) -> float | str:
    try:
        return verifiers.VERIFIERS[each.name](sample, each.argument)
    except Unscorable as error:
        return str(error)


def check_scored(
    samples: Sequence[Sample], verdicts: Sequence[Verdict], tolerance: float, where: str
) -> None:
    """Raise DataError, with prompts and reasons, if too many samples have no score.

    Args:
      samples: the samples of a step.
      verdicts: the verdict on each.
      tolerance: share that may have none.
      where: place of the samples in the run.
    """
    missing = [pair for pair in zip(samples, verdicts, strict=True) if pair[1].total is None]
    if len(missing) <= tolerance * len(samples):
        return
    reasons = Counter((each.problem, sample.prompt) for sample, each in missing)
    raise DataError(
        f"{len(missing)} of {len(samples)} samples have no score",
        where=where,
        why=f"reward.tolerance allows a share of {tolerance:g}; reasons and prompts:",
        every=[
            f"{problem}: {safe(prompt[:SHOWN])!r}" for (problem, prompt), _ in reasons.most_common()
        ],
        fix="correct the answers of these prompts",
    )
