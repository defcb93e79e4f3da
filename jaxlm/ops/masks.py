"""Attention masks: described by indices and segments, materialized only if a kernel needs it.

Example:
    >>> causal(3).materialize()[0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.parallel import context

HIDDEN = -1e30  # score of a hidden key; finite, as infinities subtract to NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Visibility of keys to queries.

    Indices count slots of the row (or of the KV cache). A causal query sees keys up to its own
    index, within a window only the last `window` of those. With segments it sees only its own;
    segment 0 is padding, visible only to padding. So every query of a row sees itself.

    `visible_until` is the last index that each query sees instead of its own, never below it: the
    end of a bidirectional prefix or of the segment. A window then has `window` - 1 keys on either
    side. `query_count` is the number of each row's queries that are tokens; the rest is padding,
    which a cache may drop. `is_zigzag` marks slots in `context.zigzag_order` over the ambient
    mesh, `is_whole` queries and keys of the same complete row. `bias` is added to the scores.
    """

    query_index: Int[Array, "B T"] | Int[Array, "1 T"]
    key_index: Int[Array, "B S"] | Int[Array, "1 S"]
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    visible_until: Int[Array, "B T"] | Int[Array, "1 T"] | None = None
    query_count: Int[Array, "B"] | None = None
    causal: bool = True
    window: int | None = None
    is_zigzag: bool = False
    is_whole: bool = False
    bias: Float[Array, "B N T S"] | Float[Array, "1 N T S"] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for segments on one side only, or `visible_until` without causality."""
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("only one of queries and keys has segments")
        if self.visible_until is not None and not self.causal:
            raise ValueError("visible_until needs a causal mask")

    def materialize(self) -> Bool[Array, "B T S"]:
        """Return true for each visible pair; the batch axis is 1 if all rows have the same mask."""
        query, key = self.query_index[:, :, None], self.key_index[:, None, :]
        visible = jnp.ones((query.shape[0], query.shape[1], key.shape[2]), bool)
        until = None if self.visible_until is None else self.visible_until[:, :, None]
        if self.causal:
            visible = visible & (key <= (query if until is None else until))
        if self.window is not None:
            visible = visible & (query - key < self.window)
            if until is not None:
                visible = visible & (key - query < self.window)
        if self.query_segments is not None and self.key_segments is not None:
            visible = visible & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
        return visible


def causal(
    length: int,
    segments: Int[Array, "B T"] | None = None,
    visible_until: Int[Array, "B T"] | None = None,
    *,
    parts: int = 1,
) -> Mask:
    """Return the causal mask of a whole row, in zigzag order over `parts` devices."""
    index = jnp.asarray(context.zigzag_order(length, parts))[None]
    return Mask(
        query_index=index,
        key_index=index,
        query_segments=segments,
        key_segments=segments,
        visible_until=visible_until,
        is_zigzag=parts > 1,
        is_whole=parts == 1,
    )


def both_ways(length: int, segments: Int[Array, "B T"] | None = None, *, parts: int = 1) -> Mask:
    """Return the bidirectional mask of a whole row, in zigzag order over `parts` devices."""
    return causal(length, segments, jnp.full((1, length), length - 1, jnp.int32), parts=parts)
