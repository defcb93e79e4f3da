"""Several folders of token shards, read as one."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.manifest import TOKENIZER, Manifest
from jaxlm.data.shards import Shards
from jaxlm.data.tokenizer import Tokenizer


class Joined:
    """The documents of several folders in order; all folders must use one tokenizer.

    Raises:
      ConfigError: if two folders were made with different tokenizers.
    """

    def __init__(self, parts: tuple[Shards, ...]):
        self.parts = parts
        first = parts[0]
        for part in parts[1:]:
            if part.manifest.tokenizer != first.manifest.tokenizer:
                raise ConfigError(
                    "folders of token shards have different tokenizers",
                    where=f"{first.folder} and {part.folder}",
                    why=f"the digests are {first.manifest.tokenizer[:12]} and "
                    f"{part.manifest.tokenizer[:12]}",
                    fix=f"write the others again with "
                    f"--config.data.tokenizer={first.folder / TOKENIZER}",
                )
        self.manifest = _sum([part.manifest for part in parts])
        self._first_document = np.cumsum([0] + [part.documents for part in parts])

    @property
    def folder(self) -> Path:
        """The first folder, for errors."""
        return self.parts[0].folder

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return self.parts[0].tokenizer

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.manifest.documents

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Return the ids in each document, like `Shards.lengths`."""
        out = [
            part.lengths(max(start - first, 0), min(stop - first, part.documents))
            for part, first in zip(self.parts, self._first_document.tolist(), strict=False)
            if start < first + part.documents and first < stop
        ]
        return np.concatenate(out) if out else np.zeros(0, np.int64)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return ids of a document, like `Shards.read`."""
        part, inner = self._locate(document)
        return part.read(inner, start, stop)

    def origin(self, document: int) -> tuple[str, int]:
        """Return the file and record of a document, like `Shards.origin`."""
        part, inner = self._locate(document)
        return part.origin(inner)

    def _locate(self, document: int) -> tuple[Shards, int]:
        number = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return self.parts[number], document - int(self._first_document[number])


AnyShards = Shards | Joined


def open_folders(folders: tuple[Path, ...]) -> AnyShards:
    """Open the token shards in one folder or several.

    Raises:
      DataError: if a folder is damaged.
      ConfigError: if their tokenizers differ.
    """
    parts = tuple(map(Shards.open, folders))
    return parts[0] if len(parts) == 1 else Joined(parts)


def join(sets: Sequence[AnyShards]) -> Joined:
    """Join shard sets in order. Raise ConfigError if their tokenizers differ."""
    return Joined(
        tuple(
            part for each in sets for part in (each.parts if isinstance(each, Joined) else (each,))
        )
    )


def _sum(manifests: list[Manifest]) -> Manifest:
    left_out: Counter[str] = Counter()
    for manifest in manifests:
        left_out.update(manifest.left_out)
    names = "".join(manifest.files_sha256 for manifest in manifests)
    return dataclasses.replace(
        manifests[0],
        documents=sum(manifest.documents for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
        bytes=sum(manifest.bytes for manifest in manifests),
        unknown=sum(manifest.unknown for manifest in manifests),
        left_out=dict(left_out),
        files_sha256=hashlib.sha256(names.encode()).hexdigest(),
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
    )
