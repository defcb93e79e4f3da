"""Token shards: memory-mapped ids of whole documents, with a manifest that says what is in them.

A folder holds `tokens-00000.bin` (ids, uint16 or uint32, every document as bos, tokens, eos), `documents-00000.bin`
(int64 rows: end of the document in its shard, number of its file, number of its record), `files.json`, the tokenizer's
own file, and `manifest.json`, written last.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import tokenizer as tokenizers
from jaxlm.data.documents import Document
from jaxlm.data.tokenizer import Tokenizer

FORMAT_VERSION = 1
SHARD_TOKENS = 2**28
BATCH_BYTES = 2**20  # of text that is encoded at a time
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
    shards: list[dict[str, Any]]  # tokens, documents, and sha256 of both files
    format_version: int = FORMAT_VERSION


class Shards:
    """A folder of token shards, opened. Nothing is read until a document is asked for."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._first_document = np.cumsum([0] + [shard["documents"] for shard in manifest.shards])

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Reads the manifest and checks every file's size against it.

        Raises:
          DataError: where the folder is not whole.
        """
        path = folder / "manifest.json"
        if not path.exists():
            raise InputMissing("a folder of token shards has no manifest", where=str(path), fix="jaxlm data tokenize --config=... --out=DIR writes one")
        try:
            manifest = Manifest(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise DataError("a shard manifest cannot be read", where=str(path), why=str(error)) from error
        if manifest.format_version != FORMAT_VERSION:
            raise DataError(f"token shards of format {manifest.format_version}", where=str(path), why=f"this jaxlm reads format {FORMAT_VERSION}")
        width = np.dtype(manifest.dtype).itemsize
        for number, shard in enumerate(manifest.shards):
            for name, size in ((_tokens_name(number), shard["tokens"] * width), (_documents_name(number), shard["documents"] * 8 * DOCUMENT_COLUMNS)):
                found = (folder / name).stat().st_size if (folder / name).exists() else None
                if found != size:
                    raise DataError("a token shard is damaged", where=str(folder / name), why=f"{size} bytes by its manifest, found {found}", fix="write the shards again, or restore the file")
        return cls(folder, manifest)

    def verify(self) -> None:
        """Reads every byte and compares it with the manifest's digests. Raises DataError at the first that differs."""
        for number, shard in enumerate(self.manifest.shards):
            for name, key in ((_tokens_name(number), "tokens_sha256"), (_documents_name(number), "documents_sha256")):
                with open(self.folder / name, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != shard[key]:
                        raise DataError("a token shard does not match its digest", where=str(self.folder / name), why="a bit changed since it was written", fix="write the shards again, or restore the file")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return tokenizers.load((self.folder / "tokenizer").read_bytes(), str(self.folder / "tokenizer"))

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.manifest.documents

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Ids in each of the documents `start` to `stop`, bos and eos counted; int64."""
        out = [np.diff(self._index(shard)[low:high, 0], prepend=self._index(shard)[low - 1, 0] if low else 0) for shard, low, high in self._spans(start, stop)]
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
        for shard, (first, end) in enumerate(zip(self._first_document[:-1], self._first_document[1:], strict=True)):
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield shard, int(low - first), int(high - first)

    @functools.lru_cache(maxsize=None)  # noqa: B019 - a Shards lives as long as its run
    def _tokens(self, shard: int) -> np.ndarray:
        return np.memmap(self.folder / _tokens_name(shard), self.manifest.dtype, "r")

    @functools.lru_cache(maxsize=None)  # noqa: B019
    def _index(self, shard: int) -> np.ndarray:
        return np.memmap(self.folder / _documents_name(shard), np.int64, "r").reshape(-1, DOCUMENT_COLUMNS)


def write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    left_out: Counter[str],
    progress: Callable[[int], None] = lambda _: None,
) -> Shards:
    """Encodes documents into a new folder, which appears whole or not at all.

    `left_out` is what the reader of `documents` counts while it is read. `progress` gets the bytes of text so far.

    Raises:
      DataError: where there is no document, or the tokenizer gives an id outside its own table.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        writer = _Writer(partial, tokenizer)
        read = 0
        for batch in _batches(documents):
            writer.add(batch)
            read += sum(len(document.text) for document in batch)
            progress(read)
        manifest = writer.finish(left_out)
        if not manifest.documents:
            raise DataError("there is no document to train on", where=str(folder), why=f"left out: {dict(left_out) or 'nothing, the files are empty'}", fix="--config.data.train='texts/*.txt'")
        os.replace(partial, folder)
    except FileExistsError:
        pass  # another process finished the same folder first; its content is the same
    except OSError as error:
        if not (folder / "manifest.json").exists():
            raise error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
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
        self._streams = open(self.folder / _tokens_name(number), "wb"), open(self.folder / _documents_name(number), "wb")
        self._digests = hashlib.sha256(), hashlib.sha256()
        self._counts = [0, 0]

    def add(self, batch: list[Document]) -> None:
        for document, ids in zip(batch, self.tokenizer.encode_many([d.text for d in batch]), strict=True):
            if self._counts[0] and self._counts[0] + len(ids) + 2 > SHARD_TOKENS:
                self._close()
                self._open()
            array = np.array([self.tokenizer.bos, *ids, self.tokenizer.eos], np.int64)
            if array.max() >= self.tokenizer.size or array.min() < 0:
                raise DataError(f"the tokenizer gave an id outside 0 to {self.tokenizer.size - 1}", where=f"{document.file}, record {document.record}", why=f"ids {array.min()} to {array.max()}")
            self._counts[0] += len(array)
            self._counts[1] += 1
            file = self.files.setdefault(document.file, len(self.files))
            row = np.array([self._counts[0], file, document.record], np.int64)
            for stream, digest, data in zip(self._streams, self._digests, (array.astype(self.dtype).tobytes(), row.tobytes()), strict=True):
                stream.write(data)
                digest.update(data)
            self.totals["bytes"] += len(document.text.encode())
            self.totals["unknown"] += int((array == self.tokenizer.unk).sum())

    def _close(self) -> None:
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        tokens, documents = self._digests
        self.shards.append(
            {
                "tokens": self._counts[0],
                "documents": self._counts[1],
                "tokens_sha256": tokens.hexdigest(),
                "documents_sha256": documents.hexdigest(),
            }
        )

    def finish(self, left_out: Counter[str]) -> Manifest:
        self._close()
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
        (self.folder / "manifest.json").write_text(json.dumps(dataclasses.asdict(manifest), indent=1))
        return manifest


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


def _tokens_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def _documents_name(number: int) -> str:
    return f"documents-{number:05d}.bin"
