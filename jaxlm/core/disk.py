"""What is on the disk when a function returns: what files hold, and their names, which are in their folder."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any


def sync(path: os.PathLike[str]) -> None:
    """Returns when what a file or a folder holds is on the disk; what a folder holds is names.

    A URL of an object store is left to itself, and so is a folder where the filesystem knows no such thing.

    Raises:
      OSError: where the disk fails.
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
    """Gives a file or a folder, by paths of `pathlib` or `etils.epath`, another name, which is on the disk when this returns.

    Raises:
      OSError: where it cannot be renamed.
    """
    source.rename(target)
    for folder in {target.parent, source.parent}:
        sync(folder)


def replace(target: Path, content: bytes) -> None:
    """Replaces a file as a whole: readers see the old one or the new, and the new one is on the disk when this returns.

    Raises:
      OSError: where it cannot be written; the old file stays.
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
