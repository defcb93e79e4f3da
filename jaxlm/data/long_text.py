"""Encode texts of any length in bounded memory, to the ids that encoding each text at once gives.

A long text is encoded in spans, each together with the `CONTEXT` characters in front of it. A cut
between two spans is kept only if three encodings agree:

    left     the span that ends at the cut
    context  the last characters of that span, alone
    right    the same characters followed by the next span

`right` must begin with the ids of `context`, and `left` must end with the last `AGREE` of them.
Spans whose cut is not kept are encoded again as one span. A prefix that the tokenizer puts in front
of every text is in `context` and in `right`, and is dropped with them.

Why this is exact for byte pair encoding: ids are the encoding of a text if and only if every two
neighbours are the encoding of their own text, because merges inside two tokens happen in the same
order whatever surrounds them. Every two neighbours of the joined ids are neighbours in `left` or
in `right`. Words that are split off first (regular expressions, white space, punctuation) and
normalisation are local, so that they agree as well; cuts between two words are tried first, and
within a run of one kind of characters only if `FAR` characters have no other place. Tokenizers to
which this does not apply say so in `Tokenizer.span`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from jaxlm.data.tokenizer import Tokenizer

BATCH = 2**20  # characters that the tokenizer gets at a time
CONTEXT = 256  # characters of the previous span that are encoded with the next one
AGREE = 4  # ids of the context that both spans must have
SEARCH = 2**11  # characters in front of the longest span in which a cut is looked for
FAR = 2**20  # characters of a span without a place between words
FIRST_WIDE = "\u2e80"  # from here on are scripts without spaces between words

Item = TypeVar("Item")


class _Span(NamedTuple):
    """A part of a text, text[start:stop]; `ids` begin with those of the context, text[context:start]."""

    context: int
    start: int
    stop: int


class _Encoded(NamedTuple):
    span: _Span
    context: np.ndarray  # its ids alone
    ids: np.ndarray  # of context and span together


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[np.ndarray]]:
    """Yield the ids of each text as arrays to be joined: those of `tokenizer.encode(text)`.

    They have the narrowest unsigned dtype of the vocabulary; int64 if one is outside of it.
    """
    for group in _groups(texts, len):
        spans = [_spans(tokenizer, text) for text in group]
        pairs = ((text, span) for text, each in zip(group, spans, strict=True) for span in each)
        encoded = _encoded(tokenizer, pairs)
        for text, each in zip(group, spans, strict=True):
            joined = _joined(tokenizer, text, list(itertools.islice(encoded, len(each))))
            yield [part.ids[len(part.context) :] for part in joined]


def _groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield items that have `BATCH` characters together; a last one may have more by itself."""
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
    """Yield the ids of each span. As Python's integers ids take twenty times as much as their text."""
    dtype = np.min_scalar_type(tokenizer.size - 1)

    def array(ids: list[int]) -> np.ndarray:
        found = np.array(ids, np.int64)
        is_inside = not len(found) or (found.min() >= 0 and found.max() < tokenizer.size)
        return found.astype(dtype) if is_inside else found

    for batch in _groups(spans, lambda item: item[1].stop - item[1].context):
        texts: list[str] = []
        for text, span in batch:
            texts.append(text[span.context : span.stop])
            if span.context < span.start:
                texts.append(text[span.context : span.start])
        found = iter(tokenizer.encode_many(texts))
        for _, span in batch:
            ids = array(next(found))
            context = array(next(found) if span.context < span.start else [])
            yield _Encoded(span, context, ids)


def _spans(tokenizer: Tokenizer, text: str) -> list[_Span]:
    """Return the spans of a text that are encoded first."""
    longest = tokenizer.span
    if longest is None or len(text) <= longest:
        return [_Span(0, 0, len(text))]
    own = tokenizer.cuts(text)
    if own is not None:
        cuts = [0]
        for place in own:
            if place - cuts[-1] >= longest:
                cuts.append(place)
        return [_Span(a, a, b) for a, b in itertools.pairwise([*cuts, len(text)])]
    cuts = [0]
    while len(text) - cuts[-1] > longest:
        if (place := _place(tokenizer, text, cuts[-1] + longest, cuts[-1])) == len(text):
            break
        cuts.append(place)
    return [_Span(max(0, a - CONTEXT), a, b) for a, b in itertools.pairwise([*cuts, len(text)])]


def _place(tokenizer: Tokenizer, text: str, stop: int, start: int) -> int:
    """Return where the span from `start` is cut: up to `stop` if there is a place, else behind it."""
    found = _between_words(tokenizer, text, max(start + 1, stop - SEARCH), stop)
    while found is None and stop < len(text):
        if stop - start >= FAR:
            return stop
        low, stop = stop, min(len(text), stop + SEARCH)
        found = _between_words(tokenizer, text, low, stop)
    return len(text) if found is None else found


def _between_words(tokenizer: Tokenizer, text: str, low: int, high: int) -> int | None:
    """Return the best place in low < place <= high at which a text may be cut, the last of equal ones.

    The best is in front of a single space that no token crosses, then another place that no token
    crosses, then in front of a single space, then behind a line. A place inside white space, or
    inside a word of letters or a number, is none.
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
    """Return spans whose cuts are kept, with those between which they are not encoded as one."""
    while True:
        groups: list[list[_Encoded]] = []
        for each in spans:
            if groups and not _agree(groups[-1][-1], each):
                groups[-1].append(each)
            else:
                groups.append([each])
        if len(groups) == len(spans):
            return spans
        again = _encoded(
            tokenizer,
            (
                (text, _Span(group[0].span.context, group[0].span.start, group[-1].span.stop))
                for group in groups
                if len(group) > 1
            ),
        )
        spans = [next(again) if len(group) > 1 else group[0] for group in groups]


def _agree(left: _Encoded, right: _Encoded) -> bool:
    """Return whether a cut is kept; see the head of this file."""
    if right.span.context == right.span.start:  # a place where the tokenizer itself cuts
        return True
    context = right.context
    return (
        len(context) >= AGREE
        and np.array_equal(left.ids[-AGREE:], context[-AGREE:])
        and np.array_equal(right.ids[: len(context)], context)
    )
