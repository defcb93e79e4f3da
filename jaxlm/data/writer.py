"""Documents become token shards."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data import cache, long_text, manifest
from jaxlm.data.blocks import BlockWriter
from jaxlm.data.config import FIND_TOKENIZERS
from jaxlm.data.manifest import Manifest, Shard
from jaxlm.data.records import Document
from jaxlm.data.shards import Shards
from jaxlm.data.tokenizer import Tokenizer

SHARD_TOKENS = 2**28
SAID = 2**20  # bytes of files between two calls of `progress`
# Of how text becomes ids, beside the tokenizer: tokens in the cache that were made by another are made again.
ENCODING = 2


def write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    left_out: Counter[str],
    progress: Callable[[int], None] = lambda _: None,
    *,
    name: str = "",
    files: Sequence[str] = (),
    is_whole: Callable[[Path], bool] = lambda folder: True,
) -> Shards:
    """Encodes documents into a new folder, which appears whole or not at all.

    `left_out` is what the reader of `documents` counts while it is read. `progress` gets the place of the document that was written last, now and then.
    `is_whole` says whether a folder that is there already may be returned; one that may not is replaced.
    `name` is what an error calls the documents. `files` are numbered first, in this order, so that folders written apart agree.

    Raises:
      DataError: where there is no document, or the tokenizer gives an id outside its own table.
      OSError: where it cannot be written; the caller knows what to do about that.
    """
    with cache.built(folder, is_whole) as partial:
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
        waiting = deque[Document]()

        def texts() -> Iterator[str]:
            for document in documents:
                waiting.append(document)
                yield document.text

        for found in long_text.encode(self.tokenizer, texts()):
            document = waiting.popleft()
            self.totals["bytes"] += _bytes(document.text)
            self._write(document, [self._checked(document, ids) for ids in found])
            place = document.place
            if place - told >= SAID:
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

    def _checked(self, document: Document, array: np.ndarray) -> np.ndarray:
        if len(array) and (array.max() >= self.tokenizer.size or array.min() < 0):
            raise DataError(
                f"the tokenizer gave an id outside 0 to {self.tokenizer.size - 1}",
                where=f"{document.file}, record {document.record}",
                why=f"ids {array.min()} to {array.max()}",
                fix=FIND_TOKENIZERS,
            )
        return array.astype(self.dtype, copy=False)

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


def _bytes(text: str) -> int:
    """Return the bytes of a text as UTF-8, without another copy of all of it."""
    return sum(len(text[at : at + 2**20].encode()) for at in range(0, len(text), 2**20))
