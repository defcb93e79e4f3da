"""Rows of an encoder-decoder: the encoder's source and the decoder's target."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from jaxlm.data.batch import START, Tokens
from jaxlm.data.corrupt import spans
from jaxlm.data.corrupt.rows import Change, Ids, Key, portion, whole_pieces

SHORTEST = 2  # fewest ids of text to cut
MULTIPLE = 8  # decoder slots are a multiple of this


class Pair(NamedTuple):
    """Source and target of one piece; the target is empty if no slots were free."""

    read: Ids
    written: Ids


# Cuts one piece, given the free slots of the decoder's row.
Cut = Callable[[Ids, int, np.random.Generator], Pair]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Makes an encoder's and a decoder's row of one row, as a pure function of row and key.

    The encoder's row has the slots of the plan. If all are taken, some end-of-document ids are left
    out. The decoder begins each piece after `START`.

    Args:
      change: makes a pair of each piece, given the free slots of the decoder's row.
      length: slots of the decoder's row.
      end: the end-of-document id.
    """

    change: Change[Pair]
    length: int
    end: int

    room: ClassVar[int] = 0
    both_ways: ClassVar[bool] = False
    has_inner: ClassVar[bool] = False
    has_ahead: ClassVar[bool] = False

    def __call__(self, row: Tokens, key: Key) -> Tokens:
        """Make a source [S] and a decoder's row [T] of a row [S]; leave out unreadable pieces."""
        known = [self._own(ids) for ids in whole_pieces(row) if ids is not None]
        return self._packed(self.change(known, self.length, key), len(row.tokens))

    def _own(self, ids: Ids) -> Ids:
        """Drop the id that only the last slot predicts, unless it ends the document."""
        return ids if ids[-1] == self.end else ids[:-1]

    def _packed(self, pairs: list[Pair], length: int) -> Tokens:
        over = sum(len(pair.read) for pair in pairs) - length
        source, segments = np.zeros(length, np.int32), np.zeros(length, np.int32)
        tokens, targets, owner, positions = (np.zeros(self.length, np.int32) for _ in range(4))
        weights = np.zeros(self.length, np.float32)
        slot = begun = 0
        for segment, (read, written) in enumerate(pairs, 1):
            if over > 0 and read[-1] == self.end:
                read, over = read[:-1], over - 1
            source[slot : slot + len(read)], segments[slot : slot + len(read)] = read, segment
            slot += len(read)
            here = slice(begun, begun + len(written))
            if len(written):
                tokens[here], targets[here] = [START, *written[:-1]], written
            weights[here], owner[here], positions[here] = 1, segment, np.arange(len(written))
            begun += len(written)
        made = Tokens(tokens, targets, weights, owner, positions)  # type: ignore[arg-type]
        return made._replace(source=source, source_segments=segments)  # type: ignore[arg-type]


def cut_all(ids: Sequence[Ids], free: int, key: Key, *, cut: Cut) -> list[Pair]:
    """Cut each piece by `cut`; pieces take the decoder's slots in random order."""
    draw = key.draws()
    cuts: dict[int, Pair] = {}
    for number in draw.permutation(len(ids)).tolist():
        cuts[number] = pair = cut(ids[number], free, draw)
        free -= len(pair.written)
    return [cuts[number] for number in range(len(ids))]


def cut_runs(
    ids: Ids,
    free: int,
    draw: np.random.Generator,
    *,
    rate: float,
    mean: float,
    sentinels: Ids,
    edges: spans.Edges,
) -> Pair:
    """Read `x <s0> y <s1>` and write `<s0> first span <s1> second span <eos>`, as `spans.spans`.

    If few slots are free, fewer ids are cut out; if none are, or the piece is too short, nothing is
    predicted. Begin and end of text stay in the source.

    Args:
      ids: ids of the piece.
      free: free slots of the decoder's row.
      draw: random generator.
      rate: share of the ids that is cut out.
      mean: mean length of a span.
      sentinels: sentinel ids.
      edges: begin and end ids of documents.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2.
    """
    begin, end = spans.inside(ids, edges)
    cut, count = fitting(end - begin, rate, mean, free)
    if not cut:
        return Pair(ids, ids[:0])
    starts, stops = spans.runs(cut, end - begin, count, draw)
    return Pair(*spans.apart(ids, starts + begin, stops + begin, sentinels, edges))


def cut_end(
    ids: Ids, free: int, draw: np.random.Generator, *, share: float, edges: spans.Edges
) -> Pair:
    """Write the last `share` of the ids and read the rest; short of slots as in `cut_runs`.

    The source ends with the end of text, as a prompt does. The target ends with it only if the
    document does: a piece cut by a row teaches no end. No sentinels are needed.

    Args:
      ids: ids of the piece.
      free: free slots of the decoder's row.
      draw: random generator, unused.
      share: share of the ids that is written.
      edges: begin and end ids of documents.

    Source: Tay et al. 2022, arXiv:2205.05131, section 3.1.2, the S-denoiser.
    """
    begin, end = spans.inside(ids, edges)
    room = free - (len(ids) - end)
    if end - begin < SHORTEST or room < 1:
        return Pair(ids, ids[:0])
    cut = end - min(portion(end - begin, share), room)
    return Pair(np.append(ids[:cut], edges.end).astype(np.int32), ids[cut:])


def fitting(length: int, rate: float, mean: float, free: int) -> tuple[int, int]:
    """Return (ids cut out, spans) that fit in the free slots with an end id; (0, 0) if none fit."""
    if length < SHORTEST:
        return 0, 0
    cut, count = spans.count_of(length, rate, mean)
    while cut and cut + count + 1 > free:
        cut -= 1
        count = min(count, max(round(cut / mean), 1))
    return (cut, count) if cut else (0, 0)


def length_of_runs(sequence: int, rate: float, mean: float) -> int:
    """Return decoder slots for `cut_runs` of an encoder's row of `sequence` slots."""
    return _length(sequence, sum(spans.count_of(sequence, rate, mean)))


def length_of_end(sequence: int, share: float) -> int:
    """Return decoder slots for `cut_end` of an encoder's row of `sequence` slots."""
    return _length(sequence, portion(sequence, share))


def _length(sequence: int, written: int) -> int:
    """Return slots for one document with its end, plus one per 64 slots for more documents."""
    return -(-(written + 1 + sequence // 64) // MULTIPLE) * MULTIPLE
