"""Span corruption (T5) and blank infilling (GLM): spans are cut out and predicted afterwards.

Example:
  >>> text, spans = split_spans(np.arange(10, 16), [1], [3], np.array([99]), DEFAULT_EDGES)
  >>> text.tolist(), spans.tolist()
  ([10, 99, 13, 14, 15], [99, 11, 12, 2])
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jaxlm.data.corrupt import rows
from jaxlm.data.corrupt.rows import ChangedPiece, Ids, RowKey, left_to_right
from jaxlm.data.tokenizer import Tokenizer

MIN_LENGTH = 4  # fewest ids of text to cut spans from
SENTINEL_FORMS = "<|sentinel_{}|>", "<extra_id_{}>"  # ours, and T5's


class Edges(NamedTuple):
    """Begin and end ids of documents; some tokenizers have no begin id."""

    begin: int | None
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the edges of a tokenizer."""
        return cls(tokenizer.before[0] if tokenizer.before else None, tokenizer.eos)


DEFAULT_EDGES = Edges(Tokenizer.before[0], Tokenizer.eos)


class BlankIds(NamedTuple):
    """Ids of a blank in the text, and of the start and end of its span."""

    blank: int
    start: int
    end: int


def corrupt_spans(
    ids: Sequence[Ids],
    free: int,
    key: RowKey,
    *,
    rate: float,
    mean: float,
    sentinels: Ids,
    edges: Edges = DEFAULT_EDGES,
) -> list[ChangedPiece]:
    """Make `x <s0> y <s1>`, bidirectional, and predict `<s0> first span <s1> second span <eos>`.

    round(rate x n) of a piece's n ids are cut out, in spans of `mean` ids on average, each replaced
    by the next sentinel; sentinels repeat in order if there are more spans. Begin and end of text
    stay in place.

    A piece needs a free slot for each span and its sentinel, and one for the end. Pieces take slots
    in random order; with few slots a piece has fewer spans, and without any, or if it is too short,
    it becomes a prefix and a predicted rest.

    Args:
      rate: share of the ids that is cut out.
      mean: mean length of a span.
      sentinels: sentinel ids.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2, there for an
    encoder-decoder; in one row Tay et al. 2022, arXiv:2205.05131, section 3.1. As in their code,
    the last span ends with the end of text; in their figure with one more sentinel.
    """

    def cut(piece: Ids, free: int, rng: np.random.Generator) -> tuple[ChangedPiece, int]:
        drawn = _spans_of(piece, free, rng, rate, mean, edges)
        if drawn is None:
            return _random_prefix(piece, rng), 0
        text, spans = split_spans(piece, *drawn, sentinels, edges)
        return left_to_right(np.concatenate([text, spans]), len(text)), 2 * len(drawn[0]) + 1

    return rows.change_in_random_order(ids, free, key, cut)


def infill_blanks(
    ids: Sequence[Ids],
    free: int,
    key: RowKey,
    *,
    rate: float,
    mean: float,
    marks: BlankIds,
    max_block_positions: int,
    edges: Edges = DEFAULT_EDGES,
) -> list[ChangedPiece]:
    """Make `x <blank> y <blank>`, bidirectional, followed by `<start> span` for each blank.

    Spans come in random order, and `span <end>` is predicted from left to right: each token attends
    to the text and to earlier spans. The first position is that of the blank in the text; the
    second counts from 1 inside the span and is 0 in the text. The amount cut out, the free slots
    needed, and pieces without any are as in `corrupt_spans`.

    Args:
      rate: share of the ids that is cut out.
      mean: mean length of a span.
      marks: special ids.
      max_block_positions: number of second positions; larger ones are clipped.

    Source: Du et al. 2022, arXiv:2103.10360, sections 2.1 and 2.2. There span lengths are drawn
    from a Poisson distribution; here any lengths that add up to the rate are equally likely, as in
    T5.
    """

    def cut(piece: Ids, free: int, rng: np.random.Generator) -> tuple[ChangedPiece, int]:
        drawn = _spans_of(piece, free, rng, rate, mean, edges)
        if drawn is None:
            return _random_prefix(piece, rng), 0
        count = len(drawn[0])
        is_kept, is_blank = np.ones(len(piece), bool), np.zeros(len(piece), bool)
        for start, stop in zip(*drawn, strict=True):
            is_kept[start:stop] = False
            is_blank[start] = True
        text = np.where(is_blank, marks.blank, piece)[is_kept | is_blank]
        places = np.flatnonzero(is_blank[is_kept | is_blank])
        spans = [piece[start:stop] for start, stop in zip(*drawn, strict=True)]
        order = rng.permutation(count)
        sizes = np.array([len(spans[number]) + 1 for number in order])
        inputs = [np.append(marks.start, spans[number]) for number in order]
        targets = [np.append(spans[number], marks.end) for number in order]
        slots = np.arange(len(text) + sizes.sum())
        blocks = np.concatenate([np.zeros(len(text)), *(np.arange(1, size + 1) for size in sizes)])
        positions = np.append(slots[: len(text)], np.repeat(places[order], sizes))
        return ChangedPiece(
            tokens=np.concatenate([text, *inputs]).astype(np.int32),
            targets=np.concatenate([text, *targets]).astype(np.int32),
            weights=(slots >= len(text)).astype(np.float32),
            positions=positions.astype(np.int32),
            visible_until=np.maximum(slots, len(text) - 1).astype(np.int32),
            block_positions=np.minimum(blocks, max_block_positions - 1).astype(np.int32),
        ), 2 * count + 1

    return rows.change_in_random_order(ids, free, key, cut)


