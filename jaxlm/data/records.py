"""Records for training: text, JSON lines and Parquet, possibly compressed, and their damage."""

import codecs
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import parquet

# Kinds of broken records; only a small share of them is tolerated.
NOT_UTF8, NOT_JSON = "not UTF-8", "not JSON"
NO_TEXT, OTHER_TYPE = "without the text key", "with a text of another type"
# Kinds of records without content; any number of them may be dropped.
EMPTY, BLANK = "empty", "only white space"
# Changes to a document, or oddities of one that is kept unchanged.
SURROGATE = "with a lone surrogate, replaced"
MARK = "with a byte order mark, removed"
NUL = "with NUL, kept"
MENDED = (SURROGATE, MARK, NUL)

# Limit of a compressed file without a document's end in between. A megabyte can unpack to a
# gigabyte; a file that is not compressed shows its size.
MOST_UNPACKED = 2**28

PROBED_START = 2**12  # bytes of a file that distinguish text from other files
PACKERS = {".gz": "gzip", ".zst": "zstd"}  # command-line programs

BYTE_ORDER_MARK = "\ufeff".encode()
_SURROGATES = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """A text and its origin."""

    text: str
    file: str
    record: int
    place: int = 0  # bytes of the file on disk that were read up to here


class Broken(NamedTuple):
    """A record that cannot be used: why, and the error to raise if there are too many."""

    reason: str
    error: DataError


@dataclasses.dataclass
class Start:
    """Budget for reading the start of some files: remaining records and unpacked bytes."""

    records: int
    bytes: int

    @property
    def is_read(self) -> bool:
        """Return whether nothing remains."""
        return not (self.records and self.bytes)


def read(
    path: Path, name: str, text_key: str, counts: Counter[str], start: Start | None = None
) -> Iterator[Document | Broken]:
    """Yield every record of a file, as a text or as what is wrong with it.

    Args:
      path: the file.
      name: its name in errors.
      text_key: the field of a record that contains its text.
      counts: counts of oddities of the file.
      start: the budget, reduced by the bytes read. Where it ends, a text ends and a record that it
        cuts is dropped.

    Raises:
      DataError: the rest of the file cannot be read.
    """
    if is_text(path):
        yield _text(path, name, counts, start)
        return
    kind = _kind(path)
    if kind != ".parquet":
        records = _json_lines(path, name, counts, start)
    else:
        records = _parquet(path, name, text_key)
    for number, (record, place) in enumerate(records):
        if isinstance(record, Broken):
            yield record
            continue
        text = record.get(text_key) if isinstance(record, dict) else None
        if isinstance(text, str):
            if start is not None and kind == ".parquet":
                start.bytes = max(start.bytes - len(text), 0)
            yield Document(text, name, number, place)
        else:
            is_there = isinstance(record, dict) and text_key in record
            yield Broken(
                OTHER_TYPE if is_there else NO_TEXT, _no_text(record, name, number, text_key)
            )


def is_text(path: Path) -> bool:
    """Return whether a file is one text; otherwise it contains records."""
    return _kind(path) not in (".jsonl", ".json", ".parquet")


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if _is_packed(path) else path.suffix


def ending(path: Path) -> str:
    """Return the suffix of the format with its compression: `.jsonl.gz`."""
    return f"{_kind(path)}{path.suffix}" if _is_packed(path) else path.suffix


