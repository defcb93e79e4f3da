"""Incremental text of a row, in whole characters, and stop strings. Free of JAX.

Stop strings are matched across the borders of tokens.

Example:
  >>> stream = TextStream([b"\\n\\n"])
  >>> stream.push(b"one\\n", is_ended=False), stream.push(b"\\ntwo", is_ended=True)
  ('one', '')
"""

import codecs
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def stop_automaton(stops: Sequence[bytes], table: Sequence[bytes]) -> Int[np.ndarray, "S V"]:
    """Return next[state, id], the state of stop matching after the bytes table[id].

    A text begins in state 0; the last state, a completed stop, is never left. There is one state
    for each proper prefix of a stop, so a step costs one lookup for any stops. The table takes
    2 S V bytes, and S operations for each byte of `table`.

    Source: Aho & Corasick 1975, doi:10.1145/360825.360855, sections 2 to 4.
    """
    prefixes = {stop[:size] for stop in stops for size in range(len(stop))} | {b""}
    ordered = sorted(prefixes, key=lambda text: (len(text), text))
    states = {text: number for number, text in enumerate(ordered)}
    accepting = len(states)
    by_byte = np.full((accepting + 1, 256), accepting, np.int16)
    for text, number in states.items():
        for value in range(256):
            seen = text + bytes([value])
            if not seen.endswith(tuple(stops)):
                tails = (seen[cut_at_stop:] for cut_at_stop in range(len(seen) + 1))
                by_byte[number, value] = next(states[tail] for tail in tails if tail in states)
    sizes = np.array([len(entry) for entry in table])
    out = np.repeat(np.arange(accepting + 1, dtype=np.int16)[:, None], len(table), axis=1)
    for place in range(int(sizes.max(initial=0))):
        ids = np.flatnonzero(sizes > place)
        byte = np.array([table[int(i)][place] for i in ids])
        out[:, ids] = by_byte[out[:, ids], byte]
    return out


def cut_at_stop(text: bytes, stops: Sequence[bytes]) -> bytes:
    """Return the text before the stop that completes first (the longest of ties), or all of it."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, size = min(ends)
    return text[: end + size]


def partial_stop(text: bytes, stops: Sequence[bytes]) -> int:
    """Return the number of bytes at the end of a text without a stop that may begin a stop."""
    sizes = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(sizes, default=0)


class TextStream:
    """Splits the text of a row into pieces to show; joined, they are the text before its stop.

    Bytes that may begin a stop are held back, and bytes of an incomplete character.
    """

    def __init__(self, stops: Sequence[bytes]):
        self._stops = tuple(stops)
        self._seen, self._given = b"", 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, more: bytes, *, is_ended: bool) -> str:
        """Return the text that can be shown after `more`; all the rest if the row has ended."""
        self._seen += more
        if is_ended:
            until = len(cut_at_stop(self._seen, self._stops))
        else:
            until = len(self._seen) - partial_stop(self._seen, self._stops)
        piece = self._seen[self._given : until]
        self._given += len(piece)
        return self._characters.decode(piece, final=is_ended)
