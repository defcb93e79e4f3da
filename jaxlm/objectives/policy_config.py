"""Settings of the objectives that learn from samples of the model. Free of JAX."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from jaxlm.core.config import setting
from jaxlm.objectives.facts import ObjectiveFacts
from jaxlm.objectives.preference_config import AUTO
from jaxlm.ops.advantage import Baseline, Scale

Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo", "reinforce"]
MeanOf = Literal["sequence", "token", "constant", "sum"]
Surrogate = Literal["clip", "weight", "plain"]
Ratio = Literal["token", "sequence"]
Truncated = Literal["score", "mask"]
Kl = Literal["none", "reward_k1", "loss_k3", "loss_k3_weighted"]
START = "start"  # reference: the run that a run begins with
REFERENCE = (
    "reference of kl: adapter_off, the base of an adapter; start, the run of --init_from; RUN or "
    "RUN@STEP"
)
MEAN = (
    "sequence: mean over the tokens of a sample, then over samples; token: mean over all tokens; "
    "constant: sum over tokens over rl.max_tokens, mean over samples; sum: sum over tokens, mean "
    "over samples"
)
TRUNCATED = (
    "samples cut at rl.max_tokens: score rewards them as they are; mask leaves them out of the loss"
)


class PolicyTerms(NamedTuple):
    """The parts of the loss of an algorithm, see `Policy`."""

    baseline: Baseline
    scale: Scale
    mean: MeanOf
    surrogate: Surrogate
    ratio: Ratio
    clip_low: float
    clip_high: float

    @property
    def has_group_baseline(self) -> bool:
        """Return whether the baseline is of the samples of a prompt, which must differ."""
        return self.baseline in ("group", "leave_one_out")


ALGORITHMS: dict[Algorithm, PolicyTerms] = {
    "grpo": PolicyTerms("group", "group", "sequence", "clip", "token", 0.2, 0.2),
    "dr_grpo": PolicyTerms("group", "none", "constant", "clip", "token", 0.2, 0.2),
    "dapo": PolicyTerms("group", "group", "token", "clip", "token", 0.2, 0.28),
    "gspo": PolicyTerms("group", "group", "sequence", "clip", "sequence", 3e-4, 4e-4),
    "rloo": PolicyTerms("leave_one_out", "none", "sum", "plain", "token", 0.2, 0.2),
    "cispo": PolicyTerms("group", "group", "token", "weight", "token", 0.2, 4.0),
    "reinforce": PolicyTerms("batch", "none", "sum", "plain", "token", 0.2, 0.2),
}


class SamplesAnswers(ObjectiveFacts):
    """Facts of an objective that learns from samples of the model, near a reference perhaps."""

    kl: Kl
    reference: str

    keeps_rows = True
    samples_answers = True

    @property
    def teacher(self) -> str | None:  # type: ignore[override]
        """Return start, or the run of the reference; None without one, or if it is the base."""
        return None if self.kl == "none" or self._is_base else self.reference

    @property
    def compared_with(self) -> str | None:
        """Return adapter_off if the reference is the base of an adapter; else None."""
        return "adapter_off" if self.kl != "none" and self._is_base else None

    @property
    def _is_base(self) -> bool:
        return self.reference == "adapter_off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(SamplesAnswers):
    """Raise the reward of answers that the model samples: policy gradients.

    The loss is sum_t w_t L_t / N over the sampled tokens. An algorithm is a name for the settings
    from `baseline` to `clip_high`; each may be set alone.

    Source: Shao et al. 2024, arXiv:2402.03300 (grpo); Liu et al. 2025, arXiv:2503.20783 (dr_grpo);
    Yu et al. 2025, arXiv:2503.14476 (dapo); Zheng et al. 2025, arXiv:2507.18071 (gspo); Ahmadian et
    al. 2024, arXiv:2402.14740 (rloo); MiniMax 2025, arXiv:2506.13585 (cispo); Williams 1992
    (reinforce).
    """

    name: Literal["policy"] = "policy"
    algorithm: Algorithm = setting(
        "grpo", "the settings from baseline to clip_high that are not set"
    )
    baseline: Literal["auto", Baseline] = setting(
        AUTO,
        "subtracted from a reward: group, the mean of the prompt's samples; leave_one_out, that of "
        "its other samples; batch, that of all; none",
        derived_from="algorithm",
    )
    scale: Literal["auto", Scale] = setting(
        AUTO,
        "divisor of an advantage: standard deviation of the rewards of the group, or of the batch; "
        "none",
        derived_from="algorithm",
    )
    mean: Literal["auto", MeanOf] = setting(
        AUTO,
        MEAN,
        derived_from="algorithm",
    )
    surrogate: Literal["auto", Surrogate] = setting(
        AUTO,
        "loss of a token with advantage A and ratio r to the distribution drawn from: clip, "
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); weight, -min(r, 1 + clip_high) A log p "
        "with a constant weight; plain, -r A",
        derived_from="algorithm",
    )
    ratio: Literal["auto", Ratio] = setting(
        AUTO,
        "r of each token, or the geometric mean over the sample",
        derived_from="algorithm",
    )
    clip_low: float | None = setting(
        None,
        "distance below 1 at which r is clipped; None for that of the algorithm",
        low=0,
        derived_from="algorithm",
    )
    clip_high: float | None = setting(
        None,
        "distance above 1 at which r is clipped; None for that of the algorithm",
        low=0,
        derived_from="algorithm",
    )
    kl: Kl = setting(
        "none",
        "penalty on the distance from the reference: reward_k1 subtracts the log-ratio of the rest "
        "of the sample from the advantage, whose gradient is that of the divergence of samples; "
        "loss_k3 adds an estimate at each token, whose gradient is that of the reverse divergence; "
        "loss_k3_weighted multiplies it by r, whose gradient is that of the divergence at a token",
    )
    beta: float = setting(0.04, "weight of the penalty of kl", above=0)
    reference: str = setting("adapter_off", REFERENCE)
    truncated: Truncated = setting("score", TRUNCATED)
    dead_groups: Literal["drop", "keep", "redraw"] = setting(
        "drop",
        "samples of a prompt whose rewards are equal: drop leaves them out of the mean; keep "
        "counts them with their loss, which only kl makes other than 0; redraw draws other prompts "
        "instead, at most rl.redraws times, and drops what is left",
    )

    @property
    def terms(self) -> PolicyTerms:
        """Return the parts of the loss: those that are set, else those of the algorithm."""
        default = ALGORITHMS[self.algorithm]
        chosen = {name: getattr(self, name) for name in PolicyTerms._fields}
        return default._replace(**{n: v for n, v in chosen.items() if v not in (AUTO, None)})

    def derived(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (setting, value, reason) for the settings that the algorithm determines."""
        for name, value in self.terms._asdict().items():
            if getattr(self, name) in (AUTO, None):
                yield name, value, f"objective.algorithm = {self.algorithm}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(SamplesAnswers):
    """Raise the reward of answers that the model samples, against values that it predicts: PPO.

    Source: Schulman et al. 2017, arXiv:1707.06347 (clipped ratios); Schulman et al. 2016,
    arXiv:1506.02438 (advantages).
    """

    name: Literal["ppo"] = "ppo"
    gamma: float = setting(1.0, "discount of the reward by token", above=0, high=1)
    gae_lambda: float = setting(
        0.95,
        "weight of later errors of the value in an advantage: 1, the return less the value; 0, the "
        "error of one token",
        low=0,
        high=1,
    )
    scale: Literal["none", "batch"] = setting(
        "batch", "batch: advantages of a rollout get mean 0 and deviation 1 over its tokens; none"
    )
    mean: MeanOf = setting(
        "token",
        MEAN,
    )
    clip_low: float = setting(0.2, "distance below 1 at which the ratio is clipped", low=0)
    clip_high: float = setting(0.2, "distance above 1 at which the ratio is clipped", low=0)
    value_weight: float = setting(0.1, "weight of the loss of the value", above=0)
    value_clip: float | None = setting(
        0.2,
        "distance from the value at drawing beyond which it is clipped; None for no clip",
        low=0,
    )
    value_rate: float = setting(
        10.0, "learning rate of the value head over that of the other parameters", above=0
    )
    kl: Kl = setting(
        "none",
        "penalty on the distance from the reference: reward_k1 subtracts the log-ratio of each "
        "token from its reward; loss_k3 and loss_k3_weighted are those of the objective policy",
    )
    beta: float = setting(0.04, "weight of the penalty of kl", above=0)
    reference: str = setting("adapter_off", REFERENCE)
    truncated: Truncated = setting("score", TRUNCATED)

    has_value_head: ClassVar[bool] = True
    dead_groups: ClassVar[str] = "keep"  # the baseline is of no group

    @property
    def terms(self) -> PolicyTerms:
        """Return the parts of the loss; the baseline is the value, see `ops.advantage.gae`."""
        clip = self.clip_low, self.clip_high
        return PolicyTerms("none", "none", self.mean, "clip", "token", *clip)
