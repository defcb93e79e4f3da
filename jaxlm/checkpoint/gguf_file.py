"""Reader of GGUF, the file format of llama.cpp: its header, and rows of its tensors.

`gguf.GGUFReader` is not used: it is an optional package that plain files do not need, trusts counts
and offsets of the header, and makes several arrays for each string of a vocabulary. Here every
count is checked against the bytes left before anything is allocated. Free of JAX.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxlm.core.errors import DataError, InputMissing, not_installed

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 512 * 2**20  # bytes; the largest vocabularies take a fiftieth
MAX_DIMENSIONS = 4
CHUNK = 2**22  # numbers dequantized at a time
SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # struct format by type
STRING, ARRAY = 8, 9


class Storage(NamedTuple):
    """Storage format: `numbers` values in a block of `bytes` bytes."""

    name: str
    numbers: int
    bytes: int


PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
# fmt: off
STORAGES = {
    0: Storage("F32", 1, 4), 1: Storage("F16", 1, 2), 30: Storage("BF16", 1, 2),
    2: Storage("Q4_0", 32, 18), 3: Storage("Q4_1", 32, 20), 6: Storage("Q5_0", 32, 22),
    7: Storage("Q5_1", 32, 24), 8: Storage("Q8_0", 32, 34), 10: Storage("Q2_K", 256, 84),
    11: Storage("Q3_K", 256, 110), 12: Storage("Q4_K", 256, 144), 13: Storage("Q5_K", 256, 176),
    14: Storage("Q6_K", 256, 210),
}
# fmt: on


class TensorEntry(NamedTuple):
    """One tensor of the file."""

    shape: tuple[int, ...]  # the last dimension is contiguous
    storage: Storage
    start: int  # byte offset in the file

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, the last dimension."""
        return self.shape[-1] // self.storage.numbers * self.storage.bytes


