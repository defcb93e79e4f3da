"""Blank infilling: spans are cut out and generated after the text, with two positions a token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right
from jaxlm.data.corrupt.spans import OURS, SHORTEST, Edges, count_of, inside, runs


class Marks(NamedTuple):
    """Ids of a blank in the text, and of the start and end of its span."""

    blank: int
    start: int
    end: int


def blanks(
    ids: Sequence[Ids],
    free: int,
    key: Key,
    *,
    rate: float,
    mean: float,
    marks: Marks,
    inner: int,
    edges: Edges = OURS,
) -> list[Piece]:
    """Make `x <blank> y <blank>`, bidirectional, followed by `<start> span` for each blank.

    Spans come in random order, and `span <end>` is predicted from left to right: each token attends
    to the text and to earlier spans. The first position is that of the blank in the text; the
    second counts from 1 inside the span, is 0 in the text, and is clipped below `inner`. The amount
    cut out, the free slots needed, and pieces without any are as in `spans.spans`.

    Args:
      ids: ids of each piece.
      free: free slots of the row.
      key: key of the row.
      rate: share of the ids that is cut out.
      mean: mean length of a span.
      marks: special ids.
      inner: number of second positions.
      edges: begin and end ids of documents, which stay in place.

    Source: Du et al. 2022, arXiv:2103.10360, sections 2.1 and 2.2. There span lengths are drawn
    from a Poisson distribution; here any lengths that add up to the rate are equally likely, as in
    T5.
    """
    draw = key.draws()
    pieces: dict[int, Piece] = {}
    for number in draw.permutation(len(ids)).tolist():
        pieces[number], used = _cut(ids[number], free, draw, rate, mean, marks, inner, edges)
        free -= used
    return [pieces[number] for number in range(len(ids))]


def _cut(
    ids: Ids,
    free: int,
    draw: np.random.Generator,
    rate: float,
    mean: float,
    marks: Marks,
    most: int,
    edges: Edges,
) -> tuple[Piece, int]:
    """Return the piece and the number of free slots used."""
    begin, end = inside(ids, edges)
    if end - begin < SHORTEST or free < 3:
        return left_to_right(ids, int(draw.integers(1, len(ids)))), 0
    cut, count = count_of(end - begin, rate, mean)
    count = min(count, (free - 1) // 2)
    starts, stops = runs(cut, end - begin, count, draw)
    text = np.ones(len(ids), bool)
    blank = np.zeros(len(ids), bool)
    for start, stop in zip(starts + begin, stops + begin, strict=True):
        text[start:stop] = False
        blank[start] = True
    left = np.where(blank, marks.blank, ids)[text | blank]
    places = np.flatnonzero(blank[text | blank])
    spans = [ids[a:b] for a, b in zip(starts + begin, stops + begin, strict=True)]
    order = draw.permutation(count)
    sizes = np.array([len(spans[number]) + 1 for number in order])
    read = [np.append(marks.start, spans[number]) for number in order]
    written = [np.append(spans[number], marks.end) for number in order]
    slots = np.arange(len(left) + sizes.sum())
    inner = np.concatenate([np.zeros(len(left)), *(np.arange(1, size + 1) for size in sizes)])
    return Piece(
        tokens=np.concatenate([left, *read]).astype(np.int32),
        targets=np.concatenate([left, *written]).astype(np.int32),
        weights=(slots >= len(left)).astype(np.float32),
        positions=np.append(slots[: len(left)], np.repeat(places[order], sizes)).astype(np.int32),
        reach=np.maximum(slots, len(left) - 1).astype(np.int32),
        inner=np.minimum(inner, most - 1).astype(np.int32),
    ), 2 * count + 1
