"""Data from Python: a copy in the cache, named by the digest of its contents.

It comes from arguments of `jaxlm.train`, or from functions that data.train names. An entry
`python:DIGEST` of data.train or data.validation names a copy. So texts and arrays of a program are
read, packed, resumed and evaluated as files are, and config.json has their identity.

Example:
  >>> is_entry("python:0123"), is_entry("texts/*.txt")
  (True, False)
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core import disk, user_code
from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.data import cache, manifest, tokenizer_file, writer
from jaxlm.data.chat_encoder import Encoded
from jaxlm.data.config import TOKENIZER_FILES, DataConfig
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.tokenizer import Bytes, Tokenizer

PREFIX = "python:"
TEXTS, SHARDS = "texts.jsonl", "shards"
PART = 2**20  # ids that are hashed and written at a time
DIGITS = 32  # of the digest in an entry

# Texts, records or arrays of token ids, a function that returns them, or several by name.
Items = Iterable[Any] | Callable[[], Iterable[Any]]
PythonData = Items | Mapping[str, Items]


def is_entry(entry: str) -> bool:
    """Return whether an entry of data.train or data.validation is data from Python."""
    return entry.startswith(PREFIX)


def located(entry: str) -> Path:
    """Return the file of texts, or the folder of token shards, of an entry.

    Raises InputMissing if the cache has no copy.
    """
    folder = _folder() / entry.removeprefix(PREFIX)
    if (folder / manifest.NAME).is_file():
        return folder
    if (folder / TEXTS).is_file():
        return folder / TEXTS
    raise InputMissing(
        "the data came from Python, and its copy is gone",
        where=entry,
        why=f"there is no {folder}; a copy is in the cache of the user who trained on it",
        fix="call jaxlm.train with the same train_data and validation_data: it makes the copy\n"
        "set JAXLM_CACHE to the cache that has it",
    )


def store(data: PythonData, name: str, config: DataConfig) -> tuple[str, ...]:
    """Write data to the cache, unless it is there, and return the entries of the data section.

    Args:
      data: texts, records, or arrays of token ids, or a mapping of source names to them.
      name: the argument, for errors.
      config: has the field of a record's text, and the tokenizer of token ids.

    Raises:
      ConfigError: if the data is no iterable, cannot be iterated again, or needs a tokenizer.
      DataError: if an item cannot be used, or there is none.
    """
    if not isinstance(data, Mapping):
        return (_stored(data, name, config),)
    named = {source: _stored(each, f"{name}[{source!r}]", config) for source, each in data.items()}
    return tuple(f"{source}={entry}" for source, entry in named.items())


def resolved(config: DataConfig) -> DataConfig:
    """Return the section with the data of the functions that it names, which are called.

    Raises ConfigError if a function cannot be used, and the errors of `store`.
    """
    settings = {"train": config.train, "validation": config.validation}
    entries: dict[str, Any] = {
        name: tuple(_resolved(entry, f"data.{name}", config) for entry in setting)
        for name, setting in settings.items()
        if any(map(user_code.names_function, setting))
    }
    return dataclasses.replace(config, **entries) if entries else config


def _resolved(entry: str, setting: str, config: DataConfig) -> str:
    if not user_code.names_function(entry):
        return entry
    source, equals, _ = entry.rpartition("=")
    name = f"{entry.rpartition(':')[2]}()"
    with user_code.failures_named(entry, setting):
        stored = _stored(user_code.function(entry, setting), name, config, "return ")
    return f"{source}{equals}{stored}"


def is_tokens(entries: Iterable[str]) -> bool:
    """Return whether an entry is arrays of token ids from Python."""
    places = (entry.rpartition("=")[2] for entry in entries)
    return any(located(place).is_dir() for place in places if is_entry(place))


def _stored(data: Items, name: str, config: DataConfig, assign: str = "") -> str:
    """Write data to the cache; `assign` is what precedes a value in the fix of an error."""
    items = _restartable(data, name, assign or f"{name}=")
    first = next(iter(items()), None)
    if first is None:
        fix = f"print(next(iter({name})))    # is its first item"
        raise DataError(f"{name} is empty", where=name, why="it has no item", fix=fix)
    if _is_array(first) or (not isinstance(first, str | Mapping) and _is_number(first)):
        return _stored_ids(items, name, config)
    return _stored_texts(items, name, config.text_key)


def _restartable(data: Any, name: str, assign: str) -> Callable[[], Iterable[Any]]:
    """Return a function that returns an iterator over all items, each time from the first."""
    if isinstance(data, str | bytes | os.PathLike):
        raise ConfigError(
            f"{name} is a single {type(data).__name__}",
            where=name,
            why="it must be a list of texts, an iterable, or arrays of token ids",
            fix=f"{assign}[text]\nsettings={{'data.train': ['texts/*.txt']}}    # names files",
        )
    if _is_array(data):
        return lambda: _documents(np.asarray(data))
    make = data if callable(data) else lambda: data
    one = make()
    if not isinstance(one, Iterable):
        why = f"it is a {type(one).__name__}, which has no items"
        fix = f"{assign}[text, ...]"
        raise ConfigError(f"{name} cannot be iterated", where=name, why=why, fix=fix)
    is_iterator = iter(one) is one
    if iter(one) is iter(make() if is_iterator else one):
        raise ConfigError(
            f"{name} cannot be iterated again",
            where=name,
            why="it is an iterator, which ends for good; a resumed run reads its data again",
            fix=f"{assign}lambda: (text for text in ...)    # a function that returns a new one\n"
            f"{assign}list(...)",
        )
    if _is_array(one):
        return lambda: _documents(np.asarray(one))
    return make if is_iterator else lambda: one


def _documents(array: np.ndarray) -> Iterable[np.ndarray]:
    """Return the documents of an array: itself, or its rows."""
    return [array] if array.ndim < 2 else array


def _stored_texts(items: Callable[[], Iterable[Any]], name: str, key: str) -> str:
    """Write texts and records as JSON lines, whose digest is the name."""
    digest = hashlib.sha256()
    with _kept(digest) as partial, open(partial / TEXTS, "wb") as file:
        for number, item in enumerate(items()):
            line = _line(item, key, f"{name}, item {number}")
            digest.update(line)
            file.write(line)
    return f"{PREFIX}{digest.hexdigest()[:DIGITS]}"


@contextlib.contextmanager
def _kept(digest: Any) -> Iterator[Path]:
    """Yield a new folder, which gets the name of the digest unless there is one."""
    parent = _folder()
    with cache.writing(parent):
        partial = Path(tempfile.mkdtemp(dir=parent, prefix="."))
        try:
            yield partial
            for path in partial.iterdir():
                disk.sync(path)
            target = parent / digest.hexdigest()[:DIGITS]
            try:
                if not target.exists():
                    disk.rename(partial, target)
            except OSError:
                if not target.exists():  # else another process has written the same
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _line(item: Any, key: str, where: str) -> bytes:
    record = {key: item} if isinstance(item, str) else item
    if not isinstance(record, Mapping):
        why = f"it is a {type(item).__name__}; a text, a dict of a record or an array is an item"
        fix = "str(item)"
        if isinstance(item, bytes):
            fix = 'item.decode("utf-8")'
        elif item is None:
            fix = "[item for item in data if item is not None]"
        raise DataError("an item is no text", where=where, why=why, fix=fix)
    try:
        return json.dumps(dict(record)).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            "a record is no JSON",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix=f"{{{key!r}: item[{key!r}]}}    # the fields that are read, as texts and lists",
        ) from error


def _stored_ids(items: Callable[[], Iterable[Any]], name: str, config: DataConfig) -> str:
    """Write token ids as shards, named by the digest of tokenizer, lengths and ids."""
    tokenizer = _tokenizer(config, name)
    sizes, digest = tokenizer.token_bytes, hashlib.sha256(tokenizer.digest.encode())

    def encoded() -> Iterator[Encoded]:
        for number, item in enumerate(items()):
            ids = _inner(_checked(item, tokenizer, f"{name}, item {number}"), tokenizer)
            digest.update(f"{len(ids)};".encode())
            parts = [ids[start : start + PART] for start in range(0, len(ids), PART)]
            size = 0
            for part in parts:
                digest.update(part.astype("<u4").tobytes())
                size += int(sizes[part].sum())
            yield Encoded(Document("", name, number + 1), parts, bytes=size)

    with _kept(digest) as partial:
        folder, counts = partial / SHARDS, LeftOut()
        writer.write(folder, (), tokenizer, counts, name=name, encoded=encoded())
        for path in folder.iterdir():
            path.rename(partial / path.name)
        folder.rmdir()
    return f"{PREFIX}{digest.hexdigest()[:DIGITS]}"


def _tokenizer(config: DataConfig, name: str) -> Tokenizer:
    kind = config.tokenizer
    if kind == "bytes":
        return Bytes()
    if kind.endswith(TOKENIZER_FILES):
        return tokenizer_file.read(kind)
    raise ConfigError(
        "token ids need the tokenizer that made them",
        where="data.tokenizer",
        why=f"{name} has token ids, and {kind} is trained on text",
        fix="settings={'data.tokenizer': 'runs/base/tokenizer'}    # or a tokenizer.json, bytes",
    )


def _checked(item: Any, tokenizer: Tokenizer, where: str) -> np.ndarray:
    """Return an item as a vector of ids of the tokenizer."""
    ids = np.asarray(item)
    why = ""
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        why = f"it is an array of {ids.dtype} with {ids.ndim} axes; ids are integers with one"
    elif len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.size:
        why = f"it has ids from {ids.min()} to {ids.max()}, the tokenizer 0 to {tokenizer.size - 1}"
    if why:
        fix = "settings={'data.tokenizer': 'runs/base/tokenizer'}    # that made the ids"
        raise DataError("an item is no document of token ids", where=where, why=why, fix=fix)
    return ids


def _inner(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return ids without those around each document, which the shards add to every document."""
    before, after = tokenizer.before, tokenizer.after
    if before and tuple(ids[: len(before)].tolist()) == before:
        ids = ids[len(before) :]
    if after and tuple(ids[len(ids) - len(after) :].tolist()) == after:
        ids = ids[: len(ids) - len(after)]
    return ids


def _is_array(item: Any) -> bool:
    return hasattr(item, "__array__") and getattr(item, "ndim", 0) > 0


def _is_number(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and isinstance(item[0], int | np.integer)


def _folder() -> Path:
    """Return the folder of the copies, which exists."""
    return cache.folder(cache.default(), "python").parent
