"""Files in object stores and behind other URLs, through fsspec.

A file is downloaded whole before it is parsed, so a lost connection never looks like damage.
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

TRIES, WAIT_SECONDS = 3, 1.0  # the wait doubles after each try
_CHUNK = 2**20
_T = TypeVar("_T")


class SizeMismatch(Exception):
    """The size of a transferred file differs from the expected one."""


def is_remote(name: str) -> bool:
    """Return whether a pattern or file name is a URL.

    Example:
      >>> is_remote("s3://bucket/*.gz"), is_remote("raw/*.gz")
      (True, False)
    """
    return "://" in name


def path_in(name: str) -> str:
    """Return the part of a name whose suffix gives the format."""
    return urlsplit(name).path if is_remote(name) else name


def find(recipe: Recipe) -> list[tuple[Path, str, int]]:
    """Return path, name and size of every source file of a recipe, by name; a URL is its own name.

    Raises InputMissing if a pattern matches no file or a store does not answer, DataError if two
    patterns match one file.
    """
    local = tuple(pattern for pattern in recipe.source if not is_remote(pattern))
    corpus = Corpus.find(local, recipe.text_key, "source")
    files = {
        name: (path, name, path.stat().st_size)
        for path, name in zip(corpus.files, corpus.names, strict=True)
    }
    for pattern in filter(is_remote, recipe.source):
        for name, size in _matches(pattern, recipe.source):
            if name in files:
                what = "a file is listed twice"
                why = f"{pattern} matches {name}, as does a pattern before it"
                raise DataError(what, where="source", why=why, fix="patterns that do not overlap")
            files[name] = Path(name), name, size
    return [files[name] for name in sorted(files)]


def fetched(name: str) -> IO[bytes]:
    """Download the file behind a URL into a temporary file, which is deleted when it is closed.

    Raises InputMissing if it cannot be read in several tries, NotWritable if the disk is full.
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
                raise SizeMismatch(f"{copy.tell():,} of {size:,} bytes arrived")
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return copy

    try:
        return tried(fetch)
    except NotWritable:
        raise
    except Exception as error:  # errors of stores have no common base
        raise InputMissing(
            f"a file could not be downloaded in {TRIES} tries",
            where=name,
            why=described(error),
            fix="the same command again: finished work is kept",
        ) from error


def _matches(pattern: str, source: tuple[str, ...]) -> list[tuple[str, int]]:
    plain = tuple(each.rpartition("::")[2] if is_remote(each) else each for each in source)
    store, path = open_store(pattern, problems.flag("source", plain))
    try:
        has_wildcards = any(letter in path for letter in "*?[")
        listed = store.glob(path, detail=True) if has_wildcards else {path: store.info(path)}
        matches = [
            (store.unstrip_protocol(each), info.get("size") or 0)
            for each, info in listed.items()
            if info["type"] == "file"
        ]
    except FileNotFoundError:
        matches = []
    except Exception as error:  # errors of stores have no common base
        raise _missing(f"{pattern} could not be listed", described(error)) from error
    if not matches:
        raise _missing(f"no file matches {pattern}", "the store has none of this name")
    return matches


def open_store(url: str, fix: str = "") -> tuple[Any, str]:
    """Return the file system behind a URL, and the path in it.

    Raises InputMissing if a package for the protocol is not installed, ConfigError if the URL is a
    chain of file systems; `fix` is the flag that mends it, by default `--copy_to` with its end.
    """
    protocol = url.partition("://")[0]
    if "::" in url:
        raise ConfigError(
            "chained file systems are not supported",
            where=url,
            why="archives are opened automatically",
            fix=fix or shlex.quote(f"--copy_to={url.rpartition('::')[2]}"),
        )
    try:
        import fsspec
    except ImportError as error:
        raise not_installed("reading URLs", "fsspec", "remote", where=url) from error
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        what = f"no installed package reads {protocol}://"
        raise InputMissing(
            what, where=url, why=described(error), fix=f"pip install 'fsspec[{protocol}]'"
        ) from error


def tried(request: Callable[[], _T]) -> _T:
    """Return the result of a request to a store; retry a few times, then raise the last error."""
    for number in range(TRIES - 1):
        try:
            return request()
        except NotWritable:
            raise
        except Exception:
            time.sleep(WAIT_SECONDS * 2**number)
    return request()


def _write(copy: IO[bytes], data: bytes) -> None:
    try:
        copy.write(data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "the disk is too full for a download"
        why = f"{type(error).__name__}: {error.strerror}"
        fix = 'export TMPDIR="$PWD/tmp" && mkdir -p "$TMPDIR"    # or a folder on a larger disk'
        raise NotWritable(what, where=tempfile.gettempdir(), why=why, fix=fix) from error


def described(error: Exception) -> str:
    """Return class and message of an error of a store, shortened."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def _missing(what: str, why: str) -> InputMissing:
    return InputMissing(what, where="source", why=why, fix="jaxlm config explain source")
