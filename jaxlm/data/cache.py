"""The cache of tokenizers, shards and plans; folder names are hashes of the inputs."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.core import disk
from jaxlm.core.errors import NotWritable


def default() -> Path:
    """Return JAXLM_CACHE, or `jaxlm` in the user's cache folder."""
    return disk.user_cache()


def folder(root: Path, kind: str, /, **inputs: Any) -> Path:
    """Return the folder of a result made from `inputs`; create its parent with mode 0700.

    Raise NotWritable if the parent cannot be created.
    """
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    parent = root / kind
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        parent.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        what = "jaxlm cannot write the cache folder"
        fix = "export JAXLM_CACHE=~/jaxlm-cache"
        raise NotWritable(what, where=str(parent), why=str(error), fix=fix) from error
    return parent / key


@contextlib.contextmanager
def building(
    target: Path, is_whole: Callable[[Path], bool] = lambda folder: True
) -> Iterator[Path | None]:
    """Yield an empty folder that becomes `target` on success and is removed on failure.

    One process builds at a time; another that needs the same folder waits, and gets None if it is
    complete by then. Remains of a killed process and an incomplete `target` are removed.

    Raise NotWritable if a write fails, for example on a full disk.
    """
    with writing(target), built(target, is_whole) as partial:
        yield partial


@contextlib.contextmanager
def writing(target: Path, *, fix: str = "export JAXLM_CACHE=~/jaxlm-cache") -> Iterator[None]:
    """Convert operating-system errors inside the block to NotWritable."""
    try:
        yield
    except OSError as error:
        what = "jaxlm cannot write a folder"
        why = f"{type(error).__name__}: {error.strerror}"
        raise NotWritable(what, where=str(error.filename or target), why=why, fix=fix) from error


@contextlib.contextmanager
def built(
    target: Path, is_whole: Callable[[Path], bool] = lambda folder: True
) -> Iterator[Path | None]:
    """Do what `building` does, but let operating-system errors pass."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with _locked(target.with_name(f".{target.name}.lock")):
        shutil.rmtree(partial, ignore_errors=True)
        # Under the lock: another process may have replaced the damaged folder by a complete one.
        if target.exists() and not is_whole(target):
            shutil.rmtree(target)
        if target.exists():
            yield None
            return
        partial.mkdir(mode=0o700)
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                disk.sync(path)
            disk.rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, and remove it afterwards."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The last holder may have removed the file while we waited: no other process sees this
        # lock.
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
