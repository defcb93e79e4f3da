"""What a step of training reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float, Int

if TYPE_CHECKING:  # it imports JAX, and preparing data does without
    from jaxtyping import Array

START = 0  # the id that the row of a decoder beside an encoder begins with: T5's padding, and ours


class Tokens(NamedTuple):
    """Rows of packed documents, with everything that a token-level loss needs.

    `weights` is 0 where nothing is trained on: padding, prompts, unmasked tokens. `segments` numbers the documents of a
    row from 1, 0 is padding; attention stays inside a segment. `positions` counts from 0 in each segment.

    `reach` is the last slot of the row that each slot sees, where parts are read both ways; None where all is read from
    left to right. `inner` is a second position, inside of a span that was cut out; None where no objective cuts any so.
    `ahead` is a factor on the weights of the tokens beyond the next one, where a model has heads for those: 1 in rows that
    predict them and 0 in others; None where all do.

    `source` is what the encoder of an encoder-decoder reads, of S slots; the tokens of a segment see that segment of it.
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
