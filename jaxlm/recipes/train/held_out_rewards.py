"""A warning of rewards that rise in training and fall on held-out prompts."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class HeldOutRewardWarning:
    """Warns once if the reward in training rises while that of held-out prompts falls.

    Both are compared with the first evaluation of the run, and the fall is more than two standard
    errors. `records` are earlier ones of the run.
    """

    def __init__(self, warn: Callable[..., None], records: Iterable[Mapping[str, Any]]):
        self._warn, self._has_warned = warn, False
        self._trained: float | None = None  # the newest reward of a rollout
        self._first: dict[str, tuple[float, float, float]] = {}
        for record in records:
            self._has_warned = self._note(record) is not None or self._has_warned

    def check(self, record: Mapping[str, Any]) -> None:
        """Check a record of a step or of an evaluation."""
        text = self._note(record)
        if text is not None and not self._has_warned:
            self._has_warned = True
            self._warn(text, step=record["step"])

    def _note(self, record: Mapping[str, Any]) -> str | None:
        reward, split = record.get("reward"), str(record.get("split"))
        if reward is None:
            return None
        if split == "train":
            self._trained = reward
            return None
        if self._trained is None:  # before the first step: the first rollout is of this model
            return None
        error = record.get("reward_stderr") or 0.0
        first, first_error, trained = self._first.setdefault(split, (reward, error, self._trained))
        is_lower = first - reward > 2 * math.hypot(error, first_error)
        if not is_lower or self._trained <= trained:
            return None
        return (
            f"the reward of {split} fell from {first:.4g} to {reward:.4g} while that in training"
            f" rose from {trained:.4g} to {self._trained:.4g}: the model learns what is not asked;"
            " read the samples of the report, and try the reward by `jaxlm reward try`"
        )
