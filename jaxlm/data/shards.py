"""Token shards: memory-mapped ids of whole documents, with a manifest that says what is in them.

A folder holds `tokens-00000.bin` (ids, uint16 or uint32, every document as bos, tokens, eos), `documents-00000.bin`
(int64 rows: end of the document in its shard, number of its file, number of its record), `files.json`, the tokenizer's
own file, and `manifest.json`, written last.
"""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import cache
from jaxlm.data import tokenizer as tokenizers
from jaxlm.data.documents import Document
from jaxlm.data.tokenizer import Tokenizer

FORMAT_VERSION = 1
SHARD_TOKENS = 2**28
DTYPES = "uint16", "uint32"
BATCH_BYTES = 2**20  # of text that is encoded at a time
PART = 2**16  # characters of a document that are encoded together
PARTS = 256  # that a tokenizer is given at a time
DOCUMENT_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds."""

    tokenizer: str  # sha256 of the tokenizer
    vocab: int
    dtype: str
    documents: int
    tokens: int  # ids, bos and eos of each document counted
    bytes: int  # of text
    left_out: dict[str, int]  # documents by reason
    unknown: int  # characters that the tokenizer has no id for
    shards: list[dict[str, Any]]  # tokens, documents, largest id, and sha256 of both files
    format_version: int = FORMAT_VERSION


class Shards:
    """A folder of token shards, opened. Nothing is read until a document is asked for."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._first_document = np.cumsum([0] + [shard["documents"] for shard in manifest.shards])

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.folder, self.manifest)  # a worker process maps the files itself

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Reads the manifest and checks every file's size against it.

        Raises:
          DataError: where the folder is not whole.
        """
        path = folder / "manifest.json"
        if not path.exists():
            raise InputMissing(
                "a folder of token shards has no manifest",
                where=str(path),
                fix="jaxlm data tokenize --config=... --out=DIR writes one",
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version == FORMAT_VERSION:
                manifest = Manifest(**content)
                largest = max((shard["largest_id"] for shard in manifest.shards), default=0)
                if manifest.dtype not in DTYPES:
                    raise ValueError(f"dtype {manifest.dtype!r} is none of {', '.join(DTYPES)}")
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                "a shard manifest cannot be read",
                where=str(path),
                why=f"{type(error).__name__}: {error}",
                fix="write the shards again",
            ) from error
        if version != FORMAT_VERSION:
            raise DataError(
                f"token shards of format {version}",
                where=str(path),
                why=f"this jaxlm reads format {FORMAT_VERSION}",
                fix="write the shards again with this jaxlm",
            )
        if largest >= manifest.vocab:
            raise DataError(
                "token shards hold an id past the end of their tokenizer",
                where=str(path),
                why=f"largest id {largest}, vocabulary {manifest.vocab}",
                fix="write the shards again with the tokenizer that the model will use",
            )
        width = np.dtype(manifest.dtype).itemsize
        for number, shard in enumerate(manifest.shards):
            for name, size in (
                (_tokens_name(number), shard["tokens"] * width),
                (_documents_name(number), shard["documents"] * 8 * DOCUMENT_COLUMNS),
            ):
                found = (folder / name).stat().st_size if (folder / name).exists() else None
                if found != size:
                    raise DataError(
                        "a token shard is damaged",
                        where=str(folder / name),
                        why=f"{size} bytes by its manifest, found {found}",
                        fix="write the shards again, or restore the file",
                    )
        return cls(folder, manifest)

    def verify(self) -> None:
        """Reads every byte and compares it with the manifest's digests. Raises DataError at the first that differs."""
        for number, shard in enumerate(self.manifest.shards):
            for name, key in (
                (_tokens_name(number), "tokens_sha256"),
                (_documents_name(number), "documents_sha256"),
            ):
                with open(self.folder / name, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != shard[key]:
                        raise DataError(
                            "a token shard does not match its digest",
                            where=str(self.folder / name),
                            why="a bit changed since it was written",
                            fix="write the shards again, or restore the file",
                        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return tokenizers.load(
            (self.folder / "tokenizer").read_bytes(), str(self.folder / "tokenizer")
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.manifest.documents

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Ids in each of the documents `start` to `stop`, bos and eos counted; int64."""
        out = [
            np.diff(
                self._index(shard)[low:high, 0],
                prepend=self._index(shard)[low - 1, 0] if low else 0,
            )
            for shard, low, high in self._spans(start, stop)
        ]
        return np.concatenate(out) if out else np.zeros(0, np.int64)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids `start` to `stop` of a document."""
        shard, row = self._locate(document)
        first = int(self._index(shard)[row - 1, 0]) if row else 0
        return self._tokens(shard)[first + start : first + stop]

    def origin(self, document: int) -> tuple[str, int]:
        """The file that a document came from, and the number of its record there."""
        shard, row = self._locate(document)
        _, file, record = self._index(shard)[row]
        return self._files[int(file)], int(record)

    @functools.cached_property
    def _files(self) -> list[str]:
        return json.loads((self.folder / "files.json").read_text())

    def _locate(self, document: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return shard, document - int(self._first_document[shard])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for shard, (first, end) in enumerate(
            zip(self._first_document[:-1], self._first_document[1:], strict=True)
        ):
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield shard, int(low - first), int(high - first)

    @functools.cache  # noqa: B019 - a Shards lives as long as its run
    def _tokens(self, shard: int) -> np.ndarray:
        return np.memmap(self.folder / _tokens_name(shard), self.manifest.dtype, "r")

    @functools.cache  # noqa: B019
    def _index(self, shard: int) -> np.ndarray:
        return np.memmap(self.folder / _documents_name(shard), np.int64, "r").reshape(
            -1, DOCUMENT_COLUMNS
        )


def write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    left_out: Counter[str],
    progress: Callable[[int], None] = lambda _: None,
    *,
    name: str = "",
) -> Shards:
    """Encodes documents into a new folder, which appears whole or not at all.

    `left_out` is what the reader of `documents` counts while it is read. `progress` gets the bytes of text so far.
    `name` is what an error calls the documents.

    Raises:
      DataError: where there is no document, or the tokenizer gives an id outside its own table.
    """
    with cache.building(folder) as partial:
        if partial is None:
            return Shards.open(folder)
        writer = _Writer(partial, tokenizer)
        try:
            read = 0
            for batch in _batches(documents):
                writer.add(batch)
                read += sum(len(document.text.encode()) for document in batch)
                progress(read)
        finally:
            writer.close()
        if not writer.files:
            raise DataError(
                "there is no document in the data",
                where=name or str(folder),
                why=f"left out: {', '.join(f'{count} {reason}' for reason, count in left_out.items()) or 'none, the files are empty'}",
                fix="name more files; or hold out the end of each text: --config.data.validation=tail:10%",
            )
        writer.finish(left_out)
    return Shards.open(folder)


class _Writer:
    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
        self.files: dict[str, int] = {}
        self.shards: list[dict[str, Any]] = []
        self.totals = Counter[str]()
        self._open()

    def _open(self) -> None:
        number = len(self.shards)
        self._streams = (
            open(self.folder / _tokens_name(number), "wb"),  # noqa: SIM115 - both end in close()
            open(self.folder / _documents_name(number), "wb"),  # noqa: SIM115
        )
        self._digests = hashlib.sha256(), hashlib.sha256()
        self._counts = [0, 0]
        self._largest_id = 0

    def add(self, batch: list[Document]) -> None:
        for document, ids in zip(batch, self._encode([d.text for d in batch]), strict=True):
            if self._counts[0] and self._counts[0] + len(ids) + 2 > SHARD_TOKENS:
                self.close()
                self._open()
            array = np.concatenate(([self.tokenizer.bos], ids, [self.tokenizer.eos]))
            if array.max() >= self.tokenizer.size or array.min() < 0:
                raise DataError(
                    f"the tokenizer gave an id outside 0 to {self.tokenizer.size - 1}",
                    where=f"{document.file}, record {document.record}",
                    why=f"ids {array.min()} to {array.max()}",
                )
            self._largest_id = max(self._largest_id, int(array.max()))
            self._counts[0] += len(array)
            self._counts[1] += 1
            file = self.files.setdefault(document.file, len(self.files))
            row = np.array([self._counts[0], file, document.record], np.int64)
            for stream, digest, data in zip(
                self._streams,
                self._digests,
                (array.astype(self.dtype).tobytes(), row.tobytes()),
                strict=True,
            ):
                stream.write(data)
                digest.update(data)
            self.totals["bytes"] += len(document.text.encode())
            self.totals["unknown"] += int((array == self.tokenizer.unk).sum())

    def _encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """The ids of each text; long ones are encoded in parts, in memory that hardly grows with them."""
        counts = [0] * len(texts)
        parts = []
        for number, text in enumerate(texts):
            for part in _parts(text):
                parts.append(part)
                counts[number] += 1
        encoded = (
            np.array(ids, np.int32)
            for start in range(0, len(parts), PARTS)
            for ids in self.tokenizer.encode_many(parts[start : start + PARTS])
        )
        for count in counts:
            yield np.concatenate([next(encoded) for _ in range(count)])

    def close(self) -> None:
        """Ends the shard that is being written."""
        for stream in self._streams:
            stream.close()
        tokens, documents = self._digests
        self.shards.append(
            {
                "tokens": self._counts[0],
                "documents": self._counts[1],
                "largest_id": self._largest_id,
                "tokens_sha256": tokens.hexdigest(),
                "documents_sha256": documents.hexdigest(),
            }
        )

    def finish(self, left_out: Counter[str]) -> None:
        """Writes what makes the folder readable."""
        manifest = Manifest(
            tokenizer=self.tokenizer.digest,
            vocab=self.tokenizer.size,
            dtype=self.dtype.name,
            documents=sum(shard["documents"] for shard in self.shards),
            tokens=sum(shard["tokens"] for shard in self.shards),
            bytes=self.totals["bytes"],
            left_out=dict(left_out),
            unknown=self.totals["unknown"],
            shards=self.shards,
        )
        (self.folder / "tokenizer").write_bytes(self.tokenizer.serialise())
        (self.folder / "files.json").write_text(json.dumps(list(self.files)))
        cache.write_file(
            self.folder / "manifest.json",
            json.dumps(dataclasses.asdict(manifest), indent=1).encode(),
        )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(text: str) -> Iterator[str]:
    """A text in parts of at most `PART` characters, cut after a line where there is one."""
    start = 0
    while len(text) - start > PART:
        stop = text.rfind("\n", start, start + PART) + 1 or start + PART
        yield text[start:stop]
        start = stop
    yield text[start:]


def _tokens_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def _documents_name(number: int) -> str:
    return f"documents-{number:05d}.bin"
