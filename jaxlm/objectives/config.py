"""Settings of the objective and of the loss. Free of JAX.

Example:
  >>> Causal().keeps_rows, Masked().prompts, UL2().architectures
  (True, 'none', ('decoder', 'encoder-decoder'))
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from jaxlm.core.config import setting
from jaxlm.core.own import Interface
from jaxlm.models.config import HeadKind, MtpConfig
from jaxlm.ops.advantage import Baseline, Scale

BLOCK_POSITIONS = 512  # distinct second positions inside a blank
# Rate and mean length of the spans of UL2's denoisers R (the first two) and X; S is a suffix.
UL2_SPANS = ((0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
UL2_SUFFIX = 0.25  # share of a text that the denoiser S predicts
AUTO = "auto"
PreferenceLoss = Literal["dpo", "ipo", "kto", "orpo", "simpo", "hinge"]
Noise = Literal["conservative", "robust"]
WITHOUT_REFERENCE: tuple[PreferenceLoss, ...] = ("orpo", "simpo")
Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo", "reinforce"]
MeanOf = Literal["sequence", "token", "constant", "sum"]
Surrogate = Literal["clip", "weight", "plain"]
Ratio = Literal["token", "sequence"]
Truncated = Literal["score", "mask"]
Kl = Literal["none", "reward_k1", "loss_k3", "loss_k3_weighted"]
Architecture = Literal["decoder", "encoder", "encoder-decoder"]
# The way a model trained on an objective reads a prompt; "none": it cannot continue one.
Prompts = Literal["left to right", "both ways", "none"]


class ObjectiveFacts:
    """Facts of an objective that the model, the data and the rest of a run depend on.

    Attributes:
      bidirectional: some slots attend to later slots.
      prompts: the way a model trained on this reads a prompt.
      keeps_rows: rows stay as they were packed, every token predicted from those before it.
      evaluated_as_causal: validation rows are read as by `causal`.
      architectures: models that the objective can train.
      block_positions: size of the table of second positions that the model needs, if any.
      marks_mtp_rows: batches mark the rows that predict tokens beyond the next one.
      teacher: RUN[@STEP] of a frozen model that the loss reads, if any.
      compares_answers: the data is answers that were compared or judged, and the loss is no
        negative log-likelihood.
      has_reward_head: the model has a head of one output, which scores texts.
      labels_steps: the data is answers with a label at the end of each step.
      samples_answers: the data is prompts, whose answers are sampled from the model and rewarded.
      has_value_head: the model has a head of one output, which predicts rewards.
      document_mask: in training a token sees no other document of its row.

    The settings of an objective in a file of a user have `build(loss, architecture)` too, which
    returns the `Objective`, as `objectives.build` does for the others.
    """

    bidirectional: ClassVar[bool] = False
    prompts: ClassVar[Prompts] = "left to right"
    keeps_rows: ClassVar[bool] = False
    evaluated_as_causal: ClassVar[bool] = False
    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder",)
    block_positions: ClassVar[int | None] = None
    marks_mtp_rows: ClassVar[bool] = False
    compares_answers: ClassVar[bool] = False
    has_reward_head: ClassVar[bool] = False
    labels_steps: ClassVar[bool] = False
    samples_answers: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = False
    teacher: str | None = None
    document_mask: bool = True

    PARTS: ClassVar = Interface("objective", needs=("build",))

    @property
    def mtp_settings(self) -> "MTP | None":
        """Settings of multi-token prediction; None without it."""
        return None

    @property
    def compared_with(self) -> str | None:
        """The model that answers are compared with: start, adapter_off or RUN; None for none."""
        return None

    def target_length(self, sequence: int) -> int:
        """Return the slots of the decoder's row for the encoder's; ValueError if it has none."""
        raise ValueError("the objective makes no pairs for an encoder and a decoder")


class LeftToRight(ObjectiveFacts):
    """Facts of an objective that predicts every token of a row from those before it."""

    keeps_rows = True
    evaluated_as_causal = True


class BothWays(ObjectiveFacts):
    """Facts of an objective that reads a part of each document bidirectionally."""

    bidirectional = True
    prompts = "both ways"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal(LeftToRight):
    """Predict each token from those before it."""

    name: Literal["causal"] = "causal"
    document_mask: bool = setting(
        True,
        "in training a token sees only its document; False: all tokens before it in the row, as "
        "in nanoGPT and with torchtitan's causal mask. A GPU is faster without. Evaluations always "
        "mask",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix(BothWays):
    """Read the start of each document bidirectionally, up to a random point; predict the rest."""

    name: Literal["prefix"] = "prefix"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(ObjectiveFacts):
    """Hide some tokens and predict them from all others: BERT's masked language modeling."""

    name: Literal["masked"] = "masked"
    rate: float = setting(0.15, "share of the tokens that are predicted", above=0, below=1)
    hidden: float = setting(
        0.8, "share of the predicted tokens that are replaced by <|mask|>", low=0, high=1
    )
    random: float = setting(
        0.1, "share of them replaced by a random token; the others stay", low=0, high=1
    )
    unit: Literal["token", "word"] = setting(
        "token", "what is sampled: tokens, or words between white space with all their tokens"
    )
    masking: Literal["dynamic", "static"] = setting(
        "dynamic", "sample new positions in every epoch, or the same in all"
    )

    bidirectional: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "none"
    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder", "encoder")

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that `hidden` and `random` are at most all of the predicted tokens."""
        if self.hidden + self.random > 1:
            why = f"hidden = {self.hidden:g} and random = {self.random:g} add up to more than 1"
            yield "random", why, f"--config.objective.random={1 - self.hidden:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span(BothWays):
    """Cut out spans of tokens and predict them after the rest of the text: T5's span corruption.

    A decoder has both in one row; an encoder reads the rest, and its decoder predicts the spans.
    """

    name: Literal["span"] = "span"
    rate: float = setting(0.15, "share of the tokens that are cut out", above=0, high=0.8)
    mean: float = setting(3.0, "mean length of a span", unit="tokens", low=1)

    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder", "encoder-decoder")

    def target_length(self, sequence: int) -> int:
        """Return the slots of the decoder's row if the encoder's has `sequence`."""
        from jaxlm.data.corrupt import pairs

        return pairs.target_length_of_spans(sequence, self.rate, self.mean)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blank(BothWays):
    """Cut out spans and predict them in a random order, each token with a second position: GLM."""

    name: Literal["blank"] = "blank"
    rate: float = setting(0.15, "share of the tokens that are cut out", above=0, high=0.8)
    mean: float = setting(3.0, "mean length of a span", unit="tokens", low=1)

    block_positions: ClassVar[int | None] = BLOCK_POSITIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class UL2(BothWays):
    """Apply one of seven denoisers to each row: short or long spans, few or many, or a suffix.

    An encoder reads what is left, and its decoder predicts the spans or the last quarter.
    """

    name: Literal["ul2"] = "ul2"

    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder", "encoder-decoder")

    def target_length(self, sequence: int) -> int:
        """Return the slots of the decoder's row, the same for every denoiser."""
        from jaxlm.data.corrupt import pairs

        spans = [pairs.target_length_of_spans(sequence, rate, mean) for rate, mean in UL2_SPANS]
        return max(*spans, pairs.target_length_of_suffix(sequence, UL2_SUFFIX))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FIM(ObjectiveFacts):
    """Rearrange some documents into prefix, suffix and middle, and predict from left to right."""

    name: Literal["fim"] = "fim"
    rate: float = setting(0.5, "share of the documents that are rearranged", low=0, high=1)
    spm: float = setting(
        0.5,
        "share of those in the order suffix, prefix, middle; the others have the prefix first",
        low=0,
        high=1,
    )
    level: Literal["character", "token"] = setting(
        "character",
        "where a document may be cut: between characters, its parts tokenized again, or tokens",
    )

    evaluated_as_causal: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(LeftToRight):
    """Predict each token from those before it, and the tokens after it with heads of their own."""

    name: Literal["mtp"] = "mtp"
    heads: HeadKind = setting(
        "sequential",
        "sequential: each head reads the token before (DeepSeek-V3); parallel: all heads read the"
        " same hidden states",
    )
    weights: tuple[float, ...] = setting(
        (0.3,),
        "loss weight of the second token ahead, of the third, and so on; one head each",
        above=0,
    )

    @property
    def mtp_settings(self) -> "MTP | None":
        """Return these settings."""
        return self

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that there is a head."""
        if not self.weights:
            why = "no token beyond the next one has a weight, which is the objective causal"
            yield "weights", why, "--config.objective.weights=0.3"


Divergence = Literal["forward", "reverse", "jsd"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(LeftToRight):
    """Learn the next-token distribution of a frozen teacher: knowledge distillation.

    With `sampled` above 0 the texts are answers of the model itself.
    """

    name: Literal["distill"] = "distill"
    teacher: str = setting("", "RUN or RUN@STEP of the frozen teacher, with the same tokenizer")
    stored: str = setting(
        "", "folder of `jaxlm teach` with the teacher's likeliest ids, in place of a teacher"
    )
    weight: float = setting(
        0.5, "weight of the divergence from the teacher; the labels have the rest", above=0, high=1
    )
    temperature: float = setting(
        1.0, "divisor of both models' logits in the divergence", above=0, high=100
    )
    divergence: Divergence = setting(
        "forward",
        "forward, KL(teacher | student), covers all that the teacher does; reverse, "
        "KL(student | teacher), leaves out what the student cannot; jsd, the Jensen-Shannon "
        "divergence, is between them",
    )
    beta: float = setting(
        0.5, "share of the teacher in the mixture that jsd compares both with", above=0, below=1
    )
    sampled: float = setting(
        0.0,
        "share of the answers that are sampled from the model, the others being those of the data: "
        "on-policy distillation, of data.kind=prompts; 0 for text as it is",
        low=0,
        high=1,
    )

    dead_groups: ClassVar[str] = "keep"
    truncated: ClassVar[Truncated] = "score"

    @property
    def samples_answers(self) -> bool:  # type: ignore[override]
        """Return whether some answers are sampled from the model."""
        return self.sampled > 0

    @property
    def terms(self) -> "PolicyTerms":
        """Return the mean over tokens; rewards are logged, and not learned."""
        return PolicyTerms("none", "none", "token", "plain", "token", 0.0, 0.0)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that there is one teacher, and that samples are no labels of themselves."""
        if not (self.teacher or self.stored):
            yield "teacher", "distillation needs a trained run", "--config.objective.teacher=RUN"
        if self.teacher and self.stored:
            why = "objective.stored has its distributions already"
            yield "teacher", why, "--config.objective.teacher=\n--config.objective.stored="
        if self.sampled and self.stored:
            why = "objective.stored has no distributions of texts that are sampled later"
            fix = "--config.objective.sampled=0"
            yield "stored", why, fix
        if self.sampled and self.weight < 1:
            why = "a sample of the model has no labels but itself"
            yield "weight", why, "--config.objective.weight=1"


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


