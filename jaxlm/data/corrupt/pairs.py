"""Rows of an encoder-decoder: the encoder's source and the decoder's target."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.batch import START, Tokens
from jaxlm.data.corrupt import rows, spans
from jaxlm.data.corrupt.rows import Ids, PieceChange, RowChange, RowKey

MIN_LENGTH = 2  # fewest ids of text to cut
MULTIPLE = 8  # decoder slots are a multiple of this


class SourceTarget(NamedTuple):
    """Source and target of one piece; the target is empty if no slots were free."""

    source: Ids
    target: Ids


# Cuts one piece, given the free slots of the decoder's row.
PieceCut = Callable[[Ids, int, np.random.Generator], SourceTarget]


@dataclasses.dataclass(frozen=True)
class EncoderDecoderRows(RowChange):
    """Makes an encoder's and a decoder's row of one row, as a pure function of row and key.

    The encoder's row has the slots of the plan. If all are taken, some end-of-document ids are left
    out. The decoder begins each piece after `START`.
    """

    change: PieceChange[SourceTarget]  # takes the free slots of the decoder's row
    length: int  # slots of the decoder's row
    end: int  # the end-of-document id

    def __call__(self, row: Tokens, key: RowKey) -> Tokens:
        """Make a source [S] and a decoder's row [T] of a row [S]; leave out unreadable pieces."""
        # The id that only the last slot predicts has no slot, unless it ends the document.
        read = [ids for ids in rows.whole_pieces(row) if ids is not None]
        pieces = [ids if ids[-1] == self.end else ids[:-1] for ids in read]
        return self._packed(self.change(pieces, self.length, key), len(row.tokens))

    def _packed(self, pairs: list[SourceTarget], length: int) -> Tokens:
        over = sum(len(pair.source) for pair in pairs) - length
        source, source_segments = np.zeros(length, np.int32), np.zeros(length, np.int32)
        tokens, targets, segments, positions = (np.zeros(self.length, np.int32) for _ in range(4))
        weights = np.zeros(self.length, np.float32)
        read = written = 0
        for segment, (ids, target) in enumerate(pairs, 1):
            if over > 0 and ids[-1] == self.end:
                ids, over = ids[:-1], over - 1
            here = slice(read, read + len(ids))
            source[here], source_segments[here] = ids, segment
            read += len(ids)
            here = slice(written, written + len(target))
            if len(target):
                tokens[here], targets[here] = [START, *target[:-1]], target
            weights[here], segments[here], positions[here] = 1, segment, np.arange(len(target))
            written += len(target)
        fields = tokens, targets, weights, segments, positions
        encoder = {"source": source, "source_segments": source_segments}
        return Tokens(*fields, **encoder)  # type: ignore[arg-type]


def cut_pieces(ids: Sequence[Ids], free: int, key: RowKey, *, cut: PieceCut) -> list[SourceTarget]:
    """Cut each piece by `cut`; pieces take the decoder's slots in random order."""

    def counted(piece: Ids, free: int, rng: np.random.Generator) -> tuple[SourceTarget, int]:
        pair = cut(piece, free, rng)
        return pair, len(pair.target)

    return rows.change_in_random_order(ids, free, key, counted)


def cut_spans(
    ids: Ids,
    free: int,
    rng: np.random.Generator,
    *,
    rate: float,
    mean: float,
    sentinels: Ids,
    edges: spans.Edges,
) -> SourceTarget:
    """Read `x <s0> y <s1>` and write `<s0> first span <s1> second span <eos>`.

    If few slots are free, fewer ids are cut out; if none are, or the piece is too short, nothing is
    predicted. Begin and end of text stay in the source.

    Args:
      rate: share of the ids that is cut out.
      mean: mean length of a span.
      sentinels: sentinel ids.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2.
    """
    begin, end = spans.text_range(ids, edges)
    cut, count = fit_spans(end - begin, rate, mean, free)
    if not cut:
        return SourceTarget(ids, ids[:0])
    starts, stops = spans.draw_spans(cut, end - begin, count, rng)
    return SourceTarget(*spans.split_spans(ids, starts + begin, stops + begin, sentinels, edges))


def cut_suffix(
    ids: Ids, free: int, rng: np.random.Generator, *, share: float, edges: spans.Edges
) -> SourceTarget:
    """Write the last `share` of the ids and read the rest; short of slots as in `cut_spans`.

    The source ends with the end of text, as a prompt does. The target ends with it only if the
    document does: a piece cut by a row teaches no end. No sentinels are needed.

    Args:
      share: share of the ids that is written.

    Source: Tay et al. 2022, arXiv:2205.05131, section 3.1.2, the S-denoiser.
    """
    begin, end = spans.text_range(ids, edges)
    room = free - (len(ids) - end)
    if end - begin < MIN_LENGTH or room < 1:
        return SourceTarget(ids, ids[:0])
    cut = end - min(rows.count_of_share(end - begin, share), room)
    return SourceTarget(np.append(ids[:cut], edges.end).astype(np.int32), ids[cut:])


def fit_spans(length: int, rate: float, mean: float, free: int) -> tuple[int, int]:
    """Return (ids cut out, spans) that fit in the free slots with an end id; (0, 0) if none fit."""
    if length < MIN_LENGTH:
        return 0, 0
    cut, count = spans.span_counts(length, rate, mean)
    while cut and cut + count + 1 > free:
        cut -= 1
        count = min(count, max(round(cut / mean), 1))
    return (cut, count) if cut else (0, 0)


def target_length_of_spans(sequence: int, rate: float, mean: float) -> int:
    """Return decoder slots for `cut_spans` of an encoder's row of `sequence` slots."""
    return _length(sequence, sum(spans.span_counts(sequence, rate, mean)))


def target_length_of_suffix(sequence: int, share: float) -> int:
    """Return decoder slots for `cut_suffix` of an encoder's row of `sequence` slots."""
    return _length(sequence, rows.count_of_share(sequence, share))


def _length(sequence: int, written: int) -> int:
    """Return slots for one document with its end, plus one per 64 slots for more documents."""
    return -(-(written + 1 + sequence // 64) // MULTIPLE) * MULTIPLE