def looks_like_text(path: Path) -> bool:
    """Return whether the first bytes of a file look like something that `read` accepts."""
    if not is_text(path) or _is_packed(path):
        return True
    with open(path, "rb") as file:
        start = file.read(PROBED_START)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def mended(text: str, counts: Counter[str]) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot, by U+FFFD; keep NUL."""
    if "\0" in text:
        counts[NUL] += 1
    if text.isascii() or not _SURROGATES.search(text):
        return text
    counts[SURROGATE] += 1
    return _SURROGATES.sub("\ufffd", text)


def _text(path: Path, name: str, counts: Counter[str], start: Start | None) -> Document | Broken:
    with _whole(name), opened(path) as file:
        data = file.read(_limit(path) if start is None else start.bytes)
        if len(data) > MOST_UNPACKED and _is_packed(path):
            raise _unpacks_too_far(path, name)
    if data.startswith(BYTE_ORDER_MARK):
        counts[MARK] += 1
    is_whole = start is None or len(data) < start.bytes
    if start is not None:
        start.bytes -= len(data)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data.removeprefix(BYTE_ORDER_MARK), final=is_whole)
        return Document(text, name, 0, path.stat().st_size)
    except UnicodeDecodeError as error:
        return Broken(NOT_UTF8, _not_utf8(name, error, "byte"))


def _not_utf8(name: str, error: UnicodeDecodeError, unit: str) -> DataError:
    return DataError(
        "a file is not UTF-8",
        where=f"{name}, {unit} {error.start}",
        why=f"0x{error.object[error.start]:02x}: {error.reason}",
        fix=_from_latin1(Path(name)),
    )


def _from_latin1(path: Path) -> str:
    """Return the command that converts a file to UTF-8; the old one gets a hidden name."""
    hidden = (path.with_name(f".{path.name}.{kind}") for kind in ("utf8", "latin1"))
    file, new, old = (shlex.quote(str(each)) for each in (path, *hidden))
    command = "iconv -f latin1 -t utf-8"
    if path.suffix in PACKERS:
        packer = PACKERS[path.suffix]
        command = f"{packer} -dc {file} | {command} | {packer} > {new}"
    else:
        command = f"{command} {file} > {new}"
    return f"{command} && mv {file} {old} && mv {new} {file}    # if it is Latin-1"


def _json_lines(
    path: Path, name: str, counts: Counter[str], start: Start | None
) -> Iterator[tuple[Any, int]]:
    """Yield each record, and the bytes of the file read up to its end."""
    with _whole(name), opened(path) as file:
        unpacked = 0
        for number in itertools.count(1):
            line = file.readline(_limit(path, unpacked) if start is None else start.bytes)
            if not line:
                break
            if start is not None:
                start.bytes -= len(line)
                if not start.bytes:
                    break  # it may be cut
            unpacked += len(line)
            if unpacked > MOST_UNPACKED and _is_packed(path):
                raise _unpacks_too_far(path, f"{name}:{number}")
            if number == 1 and line.startswith(BYTE_ORDER_MARK):
                counts[MARK] += 1
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            unpacked = 0
            try:
                text, line = line.decode(), b""  # a line may be long and is not held three times
                record, text = json.loads(text), ""
                yield record, _place(file)
            except UnicodeDecodeError as error:
                yield (
                    Broken(NOT_UTF8, _not_utf8(name, error, f"line {number}, byte")),
                    _place(file),
                )
            except (ValueError, RecursionError) as error:
                damage = DataError(
                    "a line is not JSON",
                    where=f"{name}:{number}",
                    why=str(error),
                    fix="one JSON object a line\na name that ends in .txt",
                )
                yield Broken(NOT_JSON, damage), _place(file)


def _is_packed(path: Path) -> bool:
    return path.suffix in PACKERS


def _limit(path: Path, unpacked: int = 0) -> int:
    """Return the number of bytes to request: one above the limit, or all."""
    return MOST_UNPACKED + 1 - unpacked if _is_packed(path) else -1


def _unpacks_too_far(path: Path, where: str) -> DataError:
    return DataError(
        "a compressed file unpacks to more than the limit of a document",
        where=where,
        why=f"over {MOST_UNPACKED:,} bytes without a document's end,"
        f" from a file of {path.stat().st_size:,}",
        fix="leave it out of the glob\nunpack it, and split it into documents",
    )


def _place(file: Any) -> int:
    """Return the position of a file of `opened` in bytes on disk."""
    inner = file.fileobj if isinstance(file, gzip.GzipFile) else file.raw
    return inner.tell() if isinstance(inner, _Zstandard | io.BufferedReader) else file.tell()


def _parquet(path: Path, name: str, text_key: str) -> Iterator[tuple[dict[str, Any], int]]:
    size = path.stat().st_size
    with _whole(name):
        for row in parquet.rows(path, name, text_key):
            yield row.fields, int(size * row.share)


@contextlib.contextmanager
def _whole(name: str) -> Iterator[None]:
    """Name the file in an error of a decompressor or of pyarrow."""
    try:
        yield
    except (DataError, InputMissing, GeneratorExit):
        raise
    except Exception as error:
        # zlib.error, EOFError, ZstdError and ArrowInvalid have no common base.
        raise DataError(
            "a file is damaged or has another format than its name",
            where=name,
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix="fetch it again\nleave it out of the glob",
        ) from error


def _no_text(record: Any, name: str, number: int, text_key: str) -> DataError:
    keys = (
        [key for key, value in record.items() if isinstance(value, str)]
        if isinstance(record, dict)
        else []
    )
    return DataError(
        f"a record has no text under {text_key!r}",
        where=f"{name}, record {number}",
        why=f"its fields with text: {', '.join(keys) or 'none'}"
        if isinstance(record, dict)
        else f"it is a {type(record).__name__}, not an object",
        fix=f"--config.data.text_key={keys[0]}"
        if keys
        else "one JSON object a line, with its text in one field",
    )


def opened(path: Path) -> IO[bytes]:
    """Open a file; a `.gz` or `.zst` file is unpacked."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return frames(open(path, "rb"))
    return open(path, "rb")


def frames(file: IO[bytes]) -> IO[bytes]:
    """Unpack Zstandard frames; closed with `file`."""
    return io.BufferedReader(_Zstandard(file), 2**17)


class _Zstandard(io.RawIOBase):
    """Concatenated Zstandard frames. The library's own reader does not report a truncated file."""

    def __init__(self, file: IO[bytes]):
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._file = file  # closed with this reader
        self._frame = self._decompressor.decompressobj()
        self._ready = memoryview(b"")
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            # Four bytes can unpack to 128 KiB, and all of a piece's output is held: small pieces.
            data = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(2**11)
            if not data:
                if self._begun and not self._frame.eof:
                    raise EOFError("the last frame is cut")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()
