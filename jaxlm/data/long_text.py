"""Encoding of texts of any length in bounded memory, with the ids of encoding each text at once.

A long text is encoded in spans, each together with the `CONTEXT` characters in front of it. A cut
between two spans is kept only if three encodings agree:

    left     the span that ends at the cut
    context  the last characters of that span, alone
    right    the same characters followed by the next span

`right` must begin with the ids of `context`, and `left` must end with the last `AGREE` of them.
Spans around a rejected cut are encoded again as one span. A prefix that the tokenizer puts in front
of every text is in `context` and in `right`, and is dropped with them.

Why this is exact for byte pair encoding: ids are the encoding of a text if and only if every two
adjacent ids are the encoding of their own text, because merges inside two tokens happen in the same
order in any surroundings. Every adjacent pair of the joined ids is adjacent in `left` or in
`right`. Pre-tokenization (regular expressions, white space, punctuation) and normalization are
local, so that they agree as well. Cuts between two words are tried first; a cut inside a run of one
kind of characters only if `MAX_WORD_SPAN` characters have no other place. `Tokenizer.span` is None
or larger for tokenizers without this property.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from jaxlm.data.tokenizer import Tokenizer

BATCH = 2**20  # characters of one call of the tokenizer
CONTEXT = 256  # characters of the previous span that are encoded with the next one
AGREE = 4  # ids of the context on which both spans must agree
SEARCH = 2**11  # characters before the largest end of a span that are searched for a cut
MAX_WORD_SPAN = 2**20  # characters without a word boundary after which a span is cut anyway
FIRST_WIDE = "\u2e80"  # first character of the scripts without spaces between words

Item = TypeVar("Item")


class _Span(NamedTuple):
    """A part of a text, text[start:stop], encoded with its context text[context:start]."""

    context: int
    start: int
    stop: int


class _Encoded(NamedTuple):
    span: _Span
    context: np.ndarray  # ids of the context alone
    ids: np.ndarray  # ids of context and span together


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[np.ndarray]]:
    """Yield the ids of `tokenizer.encode(text)` for each text, as arrays to be joined.

    Arrays have the narrowest unsigned dtype of the vocabulary; int64 if an id is outside of it.
    """
    for group in _groups(texts, len):
        spans = [_spans(tokenizer, text) for text in group]
        pairs = ((text, span) for text, each in zip(group, spans, strict=True) for span in each)
        encoded = _encoded(tokenizer, pairs)
        for text, each in zip(group, spans, strict=True):
            joined = _joined(tokenizer, text, list(itertools.islice(encoded, len(each))))
            yield [part.ids[len(part.context) :] for part in joined]


def _groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield groups of items with about `BATCH` characters in all."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= BATCH:
            yield group
            group, total = [], 0
    if group:
        yield group


def _encoded(tokenizer: Tokenizer, spans: Iterable[tuple[str, _Span]]) -> Iterator[_Encoded]:
    """Yield the ids of each span as arrays; lists of integers take twenty times their text."""
    dtype = np.min_scalar_type(tokenizer.size - 1)

    def array(ids: list[int]) -> np.ndarray:
        values = np.array(ids, np.int64)
        is_inside = not len(values) or (values.min() >= 0 and values.max() < tokenizer.size)
        return values.astype(dtype) if is_inside else values

    for batch in _groups(spans, lambda item: item[1].stop - item[1].context):
        texts: list[str] = []
        for text, span in batch:
            texts.append(text[span.context : span.stop])
            if span.context < span.start:
                texts.append(text[span.context : span.start])
        encodings = iter(tokenizer.encode_many(texts))
        for _, span in batch:
            ids = array(next(encodings))
            context = array(next(encodings) if span.context < span.start else [])
            yield _Encoded(span, context, ids)


def _spans(tokenizer: Tokenizer, text: str) -> list[_Span]:
    """Return the first spans of a text."""
    longest = tokenizer.span
    if longest is None or len(text) <= longest:
        return [_Span(0, 0, len(text))]
    places = tokenizer.cuts(text)
    if places is not None:
        cuts = [0]
        for place in places:
            if place - cuts[-1] >= longest:
                cuts.append(place)
        return [_Span(a, a, b) for a, b in itertools.pairwise([*cuts, len(text)])]
    cuts, place = [0], 0
    while len(text) - place > longest:
        if (place := _place(tokenizer, text, place + longest, place)) < len(text):
            cuts.append(place)
    return [_Span(max(0, a - CONTEXT), a, b) for a, b in itertools.pairwise([*cuts, len(text)])]


def _place(tokenizer: Tokenizer, text: str, stop: int, start: int) -> int:
    """Return the cut that ends the span from `start`: up to `stop` if possible, else behind it."""
    place = _between_words(tokenizer, text, max(start + 1, stop - SEARCH), stop)
    while place is None and stop < len(text):
        if stop - start >= MAX_WORD_SPAN:
            return stop
        low, stop = stop, min(len(text), stop + SEARCH)
        place = _between_words(tokenizer, text, low, stop)
    return len(text) if place is None else place


def _between_words(tokenizer: Tokenizer, text: str, low: int, high: int) -> int | None:
    """Return the best cut in low < place <= high, the last of equal ones.

    Best first: in front of a single space that no token crosses, another place that no token
    crosses, in front of a single space, behind a line. Places inside white space, a word of letters
    or a number are excluded.
    """
    crossed = tokenizer.pairs
    best: dict[int, int] = {}
    for place in range(min(high, len(text) - 1), low, -1):
        left, right = text[place - 1], text[place]
        is_free = left + right not in crossed
        if right == " " and not left.isspace() and not text[place + 1 : place + 2].isspace():
            if is_free:
                return place
            best.setdefault(2, place)
        elif left.isspace():
            if left == "\n" and not right.isspace():
                best.setdefault(1 if is_free else 3, place)
        elif is_free and not (left < FIRST_WIDE and left.isalnum() and right.isalnum()):
            best.setdefault(1, place)
    return best[min(best)] if best else None


def _joined(tokenizer: Tokenizer, text: str, spans: list[_Encoded]) -> list[_Encoded]:
    """Merge and encode again the spans whose cuts are rejected, until all cuts are kept."""
    while True:
        groups: list[list[_Encoded]] = []
        for each in spans:
            if groups and not _agree(groups[-1][-1], each):
                groups[-1].append(each)
            else:
                groups.append([each])
        if len(groups) == len(spans):
            return spans
        joint = [(group[0].span, group[-1].span) for group in groups if len(group) > 1]
        pairs = ((text, a._replace(stop=b.stop)) for a, b in joint)
        merged = _encoded(tokenizer, pairs)
        spans = [next(merged) if len(group) > 1 else group[0] for group in groups]


def _agree(left: _Encoded, right: _Encoded) -> bool:
    """Return if a cut is kept; see the module docstring."""
    if right.span.context == right.span.start:  # the tokenizer itself cuts here
        return True
    context = right.context
    return (
        len(context) >= AGREE
        and np.array_equal(left.ids[-AGREE:], context[-AGREE:])
        and np.array_equal(right.ids[: len(context)], context)
    )
