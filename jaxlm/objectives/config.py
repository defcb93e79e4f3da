"""Settings of the objective and of the loss."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import Ahead, HeadKind

INNER = 512  # positions inside of a blank that are told apart
Prompts = Literal[
    "left to right", "both ways", "none"
]  # how a model that learnt this reads a prompt to go on from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal:
    """Each token is predicted from those before it."""

    name: Literal["causal"] = "causal"

    both_ways: ClassVar[bool] = False
    prompts: ClassVar[Prompts] = "left to right"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """The beginning of each document is read both ways, up to a place that is drawn; the rest is predicted."""

    name: Literal["prefix"] = "prefix"

    both_ways: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "both ways"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked:
    """Some tokens are hidden, and predicted where they stood from all others: BERT's masked language modelling."""

    name: Literal["masked"] = "masked"
    rate: float = setting(0.15, "share of the tokens that are predicted", above=0, below=1)
    hidden: float = setting(0.8, "share of those that are read as <|mask|>", low=0, high=1)
    random: float = setting(
        0.1, "share of those that are read as a random token; the others as they are", low=0, high=1
    )
    unit: Literal["token", "word"] = setting(
        "token", "what is drawn: tokens, or words between white space with all their tokens"
    )
    masking: Literal["dynamic", "static"] = setting(
        "dynamic", "draw anew in every epoch, or the same in all"
    )

    both_ways: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "none"

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """What is hidden and what is random are at most all that is predicted."""
        if self.hidden + self.random > 1:
            yield (
                "random",
                f"hidden = {self.hidden:g} and random = {self.random:g} of what is predicted are more than all of it",
                f"--config.objective.random={1 - self.hidden:.3g}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Runs of tokens are cut out, and written down after the rest of the text: T5's span corruption, in one row.

    An encoder reads the rest in a row of its own, and its decoder writes the runs.
    """

    name: Literal["span"] = "span"
    rate: float = setting(0.15, "share of the tokens that are cut out", above=0, high=0.8)
    mean: float = setting(3.0, "mean length of a span", unit="tokens", low=1)

    both_ways: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "both ways"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blank:
    """Runs of tokens are cut out and written again in a drawn order, each token with a second position: GLM's infilling."""

    name: Literal["blank"] = "blank"
    rate: float = setting(0.15, "share of the tokens that are cut out", above=0, high=0.8)
    mean: float = setting(3.0, "mean length of a span", unit="tokens", low=1)

    both_ways: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "both ways"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UL2:
    """Seven denoisers, one drawn for each row: spans short or long, few or many, and the last quarter of a text.

    An encoder reads what is left, and its decoder writes the spans or the last quarter.
    """

    name: Literal["ul2"] = "ul2"

    both_ways: ClassVar[bool] = True
    prompts: ClassVar[Prompts] = "both ways"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FIM:
    """Some documents are rearranged into prefix, suffix and middle, and all is predicted from left to right."""

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
        "where a document may be cut: between characters, its parts encoded anew, or tokens",
    )

    both_ways: ClassVar[bool] = False
    prompts: ClassVar[Prompts] = "left to right"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP:
    """Each token is predicted from those before it, and so are the tokens after it, by heads of their own."""

    name: Literal["mtp"] = "mtp"
    heads: HeadKind = setting(
        "sequential",
        "how further tokens are predicted: one after the other, each head reading the token before (DeepSeek-V3), or all from the same stream",
    )
    weights: tuple[float, ...] = setting(
        (0.3,),
        "weight of the loss of the token after the next, of the one after that, and so on; each has a head",
        above=0,
    )

    both_ways: ClassVar[bool] = False
    prompts: ClassVar[Prompts] = "left to right"

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """There is a further token."""
        if not self.weights:
            yield (
                "weights",
                "nothing beyond the next token has a weight: that is the objective causal",
                "--config.objective.weights=0.3",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """How often a row is read by each objective, in proportion."""

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
    """Several objectives in one run, one drawn for each row by their weights; heads of mtp learn from its rows alone."""

    name: Literal["mixture"] = "mixture"
    weights: Weights = setting(Weights(), "how often each is drawn")
    masked: Masked = setting(Masked(), "masked, where it has a weight")
    span: Span = setting(Span(), "span, where it has a weight")
    fim: FIM = setting(FIM(), "fim, where it has a weight")
    blank: Blank = setting(Blank(), "blank, where it has a weight")
    mtp: MTP = setting(MTP(), "mtp, where it has a weight")

    @property
    def both_ways(self) -> bool:
        """Whether any of them reads parts both ways."""
        return any(arm.both_ways for arm, _ in self.parts)

    @property
    def prompts(self) -> Prompts:
        """From left to right, where that was learnt too."""
        known = [arm.prompts for arm, _ in self.parts]
        order: tuple[Prompts, ...] = ("left to right", "both ways", "none")
        return min(known, key=order.index)

    @property
    def parts(self) -> tuple[tuple["Simple", float], ...]:
        """The objectives that have a weight, each with its share."""
        arms: tuple[Simple, ...] = (
            Causal(),
            Prefix(),
            self.masked,
            self.span,
            UL2(),
            self.fim,
            self.blank,
            self.mtp,
        )
        weights = [getattr(self.weights, arm.name) for arm in arms]
        total = sum(weights)
        return tuple((arm, w / total) for arm, w in zip(arms, weights, strict=True) if w)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Something has a weight."""
        if not self.parts:
            yield (
                "weights.causal",
                "no objective has a weight",
                "--config.objective.weights.causal=1",
            )


Simple = Causal | Prefix | Masked | Span | UL2 | FIM | Blank | MTP
Objective = Simple | Mixture
Paired = Span | UL2  # of one text, one for an encoder and one for its decoder


def has_inner(objective: Objective) -> bool:
    """Whether tokens have a second position, for which the model needs a table."""
    return any(isinstance(arm, Blank) for arm in arms(objective))


def has_ahead(objective: Objective) -> bool:
    """Whether a batch says which of its rows predict tokens beyond the next: some do, and others do not."""
    return isinstance(objective, Mixture) and mtp_settings(objective) is not None


def mtp_settings(objective: Objective) -> MTP | None:
    """How tokens beyond the next are predicted; None where they are not."""
    return next((arm for arm in arms(objective) if isinstance(arm, MTP)), None)


def heads(objective: Objective) -> Ahead | None:
    """The heads for further tokens that the model needs."""
    found = mtp_settings(objective)
    return None if found is None else Ahead(tokens=len(found.weights), kind=found.heads)


def arms(objective: Objective) -> tuple[Simple, ...]:
    """The objectives that a row may be read by."""
    return (
        tuple(arm for arm, _ in objective.parts) if isinstance(objective, Mixture) else (objective,)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How the token loss is computed."""

    z_loss: float = setting(
        0.0, "coefficient of the squared log normalizer, which keeps logits near zero", low=0
    )
    label_smoothing: float = setting(
        0.0,
        "share of each label that is spread evenly over all ids; loss_nats stays the plain likelihood",
        low=0,
        high=1,
    )
    chunk: int | None = setting(
        None,
        "tokens unembedded at a time, the others' logits never existing; None takes all at once",
        unit="tokens",
        low=1,
    )
