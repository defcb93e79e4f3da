"""Records of files: text, JSON lines, Parquet, perhaps compressed; and what is wrong with each."""

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

# Why a record is left out; these are broken, and few of them are tolerated.
NOT_UTF8, NOT_JSON = "not UTF-8", "not JSON"
NO_TEXT, OTHER_TYPE = "without the text key", "with a text of another type"
# These hold nothing to train on, and any number of them may be left out.
EMPTY, BLANK = "empty", "only white space"
# What is changed in a document, or strange in one that is kept as it is.
SURROGATE = "with a lone surrogate, replaced"
MARK = "with a byte order mark, removed"
NUL = "with NUL, kept"
MENDED = (SURROGATE, MARK, NUL)

# Of a compressed file, without a document in between. A megabyte can unpack to ten thousand of them; a file that is not
# compressed shows its size.
MOST_UNPACKED = 2**28

PROBED_START = 2**12  # bytes of a file that tell text from other files
PACKERS = {".gz": "gzip", ".zst": "zstd"}  # the commands

BYTE_ORDER_MARK = "\ufeff".encode()
_SURROGATES = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """A text and where it came from."""

    text: str
    file: str
    record: int
    place: int = 0  # bytes of the files, as they lie on disk, that were read up to here


class Broken(NamedTuple):
    """A record that cannot be used: why, and the error that it becomes where too many are."""

    reason: str
    error: DataError


@dataclasses.dataclass
class Start:
    """How much is still to be read where only the start of some files is looked at: records, and bytes of them unpacked."""

    records: int
    bytes: int

    @property
    def is_read(self) -> bool:
        """Whether nothing is left."""
        return not (self.records and self.bytes)


def read(
    path: Path, name: str, text_key: str, counts: Counter[str], start: Start | None = None
) -> Iterator[Document | Broken]:
    """Every record of a file, as text or as what is wrong with it. What is odd about the file itself is counted.

    A `start` gives up the bytes that are read of it. Where they end, so does a text, and a record that they cut is none.

    Raises:
      DataError: where the file cannot be read any further.
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
        found = record.get(text_key) if isinstance(record, dict) else None
        if isinstance(found, str):
            if start is not None and kind == ".parquet":
                start.bytes = max(start.bytes - len(found), 0)
            yield Document(found, name, number, place)
        else:
            is_there = isinstance(record, dict) and text_key in record
            yield Broken(
                OTHER_TYPE if is_there else NO_TEXT, _no_text(record, name, number, text_key)
            )


def is_text(path: Path) -> bool:
    """Whether a file is one text; it holds records else."""
    return _kind(path) not in (".jsonl", ".json", ".parquet")


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if _is_packed(path) else path.suffix


def ending(path: Path) -> str:
    """Return the end of a file's name that says what it holds, with its packing: `.jsonl.gz`."""
    return f"{_kind(path)}{path.suffix}" if _is_packed(path) else path.suffix


def looks_like_text(path: Path) -> bool:
    """Whether `read` can take a file, as far as its first bytes tell."""
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
    """JSON can spell halves of surrogate pairs, which UTF-8 cannot: they become U+FFFD. NUL is text like any other."""
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
    """The command that makes a file UTF-8 where it lies. The old one stays beside it, under a name that no glob finds."""
    hidden = (path.with_name(f".{path.name}.{kind}") for kind in ("utf8", "latin1"))
    file, new, old = (shlex.quote(str(each)) for each in (path, *hidden))
    command = "iconv -f latin1 -t utf-8"
    if path.suffix in PACKERS:
        packer = PACKERS[path.suffix]
        command = f"{packer} -dc {file} | {command} | {packer} > {new}"
    else:
        command = f"{command} {file} > {new}"
    return f"{command} && mv {file} {old} && mv {new} {file}    # where it is Latin-1"


def _json_lines(
    path: Path, name: str, counts: Counter[str], start: Start | None
) -> Iterator[tuple[Any, int]]:
    """Each record, and the bytes of the file that were read up to its end."""
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
                text, line = line.decode(), b""  # a line may be long, and is not kept three times
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
    """The bytes to ask for: one more than may come, or all of them."""
    return MOST_UNPACKED + 1 - unpacked if _is_packed(path) else -1


def _unpacks_too_far(path: Path, where: str) -> DataError:
    return DataError(
        "a compressed file unpacks to more than a document may hold",
        where=where,
        why=f"more than {MOST_UNPACKED:,} bytes without a document's end, from a file of {path.stat().st_size:,}",
        fix="leave it out of the glob\nunpack it, and cut it into documents",
    )


def _place(file: Any) -> int:
    """Where a file that `opened` gave stands, in bytes on disk."""
    inner = file.fileobj if isinstance(file, gzip.GzipFile) else file.raw
    return inner.tell() if isinstance(inner, _Zstandard | io.BufferedReader) else file.tell()


def _parquet(path: Path, name: str, text_key: str) -> Iterator[tuple[dict[str, Any], int]]:
    size = path.stat().st_size
    with _whole(name):
        for row in parquet.rows(path, name, text_key):
            yield row.fields, int(size * row.share)


@contextlib.contextmanager
def _whole(name: str) -> Iterator[None]:
    """Says which file it is that a decompressor or pyarrow cannot read."""
    try:
        yield
    except (DataError, InputMissing, GeneratorExit):
        raise
    except (
        Exception
    ) as error:  # zlib.error, EOFError, ZstdError, ArrowInvalid: they share no parent
        raise DataError(
            "a file is damaged or is not what its name says",
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
    """The bytes of a file; of a `.gz` or `.zst` file as they were before they were packed."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return frames(open(path, "rb"))
    return open(path, "rb")


def frames(file: IO[bytes]) -> IO[bytes]:
    """The bytes of Zstandard frames as they were before they were packed; closed with `file`."""
    return io.BufferedReader(_Zstandard(file), 2**17)


class _Zstandard(io.RawIOBase):
    """_Zstandard frames, end to end. The library's own reader takes a file that was cut for one that ended."""

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
            # Four bytes can stand for 128 KiB, and what a piece unpacks to is held at once: the pieces are small.
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
