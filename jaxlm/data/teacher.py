"""Stored distributions of a teacher: its likeliest ids behind each id of token shards.

A folder has `teacher.json`, and a folder for each set of token shards, named by their digest, with
`top-00000.bin` and `checks-00000.bin`, the CRC-32 of its blocks, for each shard. A row of `top` is
that of the id at the same place of `tokens`: K ids, their log-probabilities, that of all other ids
together, and the teacher's loss on the next id. Rows of the last id of a document are 0.

Files are written in any order of rows and closed by `finish`, so that a pass can be continued.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core import disk
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data.blocks import BlockReader, BlockWriter, Damage
from jaxlm.data.shards import AnyShards, TokenShards

VERSION = 1
NAME = "teacher.json"
COLUMNS = "log_p", "tail", "nll"
MAX_BYTES = 2**24  # of teacher.json
EXCESS = 0.02  # of the mass of a row over 1, by rounding to float16
OPEN_SHARDS = 200
PIECE = 2**22  # bytes that are hashed at a time
top_name = "top-{:05d}.bin".format
checks_name = "checks-{:05d}.bin".format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of the teacher and of its pass over the data."""

    run: str  # directory, for people
    step: int
    weights: str  # digest of the step's files
    tokenizer: str  # sha256
    vocab: int  # ids of the model
    top: int  # ids of a row
    temperature: float
    sequence: int  # most ids that the teacher saw before a target
    passes: dict[str, Any]  # what else determines the bits: precision, mesh, rows of a batch, order

    @property
    def dtype(self) -> np.dtype:
        """Type of a row."""
        ids = "<u2" if self.vocab <= 2**16 else "<u4"
        columns = [("ids", ids, (self.top,)), ("log_p", "<f2", (self.top,))]
        return np.dtype([*columns, ("tail", "<f2"), ("nll", "<f2")])


def most_ids(vocab: int) -> int:
    """Return the default number of ids of a row, which then has at most 300 bytes."""
    return min(vocab, 64 if vocab <= 2**16 else 32)


@functools.lru_cache(1024)
def key(shards: TokenShards) -> str:
    """Return the name of the folder of some token shards."""
    return hashlib.sha256("".join(shards.manifest.digests).encode()).hexdigest()[:16]


