"""Files in object stores and behind other URLs, through fsspec.

A file is fetched before anything in it is read, so that a connection that breaks is never taken for a file that is damaged.
"""

import errno
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from jaxlm.core import problems
from jaxlm.core.errors import ConfigError, DataError, InputMissing, NotWritable, not_installed
from jaxlm.corpus.config import Recipe
from jaxlm.data.documents import Corpus

TRIES, WAIT_SECONDS = 3, 1.0  # the wait doubles with each
_CHUNK = 2**20
_T = TypeVar("_T")


class Changed(Exception):
    """A file that came or went has another size than it was said to have."""


def is_remote(name: str) -> bool:
    """Whether a pattern or the name of a file is a URL."""
    return "://" in name


def path_in(name: str) -> str:
    """The part of a name whose ending says what the file holds."""
    return urlsplit(name).path if is_remote(name) else name


def find(recipe: Recipe) -> list[tuple[Path, str, int]]:
    """Path, name and bytes of every file of a recipe's source, by name. Of one behind a URL the name is the URL.

    Raises:
      InputMissing: where a pattern matches no file, or a store cannot be asked.
      DataError: where a file is found twice.
    """
    local = tuple(pattern for pattern in recipe.source if not is_remote(pattern))
    corpus = Corpus.find(local, recipe.text_key, "source")
    found = {
        name: (path, name, path.stat().st_size)
        for path, name in zip(corpus.files, corpus.names, strict=True)
    }
    for pattern in filter(is_remote, recipe.source):
        for name, size in _matches(pattern, recipe.source):
            if name in found:
                raise DataError(
                    "a file is listed twice",
                    where="source",
                    why=f"{pattern} finds {name}, as a pattern before it does",
                    fix="patterns that do not overlap",
                )
            found[name] = Path(name), name, size
    return [found[name] for name in sorted(found)]


def fetched(name: str) -> IO[bytes]:
    """The bytes of a file behind a URL, in a temporary file that is gone when it is closed.

    Raises:
      InputMissing: where it cannot be read, after several tries.
      NotWritable: where there is no room for it.
    """
    store, path = open_store(name)

    def fetch() -> IO[bytes]:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            size = store.info(path)["size"]
            with store.open(path, "rb") as source:
                while data := source.read(_CHUNK):
                    _write(copy, data)
            if size is not None and copy.tell() != size:
                raise Changed(f"{copy.tell():,} of {size:,} bytes came")
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return copy

    try:
        return tried(fetch)
    except NotWritable:
        raise
    except Exception as error:  # each store has errors of its own
        raise InputMissing(
            f"a file cannot be read, {TRIES} times",
            where=name,
            why=said(error),
            fix="the same command again: it goes on where it stopped",
        ) from error


def _matches(pattern: str, source: tuple[str, ...]) -> list[tuple[str, int]]:
    plain = tuple(each.rpartition("::")[2] if is_remote(each) else each for each in source)
    store, path = open_store(pattern, problems.flag("source", plain))
    try:
        listed = store.glob(path, detail=True) if _has_magic(path) else {path: store.info(path)}
        found = [
            (store.unstrip_protocol(each), about.get("size") or 0)
            for each, about in listed.items()
            if about["type"] == "file"
        ]
    except FileNotFoundError:
        found = []
    except Exception as error:  # each store has errors of its own
        raise _missing(f"{pattern} cannot be asked for files", said(error)) from error
    if not found:
        raise _missing(f"no file matches {pattern}", "the store has none of this name")
    return found


def _has_magic(path: str) -> bool:
    """Whether a path is a pattern."""
    return any(letter in path for letter in "*?[")


def open_store(url: str, fix: str = "") -> tuple[Any, str]:
    """Return the file system behind a URL, and the path in it.

    Args:
      url: what a user named, with its protocol.
      fix: the flag that names what a chain ends in; by default that of a place to copy to.

    Raises:
      InputMissing: where a package for it is not installed.
      ConfigError: where it is a chain of them.
    """
    protocol = url.partition("://")[0]
    if "::" in url:
        raise ConfigError(
            "a chain of file systems is not followed",
            where=url,
            why="archives are opened by themselves",
            fix=fix or shlex.quote(f"--copy_to={url.rpartition('::')[2]}"),
        )
    try:
        import fsspec
    except ImportError as error:
        raise not_installed("reading URLs", "fsspec", "remote", where=url) from error
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputMissing(
            f"nothing reads {protocol}://",
            where=url,
            why=said(error),
            fix=f"pip install 'fsspec[{protocol}]'",
        ) from error


def tried(what: Callable[[], _T]) -> _T:
    """What a function gives that asks a store, which may fail a few times; the last failure is raised."""
    for number in range(TRIES):
        try:
            return what()
        except NotWritable:
            raise
        except Exception:
            if number == TRIES - 1:
                raise
            time.sleep(WAIT_SECONDS * 2**number)
    raise AssertionError


def _write(copy: IO[bytes], data: bytes) -> None:
    try:
        copy.write(data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotWritable(
            "there is no room for a file that is fetched",
            where=tempfile.gettempdir(),
            why=f"{type(error).__name__}: {error.strerror}",
            fix='export TMPDIR="$PWD/tmp" && mkdir -p "$TMPDIR"    # or another folder on a larger disk',
        ) from error


def said(error: Exception) -> str:
    """What an error of a store says, in a line or so."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def _missing(what: str, why: str) -> InputMissing:
    return InputMissing(what, where="source", why=why, fix="jaxlm config explain source")
