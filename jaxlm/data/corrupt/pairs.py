"""Text for an encoder and a decoder: what is read of it in one row, what is written in another."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from jaxlm.data.batch import START, Tokens
from jaxlm.data.corrupt import spans
from jaxlm.data.corrupt.rows import Change, Ids, Key, portion, whole_pieces

SHORTEST = 2  # ids, of which one can be cut out
MULTIPLE = 8  # of the slots of a decoder's row


class Pair(NamedTuple):
    """One document's piece: what the encoder reads of it, and what the decoder writes; nothing where there was no room."""

    read: Ids
    written: Ids


# How one piece is cut, with so many free slots in the decoder's row.
Cut = Callable[[Ids, int, np.random.Generator], Pair]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How an objective makes an encoder's row and a decoder's of one, as a pure function of it and of where it is read.

    The encoder's row has the slots of the plan. Of the ends of documents, where every slot is taken, some are left out.
    The decoder begins each piece after `START`.

    Args:
      change: of the ids of the row's pieces and the number of the decoder's slots: the pair that each becomes.
      length: slots of the decoder's row.
      end: the id that documents end with.
    """

    change: Change[Pair]
    length: int
    end: int

    room: ClassVar[int] = 0
    both_ways: ClassVar[bool] = False
    has_inner: ClassVar[bool] = False
    has_ahead: ClassVar[bool] = False

    def __call__(self, row: Tokens, key: Key) -> Tokens:
        """One row [S] as a source [S] and a decoder's row [T]. Pieces that could not be read are left out."""
        known = [self._own(ids) for ids in whole_pieces(row) if ids is not None]
        return self._packed(self.change(known, self.length, key), len(row.tokens))

    def _own(self, ids: Ids) -> Ids:
        """A piece without the id that its last slot predicts, which is in no slot; but with the end of its document."""
        return ids if ids[-1] == self.end else ids[:-1]

    def _packed(self, pairs: list[Pair], length: int) -> Tokens:
        over = sum(len(pair.read) for pair in pairs) - length
        source, segments = np.zeros(length, np.int32), np.zeros(length, np.int32)
        tokens, targets, owner, positions = (np.zeros(self.length, np.int32) for _ in range(4))
        weights = np.zeros(self.length, np.float32)
        at = begun = 0
        for segment, (read, written) in enumerate(pairs, 1):
            if over > 0 and read[-1] == self.end:
                read, over = read[:-1], over - 1
            source[at : at + len(read)], segments[at : at + len(read)] = read, segment
            at += len(read)
            here = slice(begun, begun + len(written))
            if len(written):
                tokens[here], targets[here] = [START, *written[:-1]], written
            weights[here], owner[here], positions[here] = 1, segment, np.arange(len(written))
            begun += len(written)
        made = Tokens(tokens, targets, weights, owner, positions)  # type: ignore[arg-type]
        return made._replace(source=source, source_segments=segments)  # type: ignore[arg-type]


def cut_all(ids: Sequence[Ids], free: int, key: Key, *, cut: Cut) -> list[Pair]:
    """Each piece cut by `cut`. They take the decoder's slots in an order that is drawn."""
    draw = key.draws()
    found: dict[int, Pair] = {}
    for number in draw.permutation(len(ids)).tolist():
        found[number] = pair = cut(ids[number], free, draw)
        free -= len(pair.written)
    return [found[number] for number in range(len(ids))]


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
    """`x <s0> y <s1>` is read, and `<s0> first span <s1> second span <eos>` written, with the runs of `spans.spans`.

    Of a piece that finds few slots fewer ids are cut out; of one that finds none, or is shorter than two ids, nothing is
    predicted. A begin and an end of text are read where they are.

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
    """The last `share` of the ids is written, those before it are read; short of slots as in `cut_runs`.

    What is read ends with an end of text, as a prompt does; what is written, where the document ends: a piece that just
    stops teaches no end. There are no sentinels, as the text goes on where it ends.

    Source: Tay et al. 2022, arXiv:2205.05131, section 3.1.2, of the S-denoiser.
    """
    begin, end = spans.inside(ids, edges)
    room = free - (len(ids) - end)
    if end - begin < SHORTEST or room < 1:
        return Pair(ids, ids[:0])
    at = end - min(portion(end - begin, share), room)
    return Pair(np.append(ids[:at], edges.end).astype(np.int32), ids[at:])


def fitting(length: int, rate: float, mean: float, free: int) -> tuple[int, int]:
    """How many of so many ids are cut out, and in how many spans, so that they and an end fit in the free slots; or none."""
    if length < SHORTEST:
        return 0, 0
    cut, count = spans.count_of(length, rate, mean)
    while cut and cut + count + 1 > free:
        cut -= 1
        count = min(count, max(round(cut / mean), 1))
    return (cut, count) if cut else (0, 0)


def length_of_runs(sequence: int, rate: float, mean: float) -> int:
    """Slots of the decoder's row beside so many of the encoder's, for `cut_runs`."""
    return _length(sequence, sum(spans.count_of(sequence, rate, mean)))


def length_of_end(sequence: int, share: float) -> int:
    """Slots of the decoder's row beside so many of the encoder's, for `cut_end`."""
    return _length(sequence, portion(sequence, share))


def _length(sequence: int, written: int) -> int:
    """Slots for one document with its end, and one more for each 64 slots, as of a row of a few documents."""
    return -(-(written + 1 + sequence // 64) // MULTIPLE) * MULTIPLE
