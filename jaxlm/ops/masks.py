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
    side. `prefix_segments` is a second segment that each query sees: of texts that share a prefix,
    the prefix, stored once before them. The slots between count in a window. `query_count` is the
    number of each row's queries that are tokens; the rest is padding, which a cache may drop.
    `is_zigzag` marks slots in `context.zigzag_order` over the ambient mesh, `is_whole` queries and
    keys of the same complete row. `bias` is added to the scores.

    The first `leading` keys have indices from -`leading` to -1: virtual tokens before the row. A
    causal query sees all of them up to its own index, also of another segment and outside of the
    window.
    """

    query_index: Int[Array, "B T"] | Int[Array, "1 T"]
    key_index: Int[Array, "B S"] | Int[Array, "1 S"]
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    visible_until: Int[Array, "B T"] | Int[Array, "1 T"] | None = None
    prefix_segments: Int[Array, "B T"] | None = None
    query_count: Int[Array, "B"] | None = None
    causal: bool = True
    window: int | None = None
    is_zigzag: bool = False
    is_whole: bool = False
    bias: Float[Array, "B N T S"] | Float[Array, "1 N T S"] | None = None
    leading: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for segments on one side only, or a part that needs causality."""
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("only one of queries and keys has segments")
        if self.visible_until is not None and not self.causal:
            raise ValueError("visible_until needs a causal mask")
        if self.leading and not self.causal:
            raise ValueError("leading keys need a causal mask")
        if self.prefix_segments is not None and self.query_segments is None:
            raise ValueError("prefix segments need segments")

    def materialize(self) -> Bool[Array, "B T S"]:
        """Return true for each visible pair; the batch axis is 1 if all rows have the same mask."""
        query, key = self.query_index[:, :, None], self.key_index[:, None, :]
        visible = jnp.ones((query.shape[0], query.shape[1], key.shape[2]), bool)
        until = None if self.visible_until is None else self.visible_until[:, :, None]
        if self.window is not None:
            visible = visible & (query - key < self.window)
            if until is not None:
                visible = visible & (key - query < self.window)
        if self.query_segments is not None and self.key_segments is not None:
            key_segments = self.key_segments[:, None, :]
            shared = self.query_segments[:, :, None] == key_segments
            if self.prefix_segments is not None:
                shared = shared | (self.prefix_segments[:, :, None] == key_segments)
            visible = visible & shared
        if self.leading:
            visible = visible | (key < 0)
        if self.causal:
            visible = visible & (key <= (query if until is None else until))
        return visible

    def preceded(self, count: int, *, is_queried: bool) -> "Mask":
        """Return the mask with `count` leading keys; with `is_queried` they are queries too."""
        index = jnp.arange(-count, 0, dtype=jnp.int32)[None]

        def joined(before: Array, row: Array) -> Array:
            return jnp.concatenate((jnp.broadcast_to(before, (len(row), count)), row), axis=1)

        def maybe(before: Array, row: Array | None) -> Array | None:
            return None if row is None else joined(before, row)

        # As their own segment they are no padding; what sees them does not depend on it.
        segment = jnp.ones_like(index)
        mask = dataclasses.replace(
            self,
            key_index=joined(index, self.key_index),
            key_segments=maybe(segment, self.key_segments),
            leading=count,
        )
        if not is_queried:
            return mask
        return dataclasses.replace(
            mask,
            query_index=joined(index, self.query_index),
            query_segments=maybe(segment, self.query_segments),
            visible_until=maybe(index, self.visible_until),
            prefix_segments=maybe(segment, self.prefix_segments),
        )


def causal(
    length: int,
    segments: Int[Array, "B T"] | None = None,
    visible_until: Int[Array, "B T"] | None = None,
    *,
    prefix_segments: Int[Array, "B T"] | None = None,
    parts: int = 1,
) -> Mask:
    """Return the causal mask of a whole row.

    Args:
      length: slots of the row.
      segments, visible_until, prefix_segments: as in `Mask`.
      parts: devices over which the slots are in zigzag order.
    """
    index = jnp.asarray(context.zigzag_order(length, parts))[None]
    return Mask(
        query_index=index,
        key_index=index,
        query_segments=segments,
        key_segments=segments,
        visible_until=visible_until,
        prefix_segments=prefix_segments,
        is_zigzag=parts > 1,
        is_whole=parts == 1,
    )


def both_ways(length: int, segments: Int[Array, "B T"] | None = None, *, parts: int = 1) -> Mask:
    """Return the bidirectional mask of a whole row, in zigzag order over `parts` devices."""
    return causal(length, segments, jnp.full((1, length), length - 1, jnp.int32), parts=parts)
