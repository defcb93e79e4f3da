"""Documents become token shards."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data import cache, manifest
from jaxlm.data.blocks import BlockWriter
from jaxlm.data.manifest import Manifest, Shard
from jaxlm.data.records import Document
from jaxlm.data.shards import Shards
from jaxlm.data.tokenizer import Tokenizer

SHARD_TOKENS = 2**28
BATCH = 2**20  # characters of text that are encoded at a time
# Characters of a document that are encoded together: SentencePiece is a third faster than with 2**16.
PART = 2**13


def write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    left_out: Counter[str],
    progress: Callable[[int], None] = lambda _: None,
    *,
    name: str = "",
    files: Sequence[str] = (),
) -> Shards:
    """Encodes documents into a new folder, which appears whole or not at all.

    `left_out` is what the reader of `documents` counts while it is read. `progress` gets the place of the document that was written last, now and then.
    `name` is what an error calls the documents. `files` are numbered first, in this order, so that folders written apart agree.

    Raises:
      DataError: where there is no document, or the tokenizer gives an id outside its own table.
      OSError: where it cannot be written; the caller knows what to do about that.
    """
    with cache.built(folder) as partial:
        if partial is None:
            return Shards.open(folder)
        writer = _Writer(partial, tokenizer, files)
        try:
            writer.add(documents, progress)
        finally:
            writer.close()
        if not any(shard.documents for shard in writer.shards):
            raise DataError(
                "there is no document in the data",
                where=name or str(folder),
                why=f"left out: {', '.join(f'{count} {reason}' for reason, count in left_out.items()) or 'none, the files are empty'}",
                fix="--config.data.validation=tail:10%    # the end of each text\nname more files",
            )
        writer.finish(left_out)
    return Shards.open(folder)


class _Piece(NamedTuple):
    """The ids of a part of a document."""

    number: int
    document: Document
    ids: np.ndarray


class _Writer:
    def __init__(self, folder: Path, tokenizer: Tokenizer, files: Sequence[str]):
        self.folder, self.tokenizer = folder, tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
        self.files = {name: number for number, name in enumerate(files)}
        self.shards: list[Shard] = []
        self.totals = Counter[str]()
        self._before, self._after = (
            np.array(ids, self.dtype) for ids in (tokenizer.before, tokenizer.after)
        )
        self._around = max((*tokenizer.before, *tokenizer.after))
        self._open()

    def _open(self) -> None:
        number = len(self.shards)
        self._tokens = BlockWriter(self.folder / manifest.tokens_name(number))
        self._documents = BlockWriter(self.folder / manifest.documents_name(number))
        self._counts = Counter[str]()
        self._largest_id = 0

    def add(self, documents: Iterable[Document], progress: Callable[[int], None]) -> None:
        """Encodes documents and writes them."""
        told = place = 0
        for _, pieces in itertools.groupby(self._encoded(documents), lambda piece: piece.number):
            first, *rest = pieces
            self._write(first.document, [first.ids, *(piece.ids for piece in rest)])
            place = first.document.place
            if place - told >= BATCH:
                told = place
                progress(told)
        progress(place)

    def _write(self, document: Document, parts: list[np.ndarray]) -> None:
        count = len(self._before) + len(self._after) + sum(len(part) for part in parts)
        if self._counts["tokens"] and self._counts["tokens"] + count > SHARD_TOKENS:
            self.close()
            self._open()
        for part in (self._before, *parts, self._after):
            self._tokens.write(part)
        self._largest_id = max(
            self._largest_id, self._around, *(int(part.max(initial=0)) for part in parts)
        )
        self._counts["tokens"] += count
        self._counts["documents"] += 1
        file = self.files.setdefault(document.file, len(self.files))
        self._documents.write(np.array([self._counts["tokens"], file, document.record], "<i8"))
        self.totals["unknown"] += sum(int((part == self.tokenizer.unk).sum()) for part in parts)

    def _encoded(self, documents: Iterable[Document]) -> Iterator[_Piece]:
        """The ids of each document, a part at a time: as lists of Python's integers they are twenty times their text."""
        parts = (
            (number, document, text)
            for number, document in enumerate(documents)
            for text in _parts(document.text)
        )
        for group in _groups(parts):
            encoded = self.tokenizer.encode_many([text for _, _, text in group])
            for (number, document, text), ids in zip(group, encoded, strict=True):
                self.totals["bytes"] += len(text.encode())
                yield _Piece(number, document, self._checked(document, ids))

    def _checked(self, document: Document, ids: list[int]) -> np.ndarray:
        array = np.array(ids, np.int64)
        if len(array) and (array.max() >= self.tokenizer.size or array.min() < 0):
            raise DataError(
                f"the tokenizer gave an id outside 0 to {self.tokenizer.size - 1}",
                where=f"{document.file}, record {document.record}",
                why=f"ids {array.min()} to {array.max()}",
                fix="--config.data.tokenizer=sentencepiece:4096",
            )
        return array.astype(self.dtype)

    def close(self) -> None:
        """Ends the shard that is being written."""
        for stream in (self._tokens, self._documents):
            stream.close()
        checks = np.concatenate((self._tokens.checks, self._documents.checks)).tobytes()
        (self.folder / manifest.checks_name(len(self.shards))).write_bytes(checks)
        self.shards.append(
            Shard(
                tokens=self._counts["tokens"],
                documents=self._counts["documents"],
                largest_id=self._largest_id,
                tokens_sha256=self._tokens.sha256,
                documents_sha256=self._documents.sha256,
                checks_sha256=hashlib.sha256(checks).hexdigest(),
            )
        )

    def finish(self, left_out: Counter[str]) -> None:
        """Writes what makes the folder readable."""
        files = json.dumps(list(self.files)).encode()
        (self.folder / manifest.FILES).write_bytes(files)
        (self.folder / manifest.TOKENIZER).write_bytes(self.tokenizer.serialise())
        Manifest(
            tokenizer=self.tokenizer.digest,
            vocab=self.tokenizer.size,
            dtype=self.dtype.name,
            documents=sum(shard.documents for shard in self.shards),
            tokens=sum(shard.tokens for shard in self.shards),
            bytes=self.totals["bytes"],
            left_out=dict(left_out),
            unknown=self.totals["unknown"],
            files_sha256=hashlib.sha256(files).hexdigest(),
            shards=tuple(self.shards),
        ).write(self.folder)


def _groups(
    parts: Iterable[tuple[int, Document, str]],
) -> Iterator[list[tuple[int, Document, str]]]:
    """What a tokenizer is given at a time."""
    group: list[tuple[int, Document, str]] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part[2])
        if size >= BATCH:
            yield group
            group, size = [], 0
    if group:
        yield group


def _parts(text: str) -> Iterator[str]:
    """A text in parts of at most `PART` characters, cut after a line where there is one."""
    start = 0
    while len(text) - start > PART:
        stop = text.rfind("\n", start, start + PART) + 1 or start + PART
        yield text[start:stop]
        start = stop
    yield text[start:]
