"""Writing of documents as token shards."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data import cache, chat_documents, chat_templates, formats, long_text, manifest, prompts
from jaxlm.data.blocks import BlockWriter
from jaxlm.data.chat_encoder import ChatEncoder, Encoded
from jaxlm.data.config import FIND_TOKENIZERS
from jaxlm.data.manifest import Manifest, Shard
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.shards import TokenShards
from jaxlm.data.tokenizer import Tokenizer

SHARD_TOKENS = 2**28
PROGRESS_BYTES = 2**20  # bytes of input between two calls of `progress`
EMPTY_TEXT = "--config.data.validation=tail:10%    # the end of each text\nname more files"
EMPTY_CHAT = (
    "'--config.data.validation=()'    # if too few are held out\n"
    "--config.data.sequence=4096    # if conversations are too long\nname more files"
)
ENCODING = 3  # version of the encoding; cached tokens of another version are made again


def write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    left_out: LeftOut,
    progress: Callable[[int], None] = lambda _: None,
    *,
    name: str = "",
    files: Sequence[str] = (),
    is_whole: Callable[[Path], bool] = lambda folder: True,
    chat: ChatEncoder | None = None,
    encoded: Iterable[Encoded] | None = None,
) -> TokenShards:
    """Encode documents into a new folder, which appears complete or not at all.

    Args:
      documents: the text, or conversations.
      left_out: counts of documents left out, filled while `documents` is read.
      progress: called now and then with the `place` of the last document.
      name: name of the documents in errors.
      files: file names that are numbered first, so that folders written separately agree.
      is_whole: returns if an existing folder may be returned; otherwise it is replaced.
      chat: the encoding of conversations; None for text.
      encoded: documents that are ids, in place of `documents`.

    Raises:
      DataError: if there is no document, or the tokenizer gives an id outside its table.
      OSError: if writing fails.
    """
    with cache.built(folder, is_whole) as partial:
        if partial is None:
            return TokenShards.open(folder)
        writer = _Writer(partial, tokenizer, files, chat)
        try:
            if chat is not None:
                encoded = chat_documents.encode(chat, documents, left_out, writer.figures)
            elif encoded is None:
                encoded = encode_texts(tokenizer, documents)
            writer.add(encoded, progress)
        finally:
            writer.close()
        if not any(shard.documents for shard in writer.shards):
            what = "the data contains no document"
            why = f"left out: {left_out or 'none, the files are empty'}"
            fix = EMPTY_TEXT if chat is None else EMPTY_CHAT
            raise DataError(what, where=name or str(folder), why=why, fix=fix)
        writer.finish(left_out)
    return TokenShards.open(folder)


class _Writer:
    def __init__(
        self, folder: Path, tokenizer: Tokenizer, files: Sequence[str], chat: ChatEncoder | None
    ):
        self.folder, self.tokenizer, self.chat = folder, tokenizer, chat
        self.figures = Counter[str]()
        self.weights: dict[float, int] = {} if chat is None else {0.0: 0, 1.0: 1}  # numbers
        self.dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
        self.files = {name: number for number, name in enumerate(files)}
        self.shards: list[Shard] = []
        self._prompts: list[bytes] = []  # lines
        self.totals = Counter[str]()
        around = ((), ()) if chat is not None else (tokenizer.before, tokenizer.after)
        self._before, self._after = (np.array(ids, self.dtype) for ids in around)
        self._around = max((*around[0], *around[1]), default=0)
        self._open()

    def _open(self) -> None:
        number = len(self.shards)
        self._tokens = BlockWriter(self.folder / manifest.tokens_name(number))
        self._documents = BlockWriter(self.folder / manifest.documents_name(number))
        self._columns = [self._tokens, self._documents]
        if self.chat is not None:
            self._columns.append(BlockWriter(self.folder / manifest.weights_name(number)))
        if self.chat is not None and self.chat.answers:
            self._columns.append(BlockWriter(self.folder / manifest.answers_name(number)))
        self._counts = Counter[str]()
        self._largest_id = 0

    def add(self, encoded: Iterable[Encoded], progress: Callable[[int], None]) -> None:
        """Write encoded documents."""
        reported = place = 0
        for each in encoded:
            document = each.document
            size = _bytes(document.text) if each.bytes is None else each.bytes
            self.totals["bytes"] += size
            self._write(document, [self._checked(document, ids) for ids in each.ids])
            if each.weights is not None:
                self._columns[2].write(self._numbers(document, each.weights))
            if each.side:
                self._columns[3].write(np.array([each.side, each.margin], "<f4"))
            if each.prompt is not None:
                self._prompts.append(prompts.serialized(each.prompt))
            place = document.place
            if place - reported >= PROGRESS_BYTES:
                reported = place
                progress(reported)
        progress(place)

    def _write(self, document: Document, parts: list[np.ndarray]) -> None:
        count = len(self._before) + len(self._after) + sum(len(part) for part in parts)
        is_paired = self.chat is not None and self.chat.answers == "pairs"
        is_whole = not is_paired or self._counts["documents"] % 2 == 0  # a shard has whole pairs
        if is_whole and self._counts["tokens"] and self._counts["tokens"] + count > SHARD_TOKENS:
            self.close()
            self._open()
        for part in (self._before, *parts, self._after):
            self._tokens.write(part)
        largest = (int(part.max(initial=0)) for part in parts)
        self._largest_id = max(self._largest_id, self._around, *largest)
        self._counts["tokens"] += count
        self._counts["documents"] += 1
        self.figures["longest"] = max(self.figures["longest"], count)
        file = self.files.setdefault(document.file, len(self.files))
        self._documents.write(np.array([self._counts["tokens"], file, document.record], "<i8"))
        if self.tokenizer.unk not in self.tokenizer.after:
            self.totals["unknown"] += sum(int((part == self.tokenizer.unk).sum()) for part in parts)

    def _numbers(self, document: Document, weights: np.ndarray) -> np.ndarray:
        """Return the number of each weight in the manifest's list."""
        if ((weights == 0) | (weights == 1)).all():
            return weights.astype(np.uint8)
        values, places = np.unique(weights, return_inverse=True)
        numbers = [self.weights.setdefault(v, len(self.weights)) for v in values.tolist()]
        if len(self.weights) > manifest.MAX_WEIGHTS:
            what = f"the data has more than {manifest.MAX_WEIGHTS} different weights of turns"
            where = formats.place(document.file, document.record)
            why = "a shard stores the number of each weight in one byte"
            raise DataError(what, where=where, why=why, fix="round the weights to two digits")
        return np.array(numbers, np.uint8)[places]

    def _checked(self, document: Document, array: np.ndarray) -> np.ndarray:
        if len(array) and (array.max() >= self.tokenizer.size or array.min() < 0):
            what = f"the tokenizer returned an id outside 0 to {self.tokenizer.size - 1}"
            where = formats.place(document.file, document.record)
            why = f"ids {array.min()} to {array.max()}"
            raise DataError(what, where=where, why=why, fix=FIND_TOKENIZERS)
        return array.astype(self.dtype, copy=False)

    def close(self) -> None:
        """Finish the current shard."""
        for stream in self._columns:
            stream.close()
        checks = np.concatenate([stream.checks for stream in self._columns]).tobytes()
        (self.folder / manifest.checks_name(len(self.shards))).write_bytes(checks)
        self.shards.append(
            Shard(
                tokens=self._counts["tokens"],
                documents=self._counts["documents"],
                largest_id=self._largest_id,
                tokens_sha256=self._tokens.sha256,
                documents_sha256=self._documents.sha256,
                checks_sha256=hashlib.sha256(checks).hexdigest(),
                weights_sha256="" if self.chat is None else self._columns[2].sha256,
                answers_sha256=self._columns[3].sha256 if len(self._columns) > 3 else "",
            )
        )

    def finish(self, left_out: LeftOut) -> None:
        """Write file names, tokenizer and manifest."""
        files = json.dumps(list(self.files)).encode()
        (self.folder / manifest.FILES).write_bytes(files)
        (self.folder / manifest.TOKENIZER).write_bytes(self.tokenizer.serialize())
        template = b"" if self.chat is None else chat_templates.serialized(self.chat.template)
        if template:
            (self.folder / manifest.TEMPLATE).write_bytes(template)
        lines = b"".join(self._prompts)
        if lines:
            (self.folder / manifest.PROMPTS).write_bytes(lines)
        Manifest(
            tokenizer=self.tokenizer.digest,
            vocab=self.tokenizer.size,
            dtype=self.dtype.name,
            documents=sum(shard.documents for shard in self.shards),
            tokens=sum(shard.tokens for shard in self.shards),
            bytes=self.totals["bytes"],
            left_out=dict(sorted(left_out.items())),
            first_left_out=dict(sorted(left_out.first.items())),
            unknown=self.totals["unknown"],
            files_sha256=hashlib.sha256(files).hexdigest(),
            shards=tuple(self.shards),
            weights=tuple(self.weights),
            template=hashlib.sha256(template).hexdigest() if template else "",
            figures={} if self.chat is None else dict(self.figures),
            answers="" if self.chat is None else self.chat.answers,
            prompts_sha256=hashlib.sha256(lines).hexdigest() if lines else "",
        ).write(self.folder)


def encode_texts(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[Encoded]:
    """Yield the ids of each text."""
    waiting = deque[Document]()

    def texts() -> Iterator[str]:
        for document in documents:
            waiting.append(document)
            yield document.text

    for parts in long_text.encode(tokenizer, texts()):
        yield Encoded(waiting.popleft(), parts)


def _bytes(text: str) -> int:
    """Return the UTF-8 bytes of a text without copying it as a whole."""
    return sum(len(text[start : start + 2**20].encode()) for start in range(0, len(text), 2**20))
