"""Prefix language modeling: the start of each document is bidirectional, the rest predicted."""

from collections.abc import Sequence

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right, portion


def prefixes(ids: Sequence[Ids], free: int, key: Key, *, share: float | None = None) -> list[Piece]:
    """Split each piece into a bidirectional prefix and a predicted rest, both not empty.

    The rest is the last `share` of the ids; the split is uniform if `share` is None.

    Source: Raffel et al. 2020, arXiv:1910.10683, sections 3.2.1 (prefix LM) and 3.3.1 (random
    split).
    """
    draw = key.draws()
    return [left_to_right(piece, _known(len(piece), share, draw)) for piece in ids]


def _known(length: int, share: float | None, draw: np.random.Generator) -> int:
    """Return the number of ids of the prefix."""
    if share is None:
        return int(draw.integers(1, length))
    return length - portion(length, share)