class StoredTeacher:
    """The rows of a finished folder, by document and position. Each read is checked."""

    def __init__(self, folder: Path, facts: Facts, sets: dict[str, list[dict[str, Any]]]):
        self.folder, self.facts, self.sets = folder, facts, sets
        self.dtype = facts.dtype
        self._readers = functools.lru_cache(OPEN_SHARDS)(self._opened)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTeacher, (self.folder, self.facts, self.sets)  # a worker opens the files

    @classmethod
    def open(cls, folder: Path) -> "StoredTeacher":
        """Read the facts; check that every file has its size.

        Raise InputMissing if there is no such folder, DataError if it is damaged.
        """
        path = folder / NAME
        content = disk.read_json(
            path,
            MAX_BYTES,
            "the stored teacher",
            missing=f"find . -name {NAME}    # folders that `jaxlm teach` has written",
            damaged="write it again with `jaxlm teach`",
        )
        try:
            digest = content.pop("sha256")
            if content["version"] != VERSION or digest != _digest(content):
                raise ValueError("its version or its digest differs from what was written")
            opened = cls(folder, Facts(**content["facts"]), content["sets"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise _damaged(path, why) from error
        for name, shards in opened.sets.items():
            for number, shard in enumerate(shards):
                _check_size(folder / name / top_name(number), shard["size"])
        return opened

    @property
    def digest(self) -> str:
        """Digest of all rows, which a run's data depends on."""
        return _digest({"facts": dataclasses.asdict(self.facts), "sets": self.sets})

    def check(self, shards: AnyShards, tokenizer: str, vocab: int, temperature: float) -> None:
        """Raise ConfigError if the rows are not those of a run.

        Args:
          shards: token shards of the run.
          tokenizer: digest of its tokenizer.
          vocab: number of ids of its model.
          temperature: of its objective.
        """
        facts = self.facts
        if facts.tokenizer != tokenizer:
            raise ConfigError(
                "the stored teacher has another tokenizer than the data",
                where=f"objective.stored = {self.folder}",
                why=f"its digest is {facts.tokenizer[:12]}, that of the data {tokenizer[:12]}",
                fix=f"--config.data.tokenizer={shlex.quote(f'{facts.run}/tokenizer')}",
            )
        if facts.vocab != vocab:
            raise ConfigError(
                "the vocabulary of the model differs from that of the stored teacher",
                where="model.vocab",
                why=f"the model has {vocab} ids and the teacher {facts.vocab}",
                fix=f"--config.model.vocab={facts.vocab}",
            )
        if facts.temperature != temperature:
            raise ConfigError(
                f"the stored teacher has the temperature {facts.temperature:g}",
                where="objective.temperature",
                why=f"the distributions are wanted at {temperature:g}, and ids that are not stored "
                "have one probability together",
                fix=f"--config.objective.temperature={facts.temperature:g}",
            )
        for part in shards.folders:
            if key(part) not in self.sets:
                raise ConfigError(
                    "the stored teacher has not read the training data",
                    where=f"objective.stored = {self.folder}",
                    why=f"it has no rows for {part.source}",
                    fix="write another one with `jaxlm teach` and the config of this run",
                )

    def read(self, shards: AnyShards, document: int, start: int, count: int) -> np.ndarray:
        """Return `count` rows of a document from a position, see `Facts.dtype`.

        Raise DataError if the bytes differ from what was written, or are no distributions.
        """
        part, number, first = shards.place(document)
        name, size = key(part), self.dtype.itemsize
        try:
            reader = self._readers(name, number)
            data = reader.read((first + start) * size, (first + start + count) * size)
        except Damage as damage:
            raise _damaged(damage.path, damage.why) from damage
        rows = np.frombuffer(data, self.dtype)
        if why := problem(rows, self.facts.vocab):
            where = f"{self.folder / name / top_name(number)}, document {document}"
            raise _damaged(where, why)
        return rows

    def _opened(self, name: str, number: int) -> BlockReader:
        path, shard = self.folder / name / top_name(number), self.sets[name][number]
        content = (self.folder / name / checks_name(number)).read_bytes()
        if hashlib.sha256(content).hexdigest() != shard["checks"]:
            raise Damage(path.with_name(checks_name(number)), "its sha256 differs")
        return BlockReader(path, shard["size"], np.frombuffer(content, "<u4"))


def problem(rows: np.ndarray, vocab: int) -> str:
    """Return the reason why rows are no distributions; empty if they are."""
    if len(rows) and (largest := int(rows["ids"].max())) >= vocab:
        return f"it has the id {largest}, past the end of the vocabulary of {vocab}"
    log_p, tail = rows["log_p"].astype(np.float32), rows["tail"].astype(np.float32)
    mass = np.exp(log_p).sum(-1) + np.exp(tail)
    if len(rows) and not (worst := float(mass.max())) <= 1 + EXCESS:
        return f"a distribution has the mass {worst:.3f}"
    return ""


class RowWriter:
    """Write the rows of one set of token shards, in any order.

    Args:
      folder: folder of the set, which exists if its pass was interrupted.
      shards: the token shards.
      dtype: type of a row.

    Raises OSError if the disk is full.
    """

    def __init__(self, folder: Path, shards: TokenShards, dtype: np.dtype):
        self.folder, self._shards, self._dtype = folder, shards, dtype
        folder.mkdir(parents=True, exist_ok=True)
        self._files = []
        for number, shard in enumerate(shards.manifest.shards):
            handle = os.open(folder / top_name(number), os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(handle, shard.tokens * dtype.itemsize)
            self._files.append(handle)

    def write(self, number: int, first: int, rows: np.ndarray) -> None:
        """Write rows from the place of an id in a shard on."""
        data, offset = memoryview(rows.tobytes()), first * self._dtype.itemsize
        while data:
            count = os.pwrite(self._files[number], data, offset)
            data, offset = data[count:], offset + count

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        for handle in self._files:
            os.fsync(handle)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())

    def finish(self) -> list[dict[str, Any]]:
        """Write the checks of blocks; return size and digests of each shard."""
        self.close()
        shards = []
        for number in range(len(self._shards.manifest.shards)):
            path = self.folder / top_name(number)
            writer = BlockWriter(Path(os.devnull))
            with open(path, "rb") as file:
                while data := file.read(PIECE):
                    writer.write(np.frombuffer(data, np.uint8))
            writer.close()
            checks = writer.checks.tobytes()
            disk.replace(self.folder / checks_name(number), checks)
            digest = hashlib.sha256(checks).hexdigest()
            size = path.stat().st_size
            shards.append({"size": size, "sha256": writer.sha256, "checks": digest})
        return shards


def write_facts(folder: Path, facts: Facts, sets: dict[str, list[dict[str, Any]]]) -> None:
    """Write `teacher.json`, with its own digest."""
    content = {"version": VERSION, "facts": dataclasses.asdict(facts), "sets": sets}
    content["sha256"] = _digest(content)
    disk.replace(folder / NAME, json.dumps(content, indent=1).encode())


def _check_size(path: Path, size: int) -> None:
    actual = path.stat().st_size if path.is_file() else None
    if actual != size:
        has = "no file" if actual is None else f"{actual} bytes"
        raise _damaged(path, f"{NAME} lists {size} bytes, the folder has {has}")


def _damaged(where: Path | str, why: str) -> DataError:
    what, fix = (
        "the stored teacher is damaged",
        "restore the file\nwrite it again with `jaxlm teach`",
    )
    return DataError(what, where=str(where), why=why, fix=fix)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
