"""Keys and values of the beginnings of prompts, kept for later requests. Free of JAX.

A block has one chunk of a prompt. Its name is a hash of its ids and of the name of the block before
it, so a block stands for all ids up to its end. Chunks of all prompts begin at the same places and
are read by one program: a block has the bits that reading the chunk again would compute.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def names(ids: Sequence[int], chunk: int, salt: str) -> Iterator[bytes]:
    """Yield the name of each whole chunk of a prompt; other salts share no names."""
    name = hashlib.sha256(salt.encode()).digest()
    whole = np.asarray(ids, np.int32)
    for start in range(0, len(ids) - chunk + 1, chunk):
        name = hashlib.sha256(name + whole[start : start + chunk].tobytes()).digest()
        yield name


class PrefixCache:
    """Blocks by name; the blocks that were used least recently make room for new ones."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._block_bytes = max_bytes, 0
        self._blocks: OrderedDict[bytes, Any] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return self._block_bytes * len(self._blocks)

    def get(self, name: bytes) -> Any | None:
        """Return a block, which becomes the one that was used last; None without it."""
        if name in self._blocks:
            self._blocks.move_to_end(name)
        return self._blocks.get(name)

    def add(self, name: bytes, block: Any, size: int) -> None:
        """Keep a block of `size` bytes; all blocks have one size."""
        self._block_bytes = size
        if size > self._max_bytes:
            return
        self._blocks[name] = block
        while self.size > self._max_bytes:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
