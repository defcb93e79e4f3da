"""Text of a row that is being made: whole characters only, and nothing that a stop may yet cut off. Free of JAX."""

import codecs
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

# Strings that end a text, found across the borders of tokens. Free of JAX.


def automaton(stops: Sequence[bytes], table: Sequence[bytes]) -> Int[np.ndarray, "S V"]:
    """next[state, id]: how far a text is on the way to a stop, once the bytes table[id] follow; the last state is at one.

    A text begins in state 0, and never leaves the last. One state for each beginning of a stop, so that a step costs one
    look-up whatever the stops; 2 S V bytes, and as many operations as the table has bytes, times S.

    Source: Aho & Corasick 1975, doi:10.1145/360825.360855, sections 2 to 4.
    """
    begun = {stop[:size] for stop in stops for size in range(len(stop))} | {b""}
    states = {text: number for number, text in enumerate(sorted(begun, key=lambda x: (len(x), x)))}
    found = len(states)
    by_byte = np.full((found + 1, 256), found, np.int16)
    for text, number in states.items():
        for value in range(256):
            seen = text + bytes([value])
            if not seen.endswith(tuple(stops)):
                tails = (seen[cut:] for cut in range(len(seen) + 1))
                by_byte[number, value] = next(states[tail] for tail in tails if tail in states)
    sizes = np.array([len(entry) for entry in table])
    out = np.repeat(np.arange(found + 1, dtype=np.int16)[:, None], len(table), axis=1)
    for place in range(int(sizes.max(initial=0))):
        ids = np.flatnonzero(sizes > place)
        byte = np.array([table[int(i)][place] for i in ids])
        out[:, ids] = by_byte[out[:, ids], byte]
    return out


def cut(text: bytes, stops: Sequence[bytes]) -> bytes:
    """The text before the stop that is complete first, of several the longest; all of it where there is none."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, size = min(ends)
    return text[: end + size]


def begun(text: bytes, stops: Sequence[bytes]) -> int:
    """How many bytes at the end of a text, in which no stop is whole, are the beginning of one."""
    sizes = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(sizes, default=0)


class Stream:
    """Pieces that, joined, are the text of the row once it has ended: before its stop, where one came.

    What may be the beginning of a stop waits until it is none, and the bytes of a character until all of them are there.
    """

    def __init__(self, wanted: Sequence[bytes]):
        self._stops = tuple(wanted)
        self._seen, self._given = b"", 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, more: bytes, *, is_ended: bool) -> str:
        """What can be shown once these bytes follow; it may be nothing. Of a row that has ended it is all that is left."""
        self._seen += more
        if is_ended:
            until = len(cut(self._seen, self._stops))
        else:
            until = len(self._seen) - begun(self._seen, self._stops)
        piece = self._seen[self._given : until]
        self._given += len(piece)
        return self._characters.decode(piece, final=is_ended)
