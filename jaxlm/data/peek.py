"""What a batch looks like to a person: its text, with the tokens that are trained on marked."""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxlm.core.quoting import printable
from jaxlm.data.batch import Tokens
from jaxlm.data.tokenizer import Tokenizer

MARKS = "\u00ab", "\u00bb"  # around text that is trained on
BOTH_WAYS = "\u2039", "\u203a"  # around text of which every token sees every other

NONE = "", ""

Item = tuple[int, tuple[str, str]]  # an id, and what stands around it


def rendered(
    batch: Tokens, tokenizer: Tokenizer, row: int, marks: tuple[str, str] = MARKS
) -> list[str]:
    """The text of each segment of a row, trained tokens between `marks`, what is read both ways between others.

    Where each token is the target of the one before, a segment is shown as its first input, which nothing predicts, and
    then its targets, of which those with a weight above 0 are trained on. Elsewhere it is its inputs, each followed by its
    target if that is trained on. For an encoder and a decoder, it is what the one reads, and then what the other writes.
    """
    segments = batch.segments[row]
    found = []
    if batch.source is not None:
        return _pairs(batch, tokenizer, row, marks)
    for number in range(1, int(segments.max()) + 1):
        slots = np.flatnonzero(segments == number)
        tokens, targets, weights = (
            np.asarray(field[row, slots]) for field in (batch.tokens, batch.targets, batch.weights)
        )
        read = [BOTH_WAYS if both else NONE for both in _both_ways(batch, row, slots)]
        if np.array_equal(tokens[1:], targets[:-1]):
            ids = [int(tokens[0]), *targets.tolist()]
            kinds = [
                marks if weight > 0 else kind
                for weight, kind in zip(weights, [*read[1:], NONE], strict=True)
            ]
            items = list(zip(ids, [read[0], *kinds], strict=True))
        else:
            items = []
            for slot, kind in enumerate(read):
                items.append((int(tokens[slot]), kind))
                if weights[slot] > 0:
                    items.append((int(targets[slot]), marks))
        found.append("".join(_runs(items, tokenizer)))
    return found


def _pairs(batch: Tokens, tokenizer: Tokenizer, row: int, marks: tuple[str, str]) -> list[str]:
    assert batch.source is not None
    assert batch.source_segments is not None
    source = np.asarray(batch.source_segments[row])
    segments = np.asarray(batch.segments[row])
    found = []
    for number in range(1, int(source.max()) + 1):
        read = np.asarray(batch.source[row])[source == number].tolist()
        written = np.asarray(batch.targets[row])[segments == number].tolist()
        items = [(i, BOTH_WAYS) for i in read] + [(i, marks) for i in written]
        found.append("".join(_runs(items, tokenizer)))
    return found


def _both_ways(batch: Tokens, row: int, slots: np.ndarray) -> np.ndarray:
    """Which of these slots see, or are seen by, slots before them."""
    if batch.visible_until is None:
        return np.zeros(len(slots), bool)
    reach = np.asarray(batch.visible_until[row, slots])
    return slots <= max(reach[reach > slots], default=-1)


def _runs(items: list[Item], tokenizer: Tokenizer) -> Iterator[str]:
    """Neighbours of one kind together, so that a character of several tokens is whole."""
    for (opening, closing), run in itertools.groupby(items, key=lambda item: item[1]):
        yield f"{opening}{spelt([number for number, _ in run], tokenizer)}{closing}"


def spelt(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of `ids` with special tokens by name, and control characters escaped, so that data cannot drive a terminal."""
    names = {number: name.encode() for name, number in tokenizer.specials.items()}
    pieces = [names.get(i, tokenizer.table[i]) for i in ids]
    text = b"".join(pieces).decode("utf-8", "replace")
    return printable(text)
