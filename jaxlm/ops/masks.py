"""Which keys a query may see: described, and turned into an array only where a kernel needs one."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.parallel import context

HIDDEN = -1e30  # the score of a key that is not seen; finite, as infinities subtract to NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """What queries may see.

    Indices count slots in the row (or in the key cache); a causal query sees keys whose index is not above its own,
    and within a window only the last `window` of those. With segments, it sees its own segment only; segment 0 is
    padding, which only padding sees. So every query of a row sees itself, and no result depends on how nothing is averaged.

    `query_reach` is the highest index that each query sees instead of its own, and not below it: the end of a prefix that
    is read both ways, or of the segment. A window then has `window` - 1 keys to either side.

    `query_count` is how many of each row's queries are tokens; those behind them are padding, of which no cache need know.

    `is_dealt` says that the slots lie in the order of `context.order` over the ambient mesh, `is_whole` that queries and
    keys are those of one row, slot by slot. `bias` is added to the scores, head by head.
    """

    query_index: Int[Array, "B T"] | Int[Array, "1 T"]
    key_index: Int[Array, "B S"] | Int[Array, "1 S"]
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    query_reach: Int[Array, "B T"] | Int[Array, "1 T"] | None = None
    query_count: Int[Array, "B"] | None = None
    causal: bool = True
    window: int | None = None
    is_dealt: bool = False
    is_whole: bool = False
    bias: Float[Array, "B N T S"] | Float[Array, "1 N T S"] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where only one side has segments, or a query that sees all has a reach."""
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("segments of queries without those of keys, or the other way round")
        if self.query_reach is not None and not self.causal:
            raise ValueError("a reach where nothing is hidden")

    def materialise(self) -> Bool[Array, "B T S"]:
        """True where a query sees a key. The batch axis is 1 where every row has the same mask."""
        query, key = self.query_index[:, :, None], self.key_index[:, None, :]
        seen = jnp.ones((query.shape[0], query.shape[1], key.shape[2]), bool)
        if self.causal:
            seen = seen & (
                key <= (query if self.query_reach is None else self.query_reach[:, :, None])
            )
        if self.window is not None:
            seen = seen & (query - key < self.window)
            if self.query_reach is not None:
                seen = seen & (key - query < self.window)
        if self.query_segments is not None and self.key_segments is not None:
            seen = seen & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
        return seen


def causal(
    length: int,
    segments: Int[Array, "B T"] | None = None,
    reach: Int[Array, "B T"] | None = None,
    *,
    parts: int = 1,
) -> Mask:
    """A row that reads itself from left to right, each segment for itself; its slots dealt out to `parts` devices.

    Each slot sees as far as its `reach`, where there is one.
    """
    index = jnp.asarray(context.zigzag_order(length, parts))[None]
    return Mask(
        query_index=index,
        key_index=index,
        query_segments=segments,
        key_segments=segments,
        query_reach=reach,
        is_dealt=parts > 1,
        is_whole=parts == 1,
    )


def both_ways(length: int, segments: Int[Array, "B T"] | None = None, *, parts: int = 1) -> Mask:
    """A row of which every slot sees all of its segment, before it and after; its slots dealt out to `parts` devices."""
    return causal(length, segments, jnp.full((1, length), length - 1, jnp.int32), parts=parts)
