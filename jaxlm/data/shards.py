"""Token shards: ids of whole documents, with a manifest and a check of every read.

A folder holds `tokens-00000.bin` (ids, uint16 or uint32, every document as bos, tokens, eos),
`documents-00000.bin` (int64 rows: end of the document in its shard, number of its file, number of
its record), `checks-00000.bin` (CRC-32 of each block of the first, then of the second),
`files.json`, the tokenizer file, and `manifest.json`, which is written last. Conversations have
`weights-00000.bin` (a byte for each id, checked behind the documents) and their template too, and
answers that were compared or judged `answers-00000.bin`.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import chat_templates, formats, manifest, prompts, tokenizer_file
from jaxlm.data.blocks import BLOCK, BlockReader, Damage
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.manifest import Manifest
from jaxlm.data.prompts import Prompt
from jaxlm.data.tokenizer import Tokenizer

OPEN_SHARDS = 200  # two or three open files each; the default limit of a process is 1024
DOCUMENT_COLUMNS = manifest.DOCUMENT_BYTES // 8
SUMMED = "documents", "tokens", "bytes", "unknown"  # counts of a manifest
REPAIR = "restore the file\nremove the folder and write the shards again"


class DamagedShard(DataError):
    """A document in a token shard differs from what was written."""


class _Numbered(abc.ABC):
    """Documents that are numbered across the parts that hold them."""

    def __init__(self, folder: Path, manifest: Manifest, documents: list[int]):
        self.folder, self.manifest = folder, manifest
        self._first_document = np.cumsum([0, *documents])

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.manifest.documents

    @property
    @abc.abstractmethod
    def source(self) -> str:
        """The files of the documents and the folder of their tokens, for errors."""

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Return the ids in each of the documents `start` to `stop`, including bos and eos; int64.

        Raise DataError if the index of documents is damaged.
        """
        out = []
        for part, (first, end) in enumerate(itertools.pairwise(self._first_document.tolist())):
            low, high = max(start, first), min(stop, end)
            if low < high:
                out.append(self._lengths(part, low - first, high - first))
        return np.concatenate(out) if out else np.zeros(0, np.int64)

    @abc.abstractmethod
    def _lengths(self, part: int, low: int, high: int) -> np.ndarray: ...

    def _locate(self, document: int) -> tuple[int, int]:
        """Return the part of a document, and its number there."""
        part = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return part, document - int(self._first_document[part])


