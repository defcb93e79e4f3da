"""The arrays that a training step reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float, Int

if TYPE_CHECKING:  # jaxtyping.Array imports JAX, which data preparation does not need
    from jaxtyping import Array

START = 0  # first input id of the decoder in an encoder-decoder: the padding id, as in T5


class Answers(NamedTuple):
    """The judged answers of each row: segment s of the row is answer s - 1.

    Of pairs, answers 2 k and 2 k + 1 are one pair, in any order. Rows with fewer answers have
    sides 0 behind them.
    """

    sides: Float[Array, "B S"]  # 1 chosen or good, -1 rejected or bad, 0 none
    margins: Float[Array, "B S"]  # of the pair, on its chosen answer
    # Log-probability under the reference, nats; None without a reference that was computed before.
    reference: Float[Array, "B S"] | None = None


class Rollout(NamedTuple):
    """Sampled answers, one in each row; 0 in slots whose target was not sampled."""

    log_p: Float[Array, "B T"]  # of the target, in the distribution it was drawn from, nats
    advantages: Float[Array, "B T"]
    counts: Float[Array, "B T"]  # their sum over the batch is the divisor of the loss
    # Of a model with a value head, when the answers were drawn; None for others.
    values: Float[Array, "B T"] | None = None  # predicted return, before the target
    returns: Float[Array, "B T"] | None = None  # to be predicted


class TeacherTop(NamedTuple):
    """The likeliest next ids of a frozen teacher; 0 in slots of padding.

    Probabilities are those at the temperature of the distillation.
    """

    ids: Int[Array, "B T K"]
    log_p: Float[Array, "B T K"]  # of these ids, nats
    tail: Float[Array, "B T"]  # of all other ids together, nats
    nll: Float[Array, "B T"]  # of the target, at temperature 1, nats


class Tokens(NamedTuple):
    """Rows of packed documents and everything that a token-level loss needs.

    `weights` is 0 for slots without a loss: padding, prompts, unmasked tokens. `segments` numbers
    the documents of a row from 1; 0 is padding. Attention stays inside a segment. `positions`
    counts from 0 in each segment.

    `visible_until` is the last slot of the row that each slot attends to, for rows that are partly
    bidirectional; None for causal rows. `block_positions` is the second position, inside a blanked
    span (GLM); None for objectives without one. `predicts_ahead` multiplies the weights of the
    multi-token-prediction heads, 1 or 0 for each row; None if every row trains them.

    `source` [B, S] is the encoder's input of an encoder-decoder; a decoder segment attends to the
    source segment of the same number.

    `answers` are the sides of pairs, or the labels of answers; None for other data. `steps` is 1 in
    the slot of the last token of a right step, -1 of a wrong one, and 0 elsewhere; None for data
    without labels of steps. `rollout` is of answers that the model sampled; None for other data.

    `teacher` has the stored distributions of a teacher; None without them.

    `prefix_segments` is a second segment that each slot attends to, a prefix that several texts
    share; None without any.
    """

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    visible_until: Int[Array, "B T"] | None = None
    block_positions: Int[Array, "B T"] | None = None
    predicts_ahead: Float[Array, "B T"] | None = None
    source: Int[Array, "B S"] | None = None
    source_segments: Int[Array, "B S"] | None = None
    answers: Answers | None = None
    steps: Float[Array, "B T"] | None = None
    rollout: Rollout | None = None
    prefix_segments: Int[Array, "B T"] | None = None
    teacher: TeacherTop | None = None

    @property
    def read_count(self) -> Int[Array, ""]:
        """Number of tokens that are read: not padding; of an encoder-decoder, those of the source.

        Model FLOPs per token are of the same tokens.
        """
        segments = self.segments if self.source_segments is None else self.source_segments
        return (segments > 0).sum()

    @property
    def trained_share(self) -> Float[Array, ""]:
        """Share of the tokens, without padding, that have a loss."""
        return (self.weights > 0).sum() / (self.segments > 0).sum().clip(1)
