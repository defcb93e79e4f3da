"""Paths on an object store, with the methods of `etils.epath` that checkpoints use.

A request is repeated with growing waits, because a run must outlive a store that is away for some
seconds. The last error becomes one of jaxlm, never an OSError: a store that does not answer must
not look like a damaged checkpoint.
"""

import contextlib
import io
import posixpath
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from jaxlm.core.errors import FULL, InputMissing, JaxlmError, NotWritable, SaveFailed
from jaxlm.data import stores

TRIES, WAIT_SECONDS = 3, 2.0  # the wait doubles after each try
_QUOTA = re.compile(r"quota|storage ?(is )?full|insufficient storage", re.I)
# Class names of missing credentials, in the libraries behind fsspec.
_NO_CREDENTIALS = re.compile(r"credential|anonymous", re.I)
BLOCK_BYTES = 16 << 20  # of one request
_LOGIN = {
    "s3": "aws configure    # or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "gs": "gcloud auth application-default login",
}
_CREATE = {"s3": "aws s3 mb", "gs": "gcloud storage buckets create"}
_T = TypeVar("_T")


class ObjectPath:
    """An object, or the common prefix of several, by its URL."""

    def __init__(self, url: str, store: Any = None):
        self._url = url.rstrip("/")
        self._store = store or open_store(self._url)

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self._url}/{name}", self._store)

    def joinpath(self, *names: str) -> "ObjectPath":
        """Return the path below this one."""
        return self / "/".join(names)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self._url)

    @property
    def parent(self) -> "ObjectPath":
        """The path without its last part."""
        return ObjectPath(posixpath.dirname(self._url), self._store)

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return self._reading(lambda: self._store.isfile(self._url))

    def names(self) -> list[str]:
        """Return the parts that follow this prefix, each once, sorted."""
        with contextlib.suppress(FileNotFoundError):
            listed = self._reading(lambda: self._store.ls(self._url, detail=False))
            paths = {each.rstrip("/") for each in listed} - {self._store._strip_protocol(self._url)}
            return sorted(map(posixpath.basename, paths))
        return []

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object below this prefix, by the path relative to it."""
        with contextlib.suppress(FileNotFoundError):
            top = self._store._strip_protocol(self._url) + "/"
            listed = self._reading(lambda: self._store.find(self._url, detail=True))
            return {
                path.removeprefix(top): int(info["size"])
                for path, info in sorted(listed.items())
                if path.startswith(top)
            }
        return {}

    def size(self) -> int:
        """Return the bytes of the object. Raises FileNotFoundError."""
        return int(self._reading(lambda: self._store.info(self._url))["size"])

    def modified(self) -> float:
        """Return when the object was written, in seconds since 1970. Raises FileNotFoundError."""
        return float(self._reading(lambda: self._store.modified(self._url)).timestamp())

    def read_bytes(self) -> bytes:
        """Return the whole object. Raises FileNotFoundError."""
        return self._reading(lambda: self._store.cat_file(self._url))

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[Any]:
        """Yield a reader of the object whose reads are repeated. Raises FileNotFoundError."""
        assert mode == "rb"
        yield io.BufferedReader(_Reader(self, self.size()), BLOCK_BYTES)

    def read_range(self, start: int, end: int) -> bytes:
        """Return bytes [start, end) of the object. Raises FileNotFoundError."""
        return self._reading(lambda: self._store.cat_file(self._url, start=start, end=end))

    def write_bytes(self, content: bytes) -> None:
        """Create or replace the object, which readers see whole or not at all."""
        self._writing(lambda: self._store.pipe_file(self._url, content))

    def upload(self, file: Any) -> None:
        """Create or replace the object with the contents of a local file."""
        self._writing(lambda: self._store.put_file(str(file), self._url))

    def copy_to(self, target: "ObjectPath") -> None:
        """Copy the object inside the store."""
        self._writing(lambda: self._store.cp_file(self._url, target._url))

    def unlink(self) -> None:
        """Remove the object; one that is missing is no error."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._store.rm_file(self._url)

        self._writing(remove)

    def _reading(self, request: Callable[[], _T]) -> _T:
        return self._requested(request, is_write=False)

    def _writing(self, request: Callable[[], _T]) -> _T:
        return self._requested(request, is_write=True)

    def _requested(self, request: Callable[[], _T], *, is_write: bool) -> _T:
        """Return the result of a request; repeat it unless its error will not pass by itself."""
        for number in range(TRIES):
            try:
                return request()
            except FileNotFoundError as error:
                if is_write:  # the bucket is missing
                    _fail(self._url, error, is_write=True)
                raise
            except Exception as error:  # errors of stores have no common base
                is_final = isinstance(error, PermissionError) or _is_full(error)
                if is_final or _NO_CREDENTIALS.search(type(error).__name__) or number == TRIES - 1:
                    _fail(self._url, error, is_write=is_write)
                time.sleep(WAIT_SECONDS * 2**number)
        raise AssertionError


