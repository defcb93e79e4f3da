"""A shuffled order that is computed, not stored."""

import hashlib

import numpy as np

ROUNDS = 8


class Permutation:
    """A pseudo-random bijection of 0..size-1, a pure function of (size, seed, purpose), with O(1) memory.

    A Feistel network over a grid of a x b >= size cells: the rounds add a keyed hash of one coordinate to the other, in
    turn, modulo its side. A value that lands past `size` is sent through again (cycle walking); the grid is so close
    to `size` that this is rare.

    Source: Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 4.
    """

    def __init__(self, size: int, seed: int, purpose: str):
        self.size = size
        self._rows = max(1, int(np.ceil(np.sqrt(size))))
        self._columns = max(1, -(-size // self._rows))
        digest = hashlib.shake_256(f"{seed}:{purpose}".encode()).digest(8 * ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, index: np.ndarray | range) -> np.ndarray:
        """Where each index goes, int64."""
        values = self._once(np.asarray(index, np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = values // columns, values % columns
        for number, key in enumerate(self._keys):
            if number % 2:
                column = (column + _mix(row ^ key) % columns) % columns
            else:
                row = (row + _mix(column ^ key) % rows) % rows
        return row * columns + column


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): each input bit moves half of the output's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