def _spans_of(
    ids: Ids, free: int, rng: np.random.Generator, rate: float, mean: float, edges: Edges
) -> tuple[Ids, Ids] | None:
    """Draw starts and ends of the spans of a piece; None if it is short or slots are few."""
    begin, end = text_range(ids, edges)
    if end - begin < MIN_LENGTH or free < 3:
        return None
    cut, count = span_counts(end - begin, rate, mean)
    starts, stops = draw_spans(cut, end - begin, min(count, (free - 1) // 2), rng)
    return starts + begin, stops + begin


def _random_prefix(ids: Ids, rng: np.random.Generator) -> ChangedPiece:
    return left_to_right(ids, int(rng.integers(1, len(ids))))


def reserved_slots(sequence: int, rate: float, mean: float) -> int:
    """Return the slots of a row for sentinels: two per span, and one per 64 slots and piece."""
    most = sequence - 1
    while most > 1 and most + 2 * span_counts(most, rate, mean)[1] + 1 + most // 64 > sequence:
        most -= 1
    return sequence - most


def span_counts(length: int, rate: float, mean: float) -> tuple[int, int]:
    """Return (ids cut out, spans): at least one each, with an id between two spans."""
    cut = rows.count_of_share(length, rate)
    return cut, max(min(round(cut / mean), length - cut, cut), 1)


def split_spans(ids: Ids, starts: Ids, stops: Ids, sentinels: Ids, edges: Edges) -> tuple[Ids, Ids]:
    """Return (text with sentinels for spans, spans after their sentinels with the end of text).

    Args:
      sentinels: sentinel ids.
    """
    left, right, before = [], [], 0
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        sentinel = sentinels[number % len(sentinels), None]
        left += [ids[before:start], sentinel]
        right += [sentinel, ids[start:stop]]
        before = stop
    text = np.concatenate([*left, ids[before:]])
    return text.astype(np.int32), np.concatenate([*right, [edges.end]]).astype(np.int32)


def text_range(ids: Ids, edges: Edges = DEFAULT_EDGES) -> tuple[int, int]:
    """Return the range [begin, end) of a piece without begin and end of the document."""
    return int(ids[0] == edges.begin), len(ids) - int(ids[-1] == edges.end)


def draw_spans(cut: int, length: int, count: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Return starts and ends of `count` spans, `cut` of `length` ids; not first, not adjacent."""
    gaps, sizes = _random_sum(length - cut, count, rng), _random_sum(cut, count, rng)
    stops = np.cumsum(gaps + sizes)
    return stops - sizes, stops


def _random_sum(total: int, count: int, rng: np.random.Generator) -> Ids:
    """Return `count` numbers above 0 with the sum `total`, all such sums equally likely."""
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def sentinel_ids(tokenizer: Tokenizer) -> Ids:
    """Return the sentinel ids in order: ours or an imported model's T5 sentinels; maybe empty."""
    known = tokenizer.reserved
    for form in SENTINEL_FORMS:
        names = itertools.takewhile(known.__contains__, map(form.format, itertools.count()))
        if ids := [known[name] for name in names]:
            return np.array(ids, np.int32)
    return np.zeros(0, np.int32)
