"""Warnings about records: dropped tokens, unlikelier answers, held-out rewards, other samples."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxlm.core.quoting import safe

STEPS_JUDGED = 3  # logged steps whose mean likelihood of chosen answers is judged
UNLIKELIER = 1.2  # of their first nats
SHOWN = 60  # characters of a prompt in a warning


class DroppedTokenWarning:
    """Warns of tokens that experts dropped: at the first, and whenever their share has doubled."""

    def __init__(self, warn: Callable[..., None]):
        self._warn, self._last_share = warn, 0.0

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the means of a logged step."""
        share = values.get("moe_dropped", 0.0)
        if share > 2 * self._last_share:
            self._last_share = share
            self._warn(
                f"step {step}: experts dropped {share:.2%} of the tokens routed to them, because"
                f" they were full (model.capacity); the largest load is"
                f" {values['moe_load_max']:.3g} times the mean; next warning when the share"
                " doubles",
                step=step,
            )


class UnlikelierAnswerWarning:
    """Warns once if chosen answers became less likely by a fifth: of the mean of a few steps.

    `records` are earlier ones of the run; the first of its steps is what later ones are compared
    with. `nll` is the weight of the chosen answers' loss in the objective.
    """

    def __init__(
        self, warn: Callable[..., None], records: Iterable[Mapping[str, Any]], nll: float = 0.0
    ):
        self._warn, self._larger = warn, max(0.2, 2 * nll)
        self._nats = [
            record["chosen_nats"]
            for record in records
            if record.get("split") == "train" and record.get("chosen_nats") is not None
        ]
        self._has_warned = self._is_unlikelier()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the means of a logged step."""
        nats = values.get("chosen_nats", math.nan)
        if math.isnan(nats):
            return
        self._nats.append(nats)
        if not self._has_warned and self._is_unlikelier():
            self._has_warned = True
            self._warn(
                f"step {step}: chosen answers have {self._mean():.3g} nats a token, and had"
                f" {self._nats[0]:.3g} at the start: the model prefers them and writes them less"
                f" often; --config.objective.nll={self._larger:g} of a new run keeps them likely",
                step=step,
            )

    def _mean(self) -> float:
        last = self._nats[-STEPS_JUDGED:]
        return sum(last) / len(last)

    def _is_unlikelier(self) -> bool:
        return len(self._nats) > STEPS_JUDGED and self._mean() > UNLIKELIER * self._nats[0]


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


class RedrawnSampleWarning:
    """Warns once if a run that resumes draws other samples, or rewards the same ones differently.

    The first rollout is drawn from parameters that were saved, and has the earlier samples. Later
    ones have other samples after other steps, such as those of another learning rate.

    `lines` are those of rollouts.jsonl that the run will write again.
    """

    def __init__(self, warn: Callable[..., None], lines: Iterable[bytes]):
        self._warn, self._is_first = warn, True
        self._earlier: dict[int, list[dict[str, Any]]] = {}
        for text in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # a torn one
                record = json.loads(text)
                self._earlier.setdefault(record["step"], []).append(record)

    def check(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Compare the samples of a step with those that it had before."""
        is_first, self._is_first = self._is_first, False
        for mine, earlier in zip(records, self._earlier.pop(step, ()), strict=False):
            prompt = f"the prompt {safe(str(mine['prompt'])[:SHOWN])!r}"
            if any(mine[name] != earlier.get(name) for name in ("document", "digest")):
                text = f"{prompt} has other samples than before the run resumed: its device, its"
                text += " versions or rl.slots differ"
            elif mine["reward"] != earlier.get("reward"):
                text = f"the reward of {prompt} was {earlier.get('reward')} before the run resumed,"
                text += f" and is {mine['reward']}: draw from the argument `seed` alone"
                is_first = True
            else:
                continue
            self._earlier.clear()
            if is_first:
                self._warn(f"step {step}: {text}", step=step)
            return
