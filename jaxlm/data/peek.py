"""What a batch looks like to a person: its text, with the tokens that are trained on marked."""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxlm.core.quoting import printable
from jaxlm.data.batch import Tokens
from jaxlm.data.tokenizer import Tokenizer

MARKS = "\u00ab", "\u00bb"  # around text that is trained on


def rendered(
    batch: Tokens, tokenizer: Tokenizer, row: int, marks: tuple[str, str] = MARKS
) -> list[str]:
    """The text of each segment of a row, trained tokens between `marks`.

    A segment is shown as its first input, which nothing predicts, and then its targets, of which those with a weight
    above 0 are trained on.
    """
    segments = batch.segments[row]
    return [
        _segment(batch, tokenizer, row, np.flatnonzero(segments == n), marks)
        for n in range(1, int(segments.max()) + 1)
    ]


def _segment(
    batch: Tokens, tokenizer: Tokenizer, row: int, slots: np.ndarray, marks: tuple[str, str]
) -> str:
    ids = [int(batch.tokens[row, slots[0]]), *batch.targets[row, slots].tolist()]
    trained = [False, *(batch.weights[row, slots] > 0).tolist()]
    opening, closing = marks
    return "".join(
        f"{opening}{text}{closing}" if marked else text
        for marked, text in _runs(ids, trained, tokenizer)
    )


def _runs(ids: list[int], trained: list[bool], tokenizer: Tokenizer) -> Iterator[tuple[bool, str]]:
    """Neighbouring tokens of the same kind together, so that a character of several tokens is whole."""
    edges = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
    for start, stop in itertools.pairwise(edges):
        yield trained[start], spelt(ids[start:stop], tokenizer)


def spelt(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of `ids` with special tokens by name, and control characters escaped, so that data cannot drive a terminal."""
    names = {number: name.encode() for name, number in tokenizer.specials.items()}
    pieces = [names.get(i, tokenizer.table[i]) for i in ids]
    text = b"".join(pieces).decode("utf-8", "replace")
    return printable(text)
