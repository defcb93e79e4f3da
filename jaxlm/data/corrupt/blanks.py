"""Blank infilling: spans are cut out and written again one token at a time, each token with two positions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right
from jaxlm.data.corrupt.spans import OURS, SHORTEST, Edges, count_of, inside, runs


class Marks(NamedTuple):
    """The ids of a blank in the text, and of the begin and the end of what fills it."""

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
    """`x <blank> y <blank>`, read both ways, then for each blank, in an order that is drawn, `<start> span`.

    What is predicted there is `span <end>`, from left to right: each token sees the text and the spans before. Its first
    position is that of its blank in the text, its second counts from 1 inside of the span, and is 0 in the text; it stays
    below `inner`, and those beyond share the last.

    How much is cut out, what room that needs, and what becomes of a piece without any, is as in `spans.spans`.

    Source: Du et al. 2022, arXiv:2103.10360, sections 2.1 and 2.2. There the lengths of spans are drawn from a Poisson
    distribution; here they are any that add up to the rate, as in T5.
    """
    draw = key.draws()
    found: dict[int, Piece] = {}
    for number in draw.permutation(len(ids)).tolist():
        found[number], used = _cut(ids[number], free, draw, rate, mean, marks, inner, edges)
        free -= used
    return [found[number] for number in range(len(ids))]


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
    """The piece, and how many free slots it takes."""
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
