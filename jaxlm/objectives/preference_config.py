"""Settings of the objectives on compared or judged answers. Free of JAX."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.objectives.facts import ObjectiveFacts, Prompts

AUTO = "auto"
PreferenceLoss = Literal["dpo", "ipo", "kto", "orpo", "simpo", "hinge"]
Noise = Literal["conservative", "robust"]
WITHOUT_REFERENCE: tuple[PreferenceLoss, ...] = ("orpo", "simpo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preference(ObjectiveFacts):
    """Prefer chosen answers to rejected ones, without drifting from a reference."""

    name: Literal["preference"] = "preference"
    loss: PreferenceLoss = setting(
        "dpo", "dpo, ipo, hinge and kto compare with a reference; orpo and simpo have none"
    )
    reference: str = setting(
        AUTO,
        "model that answers are compared with: start, the weights before the first step, scored "
        "once; adapter_off, the base of an adapter, scored in each step; RUN or RUN@STEP; none; "
        "auto is start, and none for orpo and simpo",
    )
    beta: float = setting(
        0.1, "weight of the log-ratios; tau of ipo, and the odds ratio's weight of orpo", above=0
    )
    smoothing: float = setting(
        0.0, "share of the pairs of dpo that are in the wrong order", low=0, high=0.49
    )
    noise: Noise = setting(
        "conservative", "smoothing: conservative lowers its confidence; robust has no bias by it"
    )
    gamma: float = setting(0.5, "margin of simpo, in units of its scores times beta", low=0)
    nll: float = setting(
        0.0, "weight of the chosen answer's negative log-likelihood a token; orpo adds 1", low=0
    )
    length: Literal["auto", "sum", "mean"] = setting(
        "auto",
        "log-probability of an answer: sum over its tokens, or mean; auto is mean for ipo, orpo "
        "and simpo",
    )

    keeps_rows: ClassVar[bool] = True
    compares_answers: ClassVar[bool] = True

    @property
    def compared_with(self) -> str | None:
        """Return the model that answers are compared with; None without one."""
        if self.reference == AUTO:
            return None if self.loss in WITHOUT_REFERENCE else "start"
        return None if self.reference == "none" else self.reference

    @property
    def is_mean(self) -> bool:
        """Return whether an answer's log-probability is the mean over its tokens."""
        if self.length == "auto":
            return self.loss in ("ipo", *WITHOUT_REFERENCE)
        return self.length == "mean"

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check the reference, the smoothing and the length against the loss."""
        if self.compared_with is None and self.loss not in WITHOUT_REFERENCE:
            why = f"{self.loss} compares the model with a reference"
            yield (
                "reference",
                why,
                "--config.objective.reference=start\n--config.objective.loss=simpo",
            )
        if self.smoothing and self.loss != "dpo":
            why = f"{self.loss} has no smoothing of labels"
            yield "smoothing", why, "--config.objective.smoothing=0\n--config.objective.loss=dpo"
        if self.length == "sum" and self.loss in WITHOUT_REFERENCE:
            why = f"{self.loss} compares mean log-probabilities of a token"
            yield "length", why, "--config.objective.length=auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(ObjectiveFacts):
    """Score chosen answers above rejected ones: a reward model, by Bradley and Terry."""

    name: Literal["reward"] = "reward"
    margin: float = setting(
        1.0,
        "factor of the margin of a pair, which its scores should differ by; 0 ignores it",
        low=0,
    )
    center: float = setting(
        0.0, "weight of the squared sum of both scores of a pair, which keeps scores near 0", low=0
    )

    keeps_rows: ClassVar[bool] = True
    compares_answers: ClassVar[bool] = True
    has_reward_head: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process(ObjectiveFacts):
    """Score the steps of an answer, which have labels: a process reward model."""

    name: Literal["process"] = "process"

    keeps_rows: ClassVar[bool] = True
    compares_answers: ClassVar[bool] = True
    has_reward_head: ClassVar[bool] = True
    labels_steps: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "none"