START = "start"  # reference: the run that a run begins with
REFERENCE = (
    "reference of kl: adapter_off, the base of an adapter; start, the run of --init_from; RUN or "
    "RUN@STEP"
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
        "sequence: mean over the tokens of a sample, then over samples; token: mean over all "
        "tokens; constant: sum over tokens over rl.max_tokens, mean over samples; sum: sum over "
        "tokens, mean over samples",
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
        "sequence: mean over the tokens of a sample, then over samples; token: mean over all "
        "tokens; constant: sum over tokens over rl.max_tokens, mean over samples; sum: sum over "
        "tokens, mean over samples",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Relative frequency of each objective of a mixture, by rows."""

    causal: float = setting(0.5, "weight of causal", low=0)
    prefix: float = setting(0.0, "weight of prefix", low=0)
    masked: float = setting(0.0, "weight of masked", low=0)
    span: float = setting(0.0, "weight of span", low=0)
    ul2: float = setting(0.0, "weight of ul2", low=0)
    fim: float = setting(0.5, "weight of fim", low=0)
    blank: float = setting(0.0, "weight of blank", low=0)
    mtp: float = setting(0.0, "weight of mtp", low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sample one of several objectives for each row; heads of mtp learn from rows of mtp alone."""

    name: Literal["mixture"] = "mixture"
    weights: Weights = setting(Weights(), "relative frequency of each objective")
    masked: Masked = setting(Masked(), "settings of masked")
    span: Span = setting(Span(), "settings of span")
    fim: FIM = setting(FIM(), "settings of fim")
    blank: Blank = setting(Blank(), "settings of blank")
    mtp: MTP = setting(MTP(), "settings of mtp")

    keeps_rows: ClassVar[bool] = False
    evaluated_as_causal: ClassVar[bool] = False
    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder",)
    compares_answers: ClassVar[bool] = False
    has_reward_head: ClassVar[bool] = False
    labels_steps: ClassVar[bool] = False
    samples_answers: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = False
    document_mask: ClassVar[bool] = True
    teacher: ClassVar[str | None] = None
    compared_with: ClassVar[str | None] = None

    @property
    def parts(self) -> tuple[tuple["TokenObjective", float], ...]:
        """Return the objectives that have a weight, each with its share."""
        arms: tuple[TokenObjective, ...] = (
            *(Causal(), Prefix(), self.masked, self.span),
            *(UL2(), self.fim, self.blank, self.mtp),
        )
        weights = [getattr(self.weights, arm.name) for arm in arms]
        total = sum(weights)
        return tuple((arm, w / total) for arm, w in zip(arms, weights, strict=True) if w)

    @property
    def bidirectional(self) -> bool:
        """Return whether any part reads some tokens bidirectionally."""
        return any(arm.bidirectional for arm, _ in self.parts)

    @property
    def prompts(self) -> Prompts:
        """Return "left to right" if any part learns that, else the best of the others."""
        order: tuple[Prompts, ...] = ("left to right", "both ways", "none")
        return min((arm.prompts for arm, _ in self.parts), key=order.index)

    @property
    def block_positions(self) -> int | None:
        """Return the size of the table of second positions; None if no part needs one."""
        return next((n for arm, _ in self.parts if (n := arm.block_positions)), None)

    @property
    def mtp_settings(self) -> MTP | None:
        """Return the settings of multi-token prediction; None if it has no weight."""
        return next((mtp for arm, _ in self.parts if (mtp := arm.mtp_settings)), None)

    def target_length(self, sequence: int) -> int:
        """Raise ValueError: a mixture cannot train an encoder-decoder."""
        raise ValueError("a mixture makes no pairs for an encoder and a decoder")

    @property
    def marks_mtp_rows(self) -> bool:
        """Return whether only some rows predict tokens beyond the next one."""
        return self.mtp_settings is not None

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that some objective has a weight."""
        if not self.parts:
            flag = "--config.objective.weights.causal=1"
            yield "weights.causal", "no objective has a weight", flag


TokenObjective = Causal | Prefix | Masked | Span | UL2 | FIM | Blank | MTP
Objective = TokenObjective | Mixture | Distill | Preference | Reward | Process | Policy | Ppo
Sampling = Policy | Ppo | Distill  # objectives that may sample answers


def value_rates(objective: Objective) -> tuple[str, ...]:
    """Return entries of `optim.lr_scale` for the value head, if there is one."""
    return (f"value/*={objective.value_rate:g}",) if isinstance(objective, Ppo) else ()


def mtp_heads(objective: Objective) -> MtpConfig | None:
    """Return the heads for tokens beyond the next one that the model needs; None for none."""
    mtp = objective.mtp_settings
    return None if mtp is None else MtpConfig(tokens=len(mtp.weights), kind=mtp.heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Computation of the token loss."""

    z_loss: float = setting(
        0.0, "coefficient of the squared log normalizer, which keeps logits near zero", low=0
    )
    label_smoothing: float = setting(
        0.0,
        "share of each label that is spread evenly over all ids; loss_nats stays the plain"
        " negative log-likelihood",
        low=0,
        high=1,
    )
    chunk: int | None = setting(
        None,
        "tokens whose logits are in memory at a time; None computes all at once",
        unit="tokens",
        low=1,
    )