class TokenShards(_Numbered):
    """A folder of token shards; documents are read on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__(folder, manifest, [shard.documents for shard in manifest.shards])
        self._dtype = np.dtype(manifest.dtype)
        # A damaged byte is found by its check; 256 entries take every value.
        self._weights = np.resize(np.array([*manifest.weights, 0.0], np.float32), 256)
        self._readers = functools.lru_cache(OPEN_SHARDS)(self._opened)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.folder, self.manifest)  # a worker process reopens the files

    @classmethod
    def open(cls, folder: Path) -> "TokenShards":
        """Read the manifest; check that every file exists inside the folder with the right size.

        Raise DataError if the folder is incomplete.
        """
        content = manifest.read(folder)
        opened = cls(folder, content)
        inside = folder.resolve()
        for number in range(len(content.shards)):
            for name, (size, _) in content.files(number).items():
                path = folder / name
                if path.resolve() != inside / name:
                    raise DataError(
                        "a token shard links to a file outside its folder",
                        where=str(path),
                        why=f"it is a link to {path.resolve()}",
                        fix="copy the file here\nlink the whole folder",
                    )
                actual = path.stat().st_size if path.is_file() else None
                if actual != size:
                    what = "a token shard is damaged"
                    why = (
                        f"the manifest lists {size} bytes, the folder has "
                        f"{'no file' if actual is None else actual}"
                    )
                    raise DataError(what, where=str(path), why=why, fix=REPAIR)
            opened._checks(number)
        opened._content(manifest.FILES, content.files_sha256)
        opened._content(manifest.TOKENIZER, content.tokenizer)
        if content.template:
            opened._content(manifest.TEMPLATE, content.template)
        return opened

    def verify(self) -> None:
        """Compare every byte with the manifest's digests. Raise DataError at a difference."""
        for number in range(len(self.manifest.shards)):
            for name, (_, digest) in self.manifest.files(number).items():
                with open(self.folder / name, "rb") as file:
                    _compare(self.folder / name, hashlib.file_digest(file, "sha256"), digest)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the ids. Raise DataError if its size differs from the manifest."""
        path = self.folder / manifest.TOKENIZER
        tokenizer = tokenizer_file.load(
            self._content(manifest.TOKENIZER, self.manifest.tokenizer), str(path)
        )
        if tokenizer.size != self.manifest.vocab:
            what = "the manifest of token shards does not match their tokenizer"
            where = str(self.folder / manifest.NAME)
            why = (
                f"the manifest lists {self.manifest.vocab} ids, the tokenizer has {tokenizer.size}"
            )
            raise DataError(what, where=where, why=why, fix="write the shards again")
        return tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """The template of conversations; None for text."""
        if not self.manifest.template:
            return None
        content = self._content(manifest.TEMPLATE, self.manifest.template)
        return chat_templates.parsed(content, str(self.folder / manifest.TEMPLATE))

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids `start` to `stop` of a document, read-only.

        Raise Damaged if the bytes differ from what was written. Raise DataError if an id is outside
        the vocabulary.
        """
        shard, row = self._locate(document)
        width = self._dtype.itemsize
        try:
            first = self._first_id(shard, row)
            data = self._readers(shard)[0].read((first + start) * width, (first + stop) * width)
        except Damage as damage:
            raise self._damaged(damage, document, row) from damage
        ids = np.frombuffer(data, self._dtype)
        # For ids outside the table XLA silently clamps or gives NaN.
        if len(ids) and ids.max() >= self.manifest.vocab:
            position = int(np.argmax(ids >= self.manifest.vocab))
            raise DataError(
                f"token id {ids[position]} is outside the vocabulary of {self.manifest.vocab}",
                where=f"{self.folder / manifest.tokens_name(shard)}, {self._named(document, row)}, "
                f"position {start + position}",
                why="such an id has no embedding; another tokenizer than that in the folder made "
                "the shards",
                fix="write the shards again with the tokenizer that the model uses",
            )
        return ids

    def weights(self, document: int, start: int, stop: int) -> np.ndarray | float:
        """Return the loss weights of the ids `start` to `stop` of a document; 1 for text.

        Raise Damaged if the bytes differ from what was written.
        """
        if not self.manifest.weights:
            return 1.0
        shard, row = self._locate(document)
        try:
            first = self._first_id(shard, row)
            data = self._readers(shard)[2].read(first + start, first + stop)
        except Damage as damage:
            raise self._damaged(damage, document, row) from damage
        return self._weights[np.frombuffer(data, np.uint8)]

    def place(self, document: int) -> tuple["TokenShards", int, int]:
        """Return the folder of a document, the number of its shard, and of its first id there.

        Raise Damaged if the index of documents differs from what was written.
        """
        shard, row = self._locate(document)
        try:
            return self, shard, self._first_id(shard, row)
        except Damage as damage:
            raise self._damaged(damage, document, row) from damage

    @property
    def folders(self) -> tuple["TokenShards", ...]:
        """The folders that hold the documents: this one."""
        return (self,)

    @property
    def source(self) -> str:
        """The files of the documents and the folder of their tokens, for errors."""
        try:
            first, *others = self._files
        except (ValueError, DataError):  # no names, or damaged
            return str(self.folder)
        more = f" and {len(others)} more file{'s' * (len(others) > 1)}" if others else ""
        return f"{first}{more}, tokenized in {self.folder}"

    @functools.cached_property
    def answers(self) -> np.ndarray:
        """Side of the answer of each document, 1 or -1, and margin of its pair: float32 [N, 2].

        Raise Damaged if the bytes differ from what was written.
        """
        columns = []
        for number, shard in enumerate(self.manifest.shards):
            try:
                data = self._readers(number)[3].read(0, shard.documents * manifest.ANSWER_BYTES)
            except Damage as damage:
                raise self._damaged(damage, int(self._first_document[number]), 0) from damage
            columns.append(np.frombuffer(data, "<f4").reshape(-1, 2))
        return np.concatenate(columns)

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """Text, answer and info of each document of prompts; empty for other data.

        Raise DataError if the file differs from what was written.
        """
        digest = self.manifest.prompts_sha256
        return prompts.read(self._content(manifest.PROMPTS, digest)) if digest else []

    def origin(self, document: int) -> tuple[str, int]:
        """Return the file of a document and the number of its line or row there, see `Document`.

        Raise DataError if the index of documents is damaged.
        """
        shard, row = self._locate(document)
        try:
            return self._origin(shard, row)
        except Damage as damage:
            raise self._damaged(damage, document, row) from damage

    def _damaged(self, damage: Damage, document: int, row: int) -> "DamagedShard":
        where = f"{damage.path}, {self._named(document, row)}"
        fix = (
            f"jaxlm data check {shlex.quote(str(self.folder))}    # finds all damage\n"
            f"--config.data.damaged=skip    # trains without unreadable tokens\n{REPAIR}"
        )
        return DamagedShard("a token shard is damaged", where=where, why=damage.why, fix=fix)

    def _named(self, document: int, row: int) -> str:
        """Return the name of a document in errors, even if its origin is unreadable."""
        try:
            shard, _ = self._locate(document)
            file, record = self._origin(shard, row)
            return f"document {row} ({formats.place(file, record)})"
        except (Damage, DataError):
            return f"document {row}"

    def _origin(self, shard: int, row: int) -> tuple[str, int]:
        _, file, record = self._index(shard, row, row + 1)[0].tolist()
        if not 0 <= file < len(self._files):
            path = self.folder / manifest.documents_name(shard)
            raise Damage(path, f"it refers to file {file} of {len(self._files)}")
        return self._files[file], record

    @functools.cached_property
    def _files(self) -> list[str]:
        return list(map(str, json.loads(self._content(manifest.FILES, self.manifest.files_sha256))))

    def _content(self, name: str, digest: str) -> bytes:
        """Read a small file. Raise DataError if its digest differs."""
        path = self.folder / name
        content = path.read_bytes() if path.is_file() else b""
        _compare(path, hashlib.sha256(content), digest)
        return content

    def _lengths(self, part: int, low: int, high: int) -> np.ndarray:
        first = max(low - 1, 0)
        try:
            ends = self._index(part, first, high)[:, 0]
        except Damage as damage:
            document = int(self._first_document[part]) + low
            raise self._damaged(damage, document, low) from damage
        lengths = np.diff(ends) if low else np.diff(ends, prepend=0)
        if lengths.min() < 2 or ends[-1] > self.manifest.shards[part].tokens:
            what = "the index of a token shard has gaps or overlaps"
            where = f"{self.folder / manifest.documents_name(part)}, documents {low} to {high - 1}"
            why = (
                f"the shortest has {lengths.min()} ids, the last ends at {ends[-1]} of "
                f"{self.manifest.shards[part].tokens}"
            )
            raise DataError(what, where=where, why=why, fix="write the shards again")
        return lengths

    def _index(self, shard: int, low: int, high: int) -> np.ndarray:
        width = manifest.DOCUMENT_BYTES
        data = self._readers(shard)[1].read(low * width, high * width)
        return np.frombuffer(data, "<i8").reshape(-1, DOCUMENT_COLUMNS)

    def _first_id(self, shard: int, row: int) -> int:
        """Return the place of a document's first id in its shard."""
        before = (row - 1) * manifest.DOCUMENT_BYTES
        documents = self._readers(shard)[1]
        return int.from_bytes(documents.read(before, before + 8), "little") if row else 0

    def _opened(self, shard: int) -> list[BlockReader]:
        """Open the files of a shard: ids, documents, weights of conversations, and judgments."""
        checks = self._checks(shard)
        readers, cut = [], 0
        *files, _ = self.manifest.files(shard).items()
        for name, (size, _) in files:
            blocks = -(-size // BLOCK)
            readers.append(BlockReader(self.folder / name, size, checks[cut : cut + blocks]))
            cut += blocks
        return readers

    def _checks(self, shard: int) -> np.ndarray:
        name = manifest.checks_name(shard)
        return np.frombuffer(
            self._content(name, self.manifest.shards[shard].checks_sha256), np.dtype("<u4")
        )


def _compare(path: Path, digest: Any, expected: str) -> None:
    if digest.hexdigest() != expected:
        what = "a file of token shards does not match its digest"
        why = "it changed since it was written, or is missing"
        raise DataError(what, where=str(path), why=why, fix=REPAIR)


class JoinedShards(_Numbered):
    """The documents of several folders in order; all folders must use one tokenizer.

    Raise ConfigError if two folders were made with different tokenizers.
    """

    def __init__(self, parts: tuple[TokenShards, ...]):
        self.parts = parts
        first = parts[0]
        templates = {part.manifest.template: part for part in parts if part.manifest.template}
        if len(templates) > 1:
            one, other, *_ = templates.values()
            raise ConfigError(
                "folders of token shards have different chat templates",
                where=f"{one.folder} and {other.folder}",
                why=f"the digests are {one.manifest.template[:12]} and "
                f"{other.manifest.template[:12]}",
                fix="write the shards again with one --config.data.template",
            )
        for part in parts[1:]:
            if part.manifest.tokenizer != first.manifest.tokenizer:
                raise ConfigError(
                    "folders of token shards have different tokenizers",
                    where=f"{first.folder} and {part.folder}",
                    why=f"the digests are {first.manifest.tokenizer[:12]} and "
                    f"{part.manifest.tokenizer[:12]}",
                    fix="write the others again with "
                    f"--config.data.tokenizer={first.folder / manifest.TOKENIZER}",
                )
        joined = _sum([part.manifest for part in parts])
        super().__init__(first.folder, joined, [part.documents for part in parts])

    def place(self, document: int) -> tuple[TokenShards, int, int]:
        """Return the place of a document, like `TokenShards.place`."""
        part, inner = self._locate(document)
        return self.parts[part].place(inner)

    @property
    def folders(self) -> tuple[TokenShards, ...]:
        """The folders that hold the documents."""
        return self.parts

    @property
    def source(self) -> str:
        """Files and folder of the first part, for errors."""
        return f"{self.parts[0].source}, and {len(self.parts) - 1} more"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return self.parts[0].tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """The template of the first folder with conversations; None for text alone."""
        return next((part.template for part in self.parts if part.manifest.template), None)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return ids of a document, like `TokenShards.read`."""
        part, inner = self._locate(document)
        return self.parts[part].read(inner, start, stop)

    def weights(self, document: int, start: int, stop: int) -> np.ndarray | float:
        """Return loss weights of a document, like `TokenShards.weights`."""
        part, inner = self._locate(document)
        return self.parts[part].weights(inner, start, stop)

    @functools.cached_property
    def answers(self) -> np.ndarray:
        """Side and margin of each document, like `TokenShards.answers`."""
        return np.concatenate([part.answers for part in self.parts])

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """Prompts of all documents, like `TokenShards.prompts`."""
        return [prompt for part in self.parts for prompt in part.prompts]

    def origin(self, document: int) -> tuple[str, int]:
        """Return the file and record of a document, like `TokenShards.origin`."""
        part, inner = self._locate(document)
        return self.parts[part].origin(inner)

    def _lengths(self, part: int, low: int, high: int) -> np.ndarray:
        return self.parts[part].lengths(low, high)


AnyShards = TokenShards | JoinedShards


def open_folders(folders: tuple[Path, ...]) -> AnyShards:
    """Open the token shards in one folder or several.

    Raise DataError if a folder is damaged. Raise ConfigError if their tokenizers differ.
    """
    parts = tuple(map(TokenShards.open, folders))
    return parts[0] if len(parts) == 1 else JoinedShards(parts)


def join(sets: Sequence[AnyShards]) -> JoinedShards:
    """Join shard sets in order. Raise ConfigError if their tokenizers differ."""
    parts = [each.parts if isinstance(each, JoinedShards) else (each,) for each in sets]
    return JoinedShards(tuple(itertools.chain(*parts)))


def _sum(manifests: list[Manifest]) -> Manifest:
    left_out, figures = Counter[str](), Counter[str]()
    first: dict[str, str] = {}
    for each in manifests:
        first = each.first_left_out | first
        left_out.update(each.left_out)
        figures.update(each.figures)
    if figures:
        figures["trained_tokens"] = sum(each.trained for each in manifests)
        for name in {"longest", "longest_pair"} & figures.keys():
            figures[name] = max(each.figures.get(name, 0) for each in manifests)
    names = "".join(manifest.files_sha256 for manifest in manifests)
    prompts = "".join(manifest.prompts_sha256 for manifest in manifests)
    return dataclasses.replace(
        manifests[0],
        **{name: sum(getattr(each, name) for each in manifests) for name in SUMMED},
        left_out=dict(left_out),
        first_left_out=first,
        weights=tuple(dict.fromkeys(w for manifest in manifests for w in manifest.weights)),
        template=next((each.template for each in manifests if each.template), ""),
        figures=dict(figures),
        files_sha256=hashlib.sha256(names.encode()).hexdigest(),
        prompts_sha256=hashlib.sha256(prompts.encode()).hexdigest() if prompts else "",
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
    )
