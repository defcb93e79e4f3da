"""Span corruption: spans are cut out and predicted after the remaining text."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right, portion
from jaxlm.data.tokenizer import Tokenizer

SHORTEST = 4  # fewest ids of text to cut spans from
SENTINEL_FORMS = "<|sentinel_{}|>", "<extra_id_{}>"  # ours, and T5's


class Edges(NamedTuple):
    """Begin and end ids of documents; some tokenizers have no begin id."""

    begin: int | None
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the edges of a tokenizer."""
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
    """Make `x <s0> y <s1>`, bidirectional, then `<s0> first span <s1> second span <eos>`,
    predicted.

    round(rate x n) of a piece's n ids are cut out, in spans of `mean` ids on average, each replaced
    by the next sentinel; sentinels repeat in order if there are more spans. Begin and end of text
    stay in place.

    A piece needs a free slot for each span and its sentinel, and one for the end. Pieces take slots
    in random order; with few slots a piece has fewer spans, and without any, or if it is too short,
    it is split as in `prefix.prefixes`.

    Args:
      ids: ids of each piece.
      free: free slots of the row.
      key: key of the row.
      rate: share of the ids that is cut out.
      mean: mean length of a span.
      sentinels: sentinel ids.
      edges: begin and end ids of documents.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2, there for an
    encoder-decoder; in one row Tay et al. 2022, arXiv:2205.05131, section 3.1. As in their code,
    the last span ends with the end of text; in their figure with one more sentinel.
    """
    draw = key.draws()
    pieces: dict[int, Piece] = {}
    for number in draw.permutation(len(ids)).tolist():
        pieces[number], used = _cut(ids[number], free, draw, rate, mean, sentinels, edges)
        free -= used
    return [pieces[number] for number in range(len(ids))]


def room(sequence: int, rate: float, mean: float) -> int:
    """Return the slots of a row for sentinels: two per span, and one per 64 slots and piece."""
    most = sequence - 1
    while most > 1 and most + 2 * count_of(most, rate, mean)[1] + 1 + most // 64 > sequence:
        most -= 1
    return sequence - most


def count_of(length: int, rate: float, mean: float) -> tuple[int, int]:
    """Return (ids cut out, spans): at least one each, with an id between two spans."""
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
    """Return the piece and the number of free slots used."""
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
    """Return (text with sentinels for spans, spans after their sentinels with the end of text).

    Args:
      ids: ids of the piece.
      starts: first id of each span.
      stops: end of each span.
      sentinels: sentinel ids.
      edges: begin and end ids of documents.
    """
    left, right = [], []
    end = 0
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        sentinel = sentinels[number % len(sentinels), None]
        left += [ids[end:start], sentinel]
        right += [sentinel, ids[start:stop]]
        end = stop
    read = np.concatenate([*left, ids[end:]])
    written = np.concatenate([*right, [edges.end]])
    return read.astype(np.int32), written.astype(np.int32)


def inside(ids: Ids, edges: Edges = OURS) -> tuple[int, int]:
    """Return the range [begin, end) of a piece without begin and end of the document."""
    return int(ids[0] == edges.begin), len(ids) - int(ids[-1] == edges.end)


def runs(cut: int, length: int, count: int, draw: np.random.Generator) -> tuple[Ids, Ids]:
    """Return starts and ends of `count` spans, `cut` of `length` ids; not first, not adjacent."""
    gaps, sizes = _parts(length - cut, count, draw), _parts(cut, count, draw)
    stops = np.cumsum(gaps + sizes)
    return stops - sizes, stops


def _parts(total: int, count: int, draw: np.random.Generator) -> Ids:
    """Return `count` numbers above 0 with the sum `total`, all such sums equally likely."""
    cuts = np.sort(draw.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def sentinels(tokenizer: Tokenizer) -> Ids:
    """Return the sentinel ids in order: ours or an imported model's T5 sentinels; maybe empty."""
    for form in SENTINEL_FORMS:
        names = map(form.format, itertools.count())
        if numbers := [
            tokenizer.reserved[name]
            for name in itertools.takewhile(tokenizer.reserved.__contains__, names)
        ]:
            return np.array(numbers, np.int32)
    return np.zeros(0, np.int32)
