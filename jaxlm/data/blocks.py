"""Files with a CRC-32 for each block, checked at every read.

Hashing a whole set at opening would take a minute per 100 GB and would miss later changes. A block
check costs about 5 microseconds a read (one core, 2026), detects a change before training on it,
and locates it. Files are read, not mapped: truncating a mapped file kills the process with SIGBUS.
"""

import hashlib
import os
import zlib
from array import array
from pathlib import Path

import numpy as np

BLOCK = 2**12  # bytes; with 4 bytes each, the table of checks is 0.1% of the file
WAITING = 2**17  # bytes that are buffered before a write


class Damage(Exception):
    """Content of a file that differs from what was written; `why` describes the difference."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class BlockWriter:
    """Write a file from start to end; compute its sha256 and the CRC-32 of its blocks."""

    def __init__(self, path: Path):
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._digest = hashlib.sha256()
        self._checks = array("I")
        self._waiting = bytearray()  # starts at a block boundary

    def write(self, values: np.ndarray) -> None:
        """Append the bytes of an array."""
        self._waiting += values.tobytes()
        if len(self._waiting) >= WAITING:
            self._flush(len(self._waiting) // BLOCK * BLOCK)

    def close(self) -> None:
        """Flush and close the file."""
        self._flush(len(self._waiting))
        self._file.close()

    @property
    def sha256(self) -> str:
        """Hex digest of the whole file, after `close`."""
        return self._digest.hexdigest()

    @property
    def checks(self) -> np.ndarray:
        """CRC-32 of each block, after `close`."""
        return np.array(self._checks, "<u4")

    def _flush(self, size: int) -> None:
        data = bytes(self._waiting[:size])
        del self._waiting[:size]
        self._file.write(data)
        self._digest.update(data)
        view = memoryview(data)
        self._checks.extend(zlib.crc32(view[i : i + BLOCK]) for i in range(0, size, BLOCK))


class BlockReader:
    """Read any part of a file and check every block that overlaps it; safe for threads."""

    def __init__(self, path: Path, size: int, checks: np.ndarray):
        self._path, self._size, self._checks = path, size, checks
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise Damage(path, f"it cannot be opened: {error.strerror}") from error
        self._has_name = os.fstat(self._handle).st_nlink > 0  # some network file systems report 0

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`.

        Raise Damage if a block differs from what was written, or the file was removed or replaced.
        """
        if not 0 <= start <= stop <= self._size:
            raise Damage(self._path, f"bytes {start} to {stop} of {self._size} were requested")
        first, end = start // BLOCK, -(-stop // BLOCK)
        begin = first * BLOCK
        size = min(end * BLOCK, self._size) - begin
        try:
            data = memoryview(os.pread(self._handle, size, begin))
            is_gone = self._has_name and os.fstat(self._handle).st_nlink == 0
        except OSError as error:
            raise Damage(self._path, f"it cannot be read: {error.strerror}") from error
        if is_gone:
            raise Damage(self._path, "it was removed or replaced during reading")
        if len(data) != size:
            raise Damage(self._path, f"it was truncated after byte {begin + len(data)}")
        for number, check in enumerate(self._checks[first:end].tolist(), first):
            offset = number * BLOCK - begin
            if zlib.crc32(data[offset : offset + BLOCK]) != check:
                low, high = number * BLOCK, min((number + 1) * BLOCK, self._size) - 1
                why = f"the CRC-32 of bytes {low} to {high} differs from the one written"
                raise Damage(self._path, why)
        return data[start - begin : stop - begin]

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            os.close(handle)
