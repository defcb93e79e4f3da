"""Settings of the objective and of the loss. Free of JAX.

Example:
  >>> Causal().keeps_rows, Masked().prompts, UL2().architectures
  (True, 'none', ('decoder', 'encoder-decoder'))
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import HeadKind, MtpConfig
from jaxlm.objectives.facts import Architecture, BothWays, LeftToRight, ObjectiveFacts, Prompts
from jaxlm.objectives.policy_config import Policy, PolicyTerms, Ppo, Truncated
from jaxlm.objectives.preference_config import Preference, Process, Reward

BLOCK_POSITIONS = 512  # distinct second positions inside a blank
# Rate and mean length of the spans of UL2's denoisers R (the first two) and X; S is a suffix.
UL2_SPANS = ((0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
UL2_SUFFIX = 0.25  # share of a text that the denoiser S predicts


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

    sums_over_rows: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix(BothWays):
    """Read the start of each document bidirectionally, up to a random point; predict the rest."""

    name: Literal["prefix"] = "prefix"

    sums_over_rows: ClassVar[bool] = True


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
    sums_over_rows: ClassVar[bool] = True
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

    sums_over_rows: ClassVar[bool] = True
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

    sums_over_rows: ClassVar[bool] = True
    block_positions: ClassVar[int | None] = BLOCK_POSITIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class UL2(BothWays):
    """Apply one of seven denoisers to each row: short or long spans, few or many, or a suffix.

    An encoder reads what is left, and its decoder predicts the spans or the last quarter.
    """

    name: Literal["ul2"] = "ul2"

    sums_over_rows: ClassVar[bool] = True
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

    sums_over_rows: ClassVar[bool] = True
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

    sums_over_rows: ClassVar[bool] = True

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
    def sums_over_rows(self) -> bool:  # type: ignore[override]
        """Return whether the distributions are stored: a teacher has further parameters."""
        return bool(self.stored)

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
class Mixture(ObjectiveFacts):
    """Sample one of several objectives for each row; heads of mtp learn from rows of mtp alone."""

    name: Literal["mixture"] = "mixture"
    weights: Weights = setting(Weights(), "relative frequency of each objective")
    masked: Masked = setting(Masked(), "settings of masked")
    span: Span = setting(Span(), "settings of span")
    fim: FIM = setting(FIM(), "settings of fim")
    blank: Blank = setting(Blank(), "settings of blank")
    mtp: MTP = setting(MTP(), "settings of mtp")

    sums_over_rows: ClassVar[bool] = True

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
    def bidirectional(self) -> bool:  # type: ignore[override]
        """Return whether any part reads some tokens bidirectionally."""
        return any(arm.bidirectional for arm, _ in self.parts)

    @property
    def prompts(self) -> Prompts:  # type: ignore[override]
        """Return "left to right" if any part learns that, else the best of the others."""
        order: tuple[Prompts, ...] = ("left to right", "both ways", "none")
        return min((arm.prompts for arm, _ in self.parts), key=order.index)

    @property
    def block_positions(self) -> int | None:  # type: ignore[override]
        """Return the size of the table of second positions; None if no part needs one."""
        return next((n for arm, _ in self.parts if (n := arm.block_positions)), None)

    @property
    def mtp_settings(self) -> MTP | None:
        """Return the settings of multi-token prediction; None if it has no weight."""
        return next((mtp for arm, _ in self.parts if (mtp := arm.mtp_settings)), None)

    @property
    def marks_mtp_rows(self) -> bool:  # type: ignore[override]
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
        "tokens of each device whose logits are in memory at a time; None computes all at once. "
        "Each part computes its logits twice, and gathers an output matrix that devices split",
        unit="tokens",
        low=1,
    )
