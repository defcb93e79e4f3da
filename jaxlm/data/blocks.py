"""Files whose every read is checked: a CRC-32 for each block, compared whenever the block is read.

Hashing a whole set when it is opened would take a minute for each 100 GB and see nothing of what happens later. Blocks
cost about 5 microseconds a read (measured on one core, 2026), find a change at the moment it would be trained on, and say
where it is. Files are read, not mapped: a mapped file that is cut kills the process with SIGBUS.
"""

import hashlib
import os
import zlib
from array import array
from pathlib import Path

import numpy as np

BLOCK = 2**12  # bytes; its check is 4, so a table of checks is 0.1% of its file
WAITING = 2**17  # bytes that are written together


class Damage(Exception):
    """A file is not what was written. `why` says what differs."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class BlockWriter:
    """A file that is written from start to end, with its sha256 and the checks of its blocks."""

    def __init__(self, path: Path):
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._digest = hashlib.sha256()
        self._checks = array("I")
        self._waiting = bytearray()  # begins where a block does

    def write(self, values: np.ndarray) -> None:
        """Appends the bytes of an array."""
        self._waiting += values.tobytes()
        if len(self._waiting) >= WAITING:
            self._flush(len(self._waiting) // BLOCK * BLOCK)

    def close(self) -> None:
        """Ends the file."""
        self._flush(len(self._waiting))
        self._file.close()

    @property
    def sha256(self) -> str:
        """Of the whole, once the file is closed."""
        return self._digest.hexdigest()

    @property
    def checks(self) -> np.ndarray:
        """The CRC-32 of each block, once the file is closed."""
        return np.array(self._checks, "<u4")

    def _flush(self, size: int) -> None:
        data = bytes(self._waiting[:size])
        del self._waiting[:size]
        self._file.write(data)
        self._digest.update(data)
        view = memoryview(data)
        self._checks.extend(zlib.crc32(view[i : i + BLOCK]) for i in range(0, size, BLOCK))


class BlockReader:
    """Reads any part of a file, and checks every block that the part lies in. Threads may share it."""

    def __init__(self, path: Path, size: int, checks: np.ndarray):
        self._path, self._size = path, size
        self._checks = checks
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise Damage(path, f"it cannot be opened: {error.strerror}") from error
        self._has_name = os.fstat(self._handle).st_nlink > 0  # some network file systems say 0

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop`.

        Raises:
          Damage: where they are not those that were written, or the file was removed or replaced.
        """
        if not 0 <= start <= stop <= self._size:
            raise Damage(self._path, f"bytes {start} to {stop} of {self._size} are asked for")
        first, end = start // BLOCK, -(-stop // BLOCK)
        begin = first * BLOCK
        wanted = min(end * BLOCK, self._size) - begin
        try:
            data = memoryview(os.pread(self._handle, wanted, begin))
            is_gone = self._has_name and os.fstat(self._handle).st_nlink == 0
        except OSError as error:
            raise Damage(self._path, f"it cannot be read: {error.strerror}") from error
        if is_gone:
            raise Damage(self._path, "it was removed or replaced while it was read")
        if len(data) != wanted:
            raise Damage(self._path, f"it was cut: it ends after byte {begin + len(data)}")
        for number, check in enumerate(self._checks[first:end].tolist(), first):
            offset = number * BLOCK - begin
            if zlib.crc32(data[offset : offset + BLOCK]) != check:
                raise Damage(
                    self._path,
                    f"bytes {number * BLOCK} to {min((number + 1) * BLOCK, self._size) - 1} are not "
                    "those that were written: their CRC-32 differs",
                )
        return data[start - begin : stop - begin]

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            os.close(handle)