class GGUFFile:
    """Metadata and tensor locations of a file; tensor data is read only on request.

    `unread` maps tensors in an unknown storage format to the format's number and the shape. Raises
    InputMissing if there is no such file; DataError if the header is damaged or impossible, or
    tensors overlap or exceed the file.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            what, why = f"there is no file {path}", "a name that ends in .gguf is a file"
            raise InputMissing(what, where="--from", why=why, fix="find . -name '*.gguf'")
        self._size = path.stat().st_size
        if not self._size:
            raise self._damaged("it is empty")
        with path.open("rb") as file:
            most = min(self._size, MAX_HEADER_BYTES)
            self._header = mmap.mmap(file.fileno(), most, access=mmap.ACCESS_READ)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.unread: dict[str, tuple[int, tuple[int, ...]]] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            why = f"it ends early or holds invalid text at byte {self._at:,}: {error}"
            raise self._damaged(why) from error
        del self._header

    def rows(
        self, entry: TensorEntry, rows: np.ndarray | slice, columns: slice = slice(None)
    ) -> np.ndarray:
        """Return rows of a tensor (all first dimensions as one), and adjacent columns of them.

        Quantized tensors become float32; only the blocks that overlap the columns are read.

        Raises DataError if numbers of them are not finite, as the scale of their block is damaged.
        """
        count = math.prod(entry.shape[:-1])
        whole = np.memmap(
            self.path, np.uint8, "r", offset=entry.start, shape=(count, entry.row_bytes)
        )
        name, numbers, size = entry.storage
        start, stop, _ = columns.indices(entry.shape[-1])
        begin, end = start // numbers, -(-stop // numbers)  # blocks
        inside = slice(begin * size, end * size)
        if name in PLAIN:
            return np.ascontiguousarray(whole[rows, inside]).view(PLAIN[name])
        part = np.arange(count)[rows]
        out = np.empty((len(part), stop - start), np.float32)
        within = slice(start - begin * numbers, stop - begin * numbers)
        step = max(1, CHUNK // max(1, (end - begin) * numbers))
        for first in range(0, len(part), step):
            chunk = slice(first, first + step)
            blocks = np.ascontiguousarray(whole[part[chunk], inside])
            out[chunk] = _dequantize(blocks, name, self.path)[:, within]
            if wrong := int((~np.isfinite(out[chunk])).sum()):
                tensor = next(key for key, each in self.tensors.items() if each == entry)
                why = f"{wrong} numbers of its blocks of {name} are not finite"
                raise self._damaged(why, tensor)
        return out

    def _read(self) -> None:
        if self._header[:4] != MAGIC:
            raise self._damaged("it does not begin with GGUF")
        self._at = 4
        version, tensors, pairs = self._take("IQQ")
        if version not in VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0]
            versions = " and ".join(map(str, VERSIONS))
            why = f"its version is {version}, and {versions} are read"
            raise self._damaged("its numbers are big-endian" if swapped in VERSIONS else why)
        self._room(tensors, 24, "tensors")
        self._room(pairs, 13, "settings")
        for _ in range(pairs):
            name, (kind,) = self._string(), self._take("I")
            if name in self.metadata:
                raise self._damaged(f"{name!r:.80} is set twice")
            self.metadata[name] = self._value(kind, name)
        self._locate(list(self._infos(tensors)))

    def _infos(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        for _ in range(count):
            name, (dimensions,) = self._string(), self._take("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._damaged(f"{name!r:.80} has {dimensions:,} dimensions")
            shape = self._take("Q" * dimensions)[::-1]
            kind, offset = self._take("IQ")
            yield name, shape, kind, offset

    def _locate(self, infos: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        step = self.metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise self._damaged(f"general.alignment is {step!r:.40}, not a power of two")
        data = -(-self._at // step) * step
        taken: list[tuple[int, int, str]] = []
        for name, shape, kind, offset in infos:
            if name in self.tensors or name in self.unread:
                raise self._damaged(f"{name!r:.80} occurs twice")
            if kind not in STORAGES:
                self.unread[name] = kind, shape
                continue
            storage = STORAGES[kind]
            if 0 in shape or shape[-1] % storage.numbers:
                raise self._damaged(f"{name!r:.80} has the shape {list(shape)} in {storage.name}")
            entry = TensorEntry(shape, storage, data + offset)
            end = entry.start + math.prod(shape[:-1]) * entry.row_bytes
            if offset % step or end > self._size:
                span = f"{entry.start:,} to {end:,} of {self._size:,}"
                raise self._damaged(f"{name!r:.80} would span bytes {span}")
            taken.append((entry.start, end, name))
            self.tensors[name] = entry
        taken.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(taken):
            if start < end:
                raise self._damaged(f"{one!r:.80} and {other!r:.80} overlap")

    def _value(self, kind: int, name: str) -> Any:
        if kind in SCALARS:
            (value,) = self._take(SCALARS[kind])
            # A float32 is read by its shortest decimal, so that 1e-5 is 1e-5 again.
            return float(str(np.float32(value))) if SCALARS[kind] == "f" else value
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._damaged(f"{name!r:.80} has the unknown type {kind}")
        inner, count = self._take("IQ")
        if inner == STRING:
            self._room(count, 8, name)
            return [self._string() for _ in range(count)]
        if inner not in SCALARS:
            raise self._damaged(f"{name!r:.80} is a list of type {inner}, which is not supported")
        size = struct.calcsize(f"<{SCALARS[inner]}")
        self._room(count, size, name)
        value = np.frombuffer(self._header, np.dtype(f"<{SCALARS[inner]}"), count, self._at)
        self._at += count * size
        return value.tolist()

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._header, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (size,) = self._take("Q")
        self._room(size, 1, "bytes of a text")
        text = self._header[self._at : self._at + size].decode()
        self._at += size
        return text

    def _room(self, count: int, size: int, what: str) -> None:
        """Raise DataError if `count` items of `size` bytes or more exceed the header."""
        left = len(self._header) - self._at
        if count * size > left:
            raise self._damaged(f"it claims {count:,} {what!s:.80}, but {left:,} bytes are left")

    def _damaged(self, why: str, tensor: str = "") -> DataError:
        what = f"the tensor {tensor} is damaged" if tensor else "a file is not a complete GGUF"
        return DataError(what, where=str(self.path), why=why, fix="download the file again")


def _dequantize(rows: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Return float32 [rows, numbers] of uint8 [rows, bytes]; damaged scales overflow in silence."""
    gguf = library(f"reading {name}", path)
    with np.errstate(over="ignore", invalid="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])


def library(purpose: str, path: Path) -> Any:
    """Return the package `gguf`. Raises InputMissing if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise not_installed(purpose, "gguf", "gguf", where=str(path)) from error
    return gguf
