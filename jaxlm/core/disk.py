"""Durable writes: contents and names are on the disk when a function returns."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any


def sync(path: os.PathLike[str]) -> None:
    """Flush a file's contents, or the names in a folder, to the disk.

    URLs of object stores are skipped, as are folders on filesystems that cannot sync folders.

    Raises:
      OSError: if the disk fails.
    """
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
    """Rename a file or folder (`pathlib` or `etils.epath` paths) and flush the new name.

    Raises:
      OSError: if it cannot be renamed.
    """
    source.rename(target)
    for folder in {target.parent, source.parent}:
        sync(folder)


def replace(target: Path, content: bytes) -> None:
    """Replace a file atomically and flush it; readers see the old file or the new one.

    Raises:
      OSError: if it cannot be written; the old file stays.
    """
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
