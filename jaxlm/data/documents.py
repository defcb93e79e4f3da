"""Documents from files: text, JSON lines, Parquet, and the source of Python's own library."""

import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.core.errors import DataError, InputMissing

PROBED_RECORDS = (
    1000  # a record without the text key among a file's first ones is an error, later it is counted
)
STDLIB_PARTS = {"stdlib:train", "stdlib:validation"}
# pydoc_data is no source: one generated file of prose, which would be 60% of the validation bytes.
STDLIB_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
STDLIB_HELD_OUT = 13  # of the 256 values of a path hash's first byte: about 5%


class Document(NamedTuple):
    """A text and where it came from."""

    text: str
    file: str
    record: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The files behind some patterns, in order of their paths. `names` are what reports call them."""

    files: tuple[Path, ...]
    names: tuple[str, ...]
    text_key: str
    not_utf8: int = (
        0  # files of Python's library in another encoding, which the corpus is defined without
    )

    @classmethod
    def find(cls, patterns: tuple[str, ...], text_key: str, setting: str) -> "Corpus":
        """Every file that a pattern matches, once.

        Raises:
          InputMissing: where a pattern matches no file.
        """
        found: dict[Path, str] = {}
        not_utf8 = 0
        for pattern in patterns:
            if pattern in STDLIB_PARTS:
                files, left_out = _stdlib(pattern)
                found |= files
                not_utf8 += left_out
                continue
            matches = sorted(
                path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()
            )
            if not matches:
                raise InputMissing(
                    f"no file matches {pattern}",
                    where=setting,
                    why="a pattern is a path or a glob such as 'texts/**/*.txt', read from the current directory",
                    fix=f"--config.{setting}='texts/*.txt'",
                )
            found |= {Path(path): path for path in matches}
        return cls(tuple(found), tuple(found.values()), text_key, not_utf8)

    def digest(self) -> str:
        """sha256 over every file's name and contents."""
        total = hashlib.sha256(self.text_key.encode())
        for path, name in zip(self.files, self.names, strict=True):
            with open(path, "rb") as file:
                total.update(
                    f"\0{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}".encode()
                )
        return total.hexdigest()

    def documents(self, counts: Counter[str]) -> Iterator[Document]:
        """Every document, one at a time. What is left out is counted by reason.

        Raises:
          DataError: where a file is not what its name says.
        """
        if self.not_utf8:
            counts["not UTF-8"] += self.not_utf8
        for path, name in zip(self.files, self.names, strict=True):
            yield from _read(path, name, self.text_key, counts)


def _stdlib(part: str) -> tuple[dict[Path, str], int]:
    """Python's library without its tests, split by the first byte of sha256 of the path inside it; and files left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found, left_out = {}, 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        inner = path.relative_to(root)
        if STDLIB_LEFT_OUT.intersection(inner.parts[:-1]):
            continue
        held_out = hashlib.sha256(inner.as_posix().encode()).digest()[0] < STDLIB_HELD_OUT
        if held_out == (part == "stdlib:validation"):
            if _is_utf8(path):
                found[path] = inner.as_posix()
            else:
                left_out += 1
    return found, left_out


def _is_utf8(path: Path) -> bool:
    """A few library files declare another encoding; the corpus is defined without them."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(path: Path, name: str, text_key: str, counts: Counter[str]) -> Iterator[Document]:
    kind = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    if kind in (".jsonl", ".json"):
        records = _json_lines(path, name)
    elif kind == ".parquet":
        records = _parquet(path, name, text_key)
    else:
        text = _text(path, name)
        if not text:
            counts["empty"] += 1
            return
        yield Document(text, name, 0)
        return
    for number, record in enumerate(records):
        found = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(found, str):
            if number < PROBED_RECORDS:
                _refuse_record(record, name, number, text_key)
            counts["no text"] += 1
        elif not found:
            counts["empty"] += 1
        else:
            yield Document(_encodable(found, counts), name, number)


def _encodable(text: str, counts: Counter[str]) -> str:
    """JSON can spell halves of surrogate pairs, which UTF-8 cannot: they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        counts["with a lone surrogate, replaced"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _text(path: Path, name: str) -> str:
    with _whole(name), _open(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error, "byte") from error


def _not_utf8(name: str, error: UnicodeDecodeError, unit: str) -> DataError:
    return DataError(
        "a file is not UTF-8",
        where=f"{name}, {unit} {error.start}",
        why=f"0x{error.object[error.start]:02x}: {error.reason}",
        fix=f"iconv -f latin1 -t utf-8 '{name}' > '{name}.utf8.txt', or leave the file out of the glob",
    )


def _json_lines(path: Path, name: str) -> Iterator[Any]:
    with _whole(name), _open(path) as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except UnicodeDecodeError as error:
                raise _not_utf8(name, error, f"line {number + 1}, byte") from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    "a line is not JSON",
                    where=f"{name}:{number + 1}",
                    why=str(error),
                    fix="one JSON object a line, or a name that ends in .txt",
                ) from error


def _parquet(path: Path, name: str, text_key: str) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputMissing(
            "reading Parquet needs pyarrow", where=name, fix="pip install 'jaxlm[parquet]'"
        ) from error
    with _whole(name):
        file = parquet.ParquetFile(path)
        columns = [text_key] if text_key in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            yield from batch.to_pylist()


@contextlib.contextmanager
def _whole(name: str) -> Iterator[None]:
    """Says which file it is that a decompressor or pyarrow cannot read."""
    try:
        yield
    except (DataError, GeneratorExit, UnicodeDecodeError):
        raise
    except (
        Exception
    ) as error:  # zlib.error, EOFError, ZstdError, ArrowInvalid: they share no parent
        raise DataError(
            "a file is damaged or is not what its name says",
            where=name,
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix="fetch it again, or leave it out of the glob",
        ) from error


def _refuse_record(record: Any, name: str, number: int, text_key: str) -> None:
    keys = (
        [key for key, value in record.items() if isinstance(value, str)]
        if isinstance(record, dict)
        else []
    )
    raise DataError(
        f"a record has no text under {text_key!r}",
        where=f"{name}, record {number}",
        why=f"its fields with text: {', '.join(keys) or 'none'}"
        if isinstance(record, dict)
        else f"it is a {type(record).__name__}, not an object",
        fix=f"--config.data.text_key={keys[0]}"
        if keys
        else "one JSON object a line, with its text in one field",
    )


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path), 2**17)
    return open(path, "rb")


class _Zstandard(io.RawIOBase):
    """Zstandard frames, end to end. The library's own reader takes a file that was cut for one that ended."""

    def __init__(self, path: Path):
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._file = open(path, "rb")  # noqa: SIM115 - closed with this reader
        self._frame = self._decompressor.decompressobj()
        self._ready = memoryview(b"")
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(2**16)
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

    def close(self) -> None:
        self._file.close()
        super().close()
