"""Object stores and web servers, through fsspec: opening, listing, and repeated requests."""

import shlex
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from jaxlm.core.errors import (
    FULL,
    ConfigError,
    InputMissing,
    NotWritable,
    installs,
    not_installed,
)

TRIES, WAIT_SECONDS = 3, 1.0  # the wait doubles after each try
_CHUNK_BYTES = 2**20
# Properties that change with the contents of a file, as file systems of fsspec name them.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "updated"),
    *("mtime", "created"),
)
_T = TypeVar("_T")


class StoredFile(NamedTuple):
    """A file of a store: its URL, bytes (0 if unknown), and version (empty if unknown)."""

    url: str
    size: int
    version: str


def is_url(name: str) -> bool:
    """Return whether a pattern or file name is a URL.

    Example:
      >>> is_url("s3://bucket/*.gz"), is_url("raw/*.gz")
      (True, False)
    """
    return "://" in name


def path_in(name: str) -> str:
    """Return the part of a name whose suffix gives the format."""
    return urlsplit(name).path if is_url(name) else name


def open_store(url: str, fix: str = "", *, is_live: bool = False) -> tuple[Any, str]:
    """Return the file system behind a URL, and the path in it.

    Raises InputMissing if a package for the protocol is not installed, ConfigError if the URL is a
    chain of file systems; `fix` is the flag that mends it, by default `--copy_to` with its end.
    With `is_live` listings are requested each time, not taken from a cache.
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
        return fsspec.core.url_to_fs(url, **({"use_listings_cache": False} if is_live else {}))
    except (ImportError, ValueError) as error:
        what = f"no installed package reads {protocol}://"
        is_web = protocol in ("http", "https")
        install = installs("remote") if is_web else f"pip install 'fsspec[{protocol}]'"
        raise InputMissing(what, where=url, why=described(error), fix=install) from error


class SizeMismatch(Exception):
    """The size of a transferred file differs from the expected one."""


def copy(
    store: Any,
    path: str,
    size: int | None,
    target: IO[bytes],
    full: Callable[[OSError], NotWritable],
    moved: Callable[[int], None] = lambda done: None,
) -> None:
    """Copy a file of a store. Errors of the store pass.

    Args:
      size: expected bytes; None if unknown.
      target: the open copy.
      full: makes the error of a full disk from that of the system.
      moved: called with the bytes copied so far.

    Raises SizeMismatch if another number of bytes arrives.
    """
    with store.open(path, "rb") as source:
        while data := source.read(_CHUNK_BYTES):
            try:
                target.write(data)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise full(error) from error
            moved(target.tell())
    if size is not None and target.tell() != size:
        raise SizeMismatch(f"{target.tell():,} of {size:,} bytes arrived")


def matching(store: Any, path: str) -> list[StoredFile]:
    """Return the files of a store that a path or glob matches; none if there are none.

    Errors of the store pass: they have no common base.
    """
    has_wildcards = any(letter in path for letter in "*?[")
    try:
        listed = store.glob(path, detail=True) if has_wildcards else {path: store.info(path)}
    except FileNotFoundError:
        return []
    return [
        StoredFile(store.unstrip_protocol(each), info.get("size") or 0, _version(info))
        for each, info in listed.items()
        if info["type"] == "file"
    ]


def _version(info: dict[str, Any]) -> str:
    return next((str(info[name]) for name in _VERSIONS if info.get(name)), "")


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


def described(error: Exception) -> str:
    """Return class and message of an error of a store, shortened."""
    return f"{type(error).__name__}: {str(error)[:300]}"
