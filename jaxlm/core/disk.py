"""Local files: durable writes, JSON, and the check of output paths."""

import contextlib
import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing, NotWritable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")  # pathlib keeps one of two slashes


def sync(path: os.PathLike[str]) -> None:
    """Flush a file, or names in a folder; skip what cannot sync, such as URLs. Raises OSError."""
    if "://" in os.fspath(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def rename(source: Any, target: Any) -> None:
    """Rename a file or folder (`pathlib` or `etils.epath`) and flush the name. Raises OSError."""
    source.rename(target)
    for folder in {target.parent, source.parent}:
        sync(folder)


def replace(target: Path, content: bytes) -> None:
    """Replace a file atomically and flush it. On failure raise OSError; the old file stays."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def remove_partial(folder: Path) -> None:
    """Remove the files that killed processes left of `replace`; no process may write the folder."""
    for path in folder.glob(".*.tmp"):
        if path.name.split(".")[-2].isdecimal():
            path.unlink(missing_ok=True)


def check_local(place: str | os.PathLike[str], flag: str) -> None:
    """Raise NotWritable if an output path is a URL, which would become a local folder."""
    text = os.fspath(place)
    if not _URL.match(text):
        return
    scheme, _, rest = text.partition(":")
    local = rest.strip("/").rpartition("@")[2] or "runs/a"  # without user name and password
    what, where = f"{scheme}:// is not a local file system", f"{flag}={text}"
    why = "output files are renamed, appended to and locked, which an object store cannot do"
    raise NotWritable(what, where=where, why=why, fix=f"{flag}={local}")


def read_json(path: Path, max_bytes: int, what: str, *, missing: str, damaged: str) -> Any:
    """Parse a JSON file.

    Raises InputMissing if it does not exist, DataError if it is too large or not JSON.

    Args:
      path: the file.
      max_bytes: size above which the file is not read.
      what: subject of the error, such as "the shard manifest".
      missing, damaged: fix line for a missing file, and for one that is too large or not JSON.
    """
    where = str(path)
    if not path.exists():
        why = "there is no such file"
        raise InputMissing(f"{what} does not exist", where=where, why=why, fix=missing)
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise ValueError(f"it has {size:,} bytes, and at most {max_bytes:,} are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{what} cannot be read", where=where, why=why, fix=damaged) from error


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the sha256 of a file in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def user_cache() -> Path:
    """Return JAXLM_CACHE, or `jaxlm` in the user's cache folder."""
    if named := os.environ.get("JAXLM_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlm"
