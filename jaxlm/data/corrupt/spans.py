"""Span corruption: runs of ids are cut out, and written down after what is left of the text."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right, portion
from jaxlm.data.tokenizer import Tokenizer

SHORTEST = 4  # ids, of which spans are cut out
SENTINEL_FORMS = "<|sentinel_{}|>", "<extra_id_{}>"  # ours, and T5's


class Edges(NamedTuple):
    """The ids that a document begins and ends with; some tokenizers put nothing in front."""

    begin: int | None
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Those of a tokenizer."""
        return cls(tokenizer.before[0] if tokenizer.before else None, tokenizer.eos)


OURS = Edges(Tokenizer.before[0], Tokenizer.eos)


def spans(
    ids: Sequence[Ids],
    free: int,
    key: Key,
    *,
    rate: float,
    mean: float,
    sentinels: Ids,
    edges: Edges = OURS,
) -> list[Piece]:
    """`x <s0> y <s1>`, read both ways, then `<s0> first span <s1> second span <eos>`, predicted from left to right.

    round(rate x n) of a piece's n ids are cut out, in runs of `mean` on average, each replaced by the next of the
    `sentinels`; of more runs than sentinels, these come again in the same order. A begin or end of text stays where it is.

    A piece needs a free slot for each span and each sentinel before it, and one for the end. Pieces take them in an order
    that is drawn; one that finds few has fewer spans, and one without, or too short for a span, is cut in two as in
    `prefix.prefixes`.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2, there for an encoder and a decoder; in one
    row Tay et al. 2022, arXiv:2205.05131, section 3.1. As in their code, the last span ends with the end of text, in
    their figure with a sentinel more.
    """
    draw = key.draws()
    found: dict[int, Piece] = {}
    for number in draw.permutation(len(ids)).tolist():
        found[number], used = _cut(ids[number], free, draw, rate, mean, sentinels, edges)
        free -= used
    return [found[number] for number in range(len(ids))]


def room(sequence: int, rate: float, mean: float) -> int:
    """Slots of a row that spans take for their sentinels: two for each, and one for each 64 slots and piece."""
    most = sequence - 1
    while most > 1 and most + 2 * count_of(most, rate, mean)[1] + 1 + most // 64 > sequence:
        most -= 1
    return sequence - most


def count_of(length: int, rate: float, mean: float) -> tuple[int, int]:
    """How many of so many ids are cut out, and in how many spans; at least one, and at least one id between two."""
    cut = portion(length, rate)
    return cut, max(min(round(cut / mean), length - cut, cut), 1)


def _cut(
    ids: Ids,
    free: int,
    draw: np.random.Generator,
    rate: float,
    mean: float,
    sentinels: Ids,
    edges: Edges,
) -> tuple[Piece, int]:
    """The piece, and how many free slots it takes."""
    begin, end = inside(ids, edges)
    length = end - begin
    if length < SHORTEST or free < 3:
        return left_to_right(ids, int(draw.integers(1, len(ids)))), 0
    cut, count = count_of(length, rate, mean)
    count = min(count, (free - 1) // 2)
    starts, stops = runs(cut, length, count, draw)
    read, written = apart(ids, starts + begin, stops + begin, sentinels, edges)
    return left_to_right(np.concatenate([read, written]), len(read)), 2 * count + 1


def apart(ids: Ids, starts: Ids, stops: Ids, sentinels: Ids, edges: Edges) -> tuple[Ids, Ids]:
    """What is left of the ids, a sentinel for each run; and the runs, each after its sentinel, and the end of text."""
    left, right = [], []
    at = 0
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        sentinel = sentinels[number % len(sentinels), None]
        left += [ids[at:start], sentinel]
        right += [sentinel, ids[start:stop]]
        at = stop
    read = np.concatenate([*left, ids[at:]])
    written = np.concatenate([*right, [edges.end]])
    return read.astype(np.int32), written.astype(np.int32)


def inside(ids: Ids, edges: Edges = OURS) -> tuple[int, int]:
    """The part of a piece [begin, end) that is text: without the begin and the end of the document."""
    return int(ids[0] == edges.begin), len(ids) - int(ids[-1] == edges.end)


def runs(cut: int, length: int, count: int, draw: np.random.Generator) -> tuple[Ids, Ids]:
    """Where `count` runs begin and end, `cut` of `length` places in all, none at the beginning and no two neighbours."""
    gaps, sizes = _parts(length - cut, count, draw), _parts(cut, count, draw)
    stops = np.cumsum(gaps + sizes)
    return stops - sizes, stops


def _parts(total: int, count: int, draw: np.random.Generator) -> Ids:
    """`total` as a sum of `count` numbers above 0, every such sum as likely."""
    cuts = np.sort(draw.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def sentinels(tokenizer: Tokenizer) -> Ids:
    """The ids of the sentinels that are reserved, in their order: ours or, of an imported model, T5's; empty without either."""
    for form in SENTINEL_FORMS:
        names = map(form.format, itertools.count())
        if found := [
            tokenizer.reserved[name]
            for name in itertools.takewhile(tokenizer.reserved.__contains__, names)
        ]:
            return np.array(found, np.int32)
    return np.zeros(0, np.int32)
