"""Rows of several documents, read by an objective; and the ids restored from its rows."""

from pathlib import Path

import numpy as np

from jaxlm.data import packing, writer
from jaxlm.data.loader import Loader
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.tokenizer import SPECIALS, Bytes, Tokenizer

MARKS = tuple(SPECIALS.index(f"<|fim_{name}|>") for name in ("prefix", "middle", "suffix"))
SENTINEL = SPECIALS.index("<|sentinel_0|>")
BLANK, START, END = SPECIALS.index("<|mask|>"), SENTINEL, SENTINEL + 1


class Pairs(Tokenizer):
    """One id for two adjacent small letters, and for each other byte: cuts may fall inside ids."""

    LETTERS = b"abcdefghijklmnopqrstuvwxyz "

    def __init__(self):
        pairs = [bytes([a, b]) for a in self.LETTERS for b in self.LETTERS]
        bytes_ = [bytes([value]) for value in range(256)]
        super().__init__([b""] * len(SPECIALS) + bytes_ + pairs)
        self._ids = {entry: number for number, entry in enumerate(self.table) if entry}

    def encode_many(self, texts):
        return [self._encoded(text.encode()) for text in texts]

    def _encoded(self, text):
        ids = []
        while text:
            size = 2 if text[:2] in self._ids else 1
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids

    def serialize(self):
        return b"pairs"


def shards_of(folder: Path, tokenizer: Tokenizer | None = None, count: int = 60):
    """Shards of documents of words, some long and some of a few letters."""
    draw = np.random.default_rng(1)
    words = "one two three four five six seven eight nine ten \u00e9l\u00e9ment".split()
    documents = [
        Document(" ".join(draw.choice(words, int(size))), "a.txt", number)
        for number, size in enumerate(draw.integers(1, 50, count))
    ]
    return writer.write(folder / "shards", documents, tokenizer or Bytes(), LeftOut())


def loader_of(shards, folder: Path, corruption, sequence: int = 96, kind="concat", seed: int = 5):
    """Rows of some shards; with a corruption, shorter ones that leave it room.

    Args:
      shards: the token shards.
      folder: folder of the plans.
      corruption: the change of rows, or None.
      sequence: slots of a row.
      kind: kind of packing.
      seed: seed of the draws.
    """
    length = sequence - (corruption.reserved_slots if corruption else 0)
    plan = packing.open_plan(shards, length, kind, seed, folder / f"plan-{kind}-{length}-{seed}")
    return Loader(shards, plan, sequence, seed, prefetch=2, corruption=corruption)


def documents(loader: Loader, row: int) -> list[list[int]]:
    """The ids of the pieces of a row of the plan."""
    return [
        loader.shards.read(document, start, start + length + 1).tolist()
        for document, start, length in loader.plan.pieces(row).tolist()
    ]


def segments(batch, row: int):
    """Slots of each segment of a row, with its tokens, targets, weights, and reach."""
    parts = []
    for number in range(1, int(batch.segments[row].max()) + 1):
        slots = np.flatnonzero(batch.segments[row] == number)
        reach = slots if batch.visible_until is None else batch.visible_until[row, slots]
        fields = (batch.tokens[row, slots], batch.targets[row, slots], batch.weights[row, slots])
        parts.append((slots, *fields, reach))
    return parts


def restored(tokens, targets, weights) -> list[int]:
    """The ids before the corruption of a segment, by its form; masked segments are excluded."""
    assert np.array_equal(tokens[1:], targets[:-1])
    ids = [*tokens.tolist(), int(targets[-1])]
    if any(mark in ids for mark in MARKS):
        return _in_order(ids)
    if any(number >= SENTINEL and number < len(SPECIALS) for number in ids):
        return _filled(ids, int(np.flatnonzero(weights)[0]) + 1)
    return ids


def filled(tokens, targets, weights, positions) -> list[int]:
    """The ids of a segment with blanks, each filled with the span that has its position."""
    is_text = weights == 0
    spans: dict[int, list[int]] = {}
    for place, number in zip(positions[~is_text].tolist(), targets[~is_text].tolist(), strict=True):
        spans.setdefault(place, []).append(number)
    assert all(span.pop() == END for span in spans.values())
    assert all(spans.values()), "no span is empty"
    return [
        i
        for place, number in enumerate(tokens[is_text].tolist())
        for i in (spans.pop(place) if number == BLANK else [number])
    ]


def _in_order(ids: list[int]) -> list[int]:
    prefix, middle, suffix = (ids.index(mark) for mark in MARKS)
    last = len(ids) - 1 if ids[-1] == Tokenizer.eos else len(ids)
    if suffix == prefix + 1:
        # The end of the prefix and the begin of the middle are unmarked, and need no mark.
        parts = ids[middle + 1 : last], ids[suffix + 1 : middle]
    else:
        parts = ids[prefix + 1 : suffix] + ids[middle + 1 : last], ids[suffix + 1 : middle]
    return [*ids[:prefix], *parts[0], *parts[1], *ids[last:]]


def _filled(ids: list[int], known: int) -> list[int]:
    def is_sentinel(number):
        return SENTINEL <= number < len(SPECIALS)

    read, written = ids[:known], ids[known:]
    assert written[-1] == Tokenizer.eos
    starts = [i for i, number in enumerate(written) if is_sentinel(number)]
    spans = [
        written[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(written) - 1], strict=True)
    ]
    assert [n for n in read if is_sentinel(n)] == [written[i] for i in starts]
    assert all(spans), "no span is empty"
    left = iter(spans)
    return [i for number in read for i in (next(left) if is_sentinel(number) else [number])]
