"""Batches as text for people, with the trained tokens marked."""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxlm.core.quoting import printable
from jaxlm.data.batch import Tokens
from jaxlm.data.tokenizer import Tokenizer

MARKS = "\u00ab", "\u00bb"  # around text with a loss
BOTH_WAYS = "\u2039", "\u203a"  # around text with bidirectional attention

NONE = "", ""
EXAMPLE = 150  # characters of an example

Item = tuple[int, tuple[str, str]]  # an id and the marks around it


def example(text: str) -> str:
    """Return the start of a marked text in one line, and the place of its first marked tokens."""
    text = text.replace("\n", "\\n")
    part = EXAMPLE // 3
    if (begin := text.find(MARKS[0])) > 2 * part:
        text = f"{text[:part]} ... {text[begin - part :]}"
    return text[:EXAMPLE] + (" ..." if len(text) > EXAMPLE else "")


def render_segments(
    batch: Tokens, tokenizer: Tokenizer, row: int, marks: tuple[str, str] = MARKS
) -> list[str]:
    """Return the text of each segment of a row, with trained and bidirectional tokens marked.

    If each token is the target of the one before, a segment is its first input, which is not
    predicted, followed by its targets, marked if their weight is above 0. Otherwise it is its
    inputs, each followed by its target if trained on. For an encoder-decoder, it is the source
    followed by the target.
    """
    if batch.source is not None:
        return _pairs(batch, tokenizer, row, marks)
    segments, texts = batch.segments[row], []
    for number in range(1, int(segments.max()) + 1):
        slots = np.flatnonzero(segments == number)
        tokens, targets, weights = (
            np.asarray(field[row, slots]) for field in (batch.tokens, batch.targets, batch.weights)
        )
        read = [BOTH_WAYS if both else NONE for both in _both_ways(batch, row, slots)]
        if np.array_equal(tokens[1:], targets[:-1]):
            ids = [int(tokens[0]), *targets.tolist()]
            after = zip(weights, [*read[1:], NONE], strict=True)
            kinds = [marks if weight > 0 else kind for weight, kind in after]
            items = list(zip(ids, [read[0], *kinds], strict=True))
        else:
            items = []
            for slot, kind in enumerate(read):
                items.append((int(tokens[slot]), kind))
                if weights[slot] > 0:
                    items.append((int(targets[slot]), marks))
        texts.append("".join(_runs(items, tokenizer)))
    return texts


def _pairs(batch: Tokens, tokenizer: Tokenizer, row: int, marks: tuple[str, str]) -> list[str]:
    assert batch.source is not None
    assert batch.source_segments is not None
    source, segments = (np.asarray(x[row]) for x in (batch.source_segments, batch.segments))
    texts = []
    for number in range(1, int(source.max()) + 1):
        read = np.asarray(batch.source[row])[source == number].tolist()
        written = np.asarray(batch.targets[row])[segments == number].tolist()
        items = [(i, BOTH_WAYS) for i in read] + [(i, marks) for i in written]
        texts.append("".join(_runs(items, tokenizer)))
    return texts


def _both_ways(batch: Tokens, row: int, slots: np.ndarray) -> np.ndarray:
    """Return the slots that attend to, or are attended from, an earlier slot; bool [slots]."""
    if batch.visible_until is None:
        return np.zeros(len(slots), bool)
    reach = np.asarray(batch.visible_until[row, slots])
    return slots <= max(reach[reach > slots], default=-1)


def _runs(items: list[Item], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of adjacent items with equal marks, joined so that characters stay whole."""
    for (opening, closing), run in itertools.groupby(items, key=lambda item: item[1]):
        yield f"{opening}{token_text([number for number, _ in run], tokenizer)}{closing}"


def token_text(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of `ids` with special tokens by name.

    Control characters are escaped, so that data cannot drive a terminal.
    """
    names = {number: name.encode() for name, number in tokenizer.specials.items()}
    pieces = [names.get(i, tokenizer.table[i]) for i in ids]
    return printable(b"".join(pieces).decode("utf-8", "replace"))