class _Reader(io.RawIOBase):
    """Reads an object in order, by ranges."""

    def __init__(self, path: ObjectPath, size: int):
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        content = self._path.read_range(self._at, end) if end > self._at else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def open_store(url: str) -> Any:
    """Return the file system behind a URL; its answers are never taken from a cache.

    Raises InputMissing if a package for the protocol is not installed.
    """
    return stores.open_store(url, "--config.checkpoint.directory=s3://bucket/prefix", is_live=True)[
        0
    ]


def check_writable(prefix: ObjectPath, name: str) -> None:
    """Write an object below a prefix, read it and remove it, before a run depends on that.

    Raises NotWritable if the store refuses or does not answer, SaveFailed if its quota is full.
    """
    probe = prefix / name
    probe.write_bytes(b"jaxlm")
    try:
        probe.read_bytes()
        prefix.names()
    except (FileNotFoundError, JaxlmError) as error:
        why = getattr(error, "why", "") or stores.described(error)
        raise _refused(NotWritable, str(prefix), why, "list and read objects") from error
    probe.unlink()


def _is_full(error: Exception) -> bool:
    return getattr(error, "errno", None) in FULL or bool(_QUOTA.search(str(error)))


def _fail(url: str, error: Exception, *, is_write: bool) -> NoReturn:
    """Raise the error of jaxlm for one of a store."""
    raise _translated(url, error, is_write=is_write) from error


def _translated(url: str, error: Exception, *, is_write: bool) -> JaxlmError:
    why = stores.described(error)
    kind = NotWritable if is_write else InputMissing
    scheme, _, rest = url.partition("://")
    bucket = f"{scheme}://{rest.partition('/')[0]}"
    if _NO_CREDENTIALS.search(type(error).__name__):
        fix = _LOGIN.get(scheme, f"set the credentials of {scheme}:// in the environment")
        return kind(f"there are no credentials for {bucket}", where=url, why=why, fix=fix)
    if _is_full(error):
        fix = "raise the quota or remove objects, then run the same command again"
        return SaveFailed("the quota of the object store is full", where=url, why=why, fix=fix)
    if isinstance(error, FileNotFoundError):
        fix = f"{_CREATE.get(scheme, 'create')} {bucket}"
        return kind(f"there is no bucket {bucket}", where=url, why=why, fix=fix)
    if isinstance(error, PermissionError):
        return _refused(kind, url, why, "write and remove objects" if is_write else "read objects")
    what = f"the object store did not answer in {TRIES} tries"
    return kind(what, where=url, why=why, fix="the same command again, when the store answers")


def _refused(kind: type[JaxlmError], url: str, why: str, right: str) -> JaxlmError:
    scheme = url.partition("://")[0]
    return kind(
        "the object store refuses access",
        where=url,
        why=f"the credentials must allow to {right}: {why}",
        fix=f"--config.checkpoint.directory={scheme}://another/prefix    # or other credentials",
    )
