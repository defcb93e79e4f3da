"""The manifest of a folder of token shards: contents, digests of all files and of itself.

The numbered files have no header: tokens-N.bin holds the ids of the documents in order, and
documents-N.bin a row (end, file, record) for each document. Shards of conversations have
weights-N.bin, a byte for each id, the number of its weight in the manifest's list; for answers with
labels of steps, the weight of the id behind a step is its label, 1 or -1, and 0 elsewhere. Shards
of answers that were compared or judged have answers-N.bin, two float32 for each document: its side,
1 or -1, and the margin of its pair. The files can be mapped into memory; jaxlm reads them with
checks (`data.blocks`).
"""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core import disk
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import formats
from jaxlm.data.blocks import BLOCK

FORMAT_VERSION = 2
NAME, TOKENIZER, FILES = "manifest.json", "tokenizer", "files.json"
TEMPLATE = "chat_template.json"
PROMPTS = "prompts.jsonl"  # text, answer and info of each document of prompts
DTYPES = "uint16", "uint32"
DOCUMENT_BYTES = 3 * 8  # end of the document, number of its file, number of its record
ANSWER_BYTES = 2 * 4  # side of an answer, margin of its pair
MAX_COUNT = 2**48  # limit of every count
MAX_WEIGHTS = 2**8  # different weights of a folder
# Names of the files of a shard by its number: ids, ends and origins of documents, weights of
# conversations, judgments of answers, block checks.
tokens_name = "tokens-{:05d}.bin".format
documents_name = "documents-{:05d}.bin".format
weights_name = "weights-{:05d}.bin".format
answers_name = "answers-{:05d}.bin".format
checks_name = "checks-{:05d}.bin".format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """Counts and digests of one shard."""

    tokens: int
    documents: int
    largest_id: int
    tokens_sha256: str
    documents_sha256: str
    checks_sha256: str
    weights_sha256: str = ""
    answers_sha256: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Counts and digests of a folder of shards. Files are numbered, not named."""

    tokenizer: str  # sha256 of the tokenizer
    vocab: int
    dtype: str
    documents: int
    tokens: int  # ids, including bos and eos of each document
    bytes: int  # of text
    left_out: dict[str, int]  # number of documents by reason
    unknown: int  # characters without an id
    files_sha256: str
    shards: tuple[Shard, ...]
    format_version: int = FORMAT_VERSION
    weights: tuple[float, ...] = ()  # the loss weights of conversations; empty for text
    template: str = ""  # sha256 of the chat template
    figures: dict[str, int] = dataclasses.field(default_factory=dict)  # turns, trained tokens
    first_left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # places, by reason
    answers: str = ""  # pairs, of two documents each, labeled or steps; empty for other data
    prompts_sha256: str = ""  # of the file of prompts; empty for other data

    def counted(self, reason: str) -> str:
        """Return the documents left out for a reason, and the place of the first, if known."""
        return formats.counted(self.left_out[reason], reason, self.first_left_out.get(reason))

    @property
    def trained(self) -> int:
        """Number of tokens with a loss weight: of a text all but the first of each document."""
        return self.figures.get("trained_tokens", self.tokens - self.documents)

    @property
    def digests(self) -> list[str]:
        """sha256 of the files of each shard, which identify the shards."""
        files = [
            (each.tokens_sha256, each.documents_sha256, each.weights_sha256, each.answers_sha256)
            for each in self.shards
        ]
        weights = [str(weight) for weight in self.weights]
        prompts = [self.prompts_sha256] if self.prompts_sha256 else []
        return [digest for each in files for digest in each if digest] + weights + prompts

    def files(self, number: int) -> dict[str, tuple[int, str]]:
        """Return the size in bytes and sha256 of each file of a shard, by name."""
        shard = self.shards[number]
        width = np.dtype(self.dtype).itemsize
        files = {
            tokens_name(number): (shard.tokens * width, shard.tokens_sha256),
            documents_name(number): (shard.documents * DOCUMENT_BYTES, shard.documents_sha256),
        }
        if self.weights:
            files[weights_name(number)] = (shard.tokens, shard.weights_sha256)
        if self.answers:
            size = shard.documents * ANSWER_BYTES
            files[answers_name(number)] = (size, shard.answers_sha256)
        blocks = sum(-(-size // BLOCK) for size, _ in files.values())
        return files | {checks_name(number): (4 * blocks, shard.checks_sha256)}

    def write(self, folder: Path) -> None:
        """Write the manifest, with its own digest as the last field."""
        content = dataclasses.asdict(self)
        content["sha256"] = _digest(content)
        disk.replace(folder / NAME, json.dumps(content, indent=1).encode())


def read(folder: Path) -> Manifest:
    """Return the manifest in a folder.

    Raise InputMissing if there is no manifest. Raise DataError if it is damaged, or has another
    format version.
    """
    path = folder / NAME
    if not path.exists():
        what = "a folder of token shards has no manifest"
        why = "manifest.json lists the shards, their tokenizer and their digests"
        raise InputMissing(what, where=str(path), why=why, fix=f"find . -name {NAME}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
        if version == FORMAT_VERSION:
            return _parsed(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = "jaxlm cannot read a shard manifest"
        why = f"{type(error).__name__}: {error}"
        raise DataError(what, where=str(path), why=why, fix="write the shards again") from error
    what = f"token shards have the format version {version}"
    why = f"this jaxlm reads version {FORMAT_VERSION}"
    raise DataError(what, where=str(path), why=why, fix="write the shards again with this jaxlm")


def _parsed(content: dict[str, Any]) -> Manifest:
    if content.pop("sha256") != _digest(content):
        raise ValueError("its sha256 differs: it changed after writing")
    shards = tuple(Shard(**entry) for entry in content.pop("shards"))
    weights = tuple(map(float, content.pop("weights", ())))
    manifest = Manifest(shards=shards, weights=weights, **content)
    sections: tuple[Manifest | Shard, ...] = (manifest, *shards)
    for section in sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if field.type is int and not (type(value) is int and 0 <= value < MAX_COUNT):
                raise ValueError(f"{field.name} is {value!r}")
            if field.type is str and not isinstance(value, str):
                raise TypeError(f"{field.name} is {value!r}")
    for counts in (manifest.left_out, manifest.figures):
        if any(type(count) is not int for count in counts.values()):
            raise ValueError(f"a count of {counts!r} is no integer")
    if any(not isinstance(place, str) for place in manifest.first_left_out.values()):
        raise TypeError(f"first_left_out is {manifest.first_left_out!r}")
    least = -1 if manifest.answers == "steps" else 0
    if len(weights) > MAX_WEIGHTS or not all(least <= weight < math.inf for weight in weights):
        raise ValueError(f"its weights are {weights[:3]}")
    if manifest.dtype not in DTYPES:
        raise ValueError(f"dtype {manifest.dtype!r} is none of {', '.join(DTYPES)}")
    for name in ("documents", "tokens"):
        if getattr(manifest, name) != sum(getattr(shard, name) for shard in shards):
            raise ValueError(f"{name} is not the sum over the shards")
    if not manifest.documents:
        raise ValueError("it holds no document")
    if (largest := max(shard.largest_id for shard in shards)) >= manifest.vocab:
        raise ValueError(
            f"its largest id is {largest}, past the end of its vocabulary of {manifest.vocab}"
        )
    return manifest


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
