"""Where tokenizers, shards and plans that a run makes are kept, named by what they are made from."""

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
    """JAXLM_CACHE, or jaxlm in the user's cache folder."""
    if named := os.environ.get("JAXLM_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlm"


def folder(root: Path, kind: str, /, **inputs: Any) -> Path:
    """The folder for something made from `inputs`; its parent exists and is private.

    Raises:
      NotWritable: where it cannot be made.
    """
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    parent = root / kind
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        parent.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise NotWritable(
            "the cache folder cannot be written",
            where=str(parent),
            why=str(error),
            fix="export JAXLM_CACHE=~/jaxlm-cache",
        ) from error
    return parent / key


@contextlib.contextmanager
def building(
    target: Path, is_whole: Callable[[Path], bool] = lambda folder: True
) -> Iterator[Path | None]:
    """An empty folder that becomes `target` where the block ends well, and is removed where it does not.

    One process builds at a time. Another that wants the same folder waits, and gets None where it need not build any
    more. What a killed process left is removed, and so is a `target` that is not whole.

    Raises:
      NotWritable: where a write fails, as on a full disk.
    """
    with writing(target), built(target, is_whole) as partial:
        yield partial


@contextlib.contextmanager
def writing(target: Path, *, fix: str = "export JAXLM_CACHE=~/jaxlm-cache") -> Iterator[None]:
    """What is written into a folder, with the errors of the operating system as ours.

    Raises:
      NotWritable: where a write fails, as on a full disk.
    """
    try:
        yield
    except OSError as error:
        raise NotWritable(
            "a folder cannot be written",
            where=str(error.filename or target),
            why=f"{type(error).__name__}: {error.strerror}",
            fix=fix,
        ) from error


@contextlib.contextmanager
def built(
    target: Path, is_whole: Callable[[Path], bool] = lambda folder: True
) -> Iterator[Path | None]:
    """What `building` does, with the errors of the operating system as they are."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with _locked(target.with_name(f".{target.name}.lock")):
        shutil.rmtree(partial, ignore_errors=True)
        # Under the lock: another process may have replaced the damaged folder with a whole one.
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
    """Holds a lock file, which is gone afterwards."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Its last holder may have removed it while we waited: then this lock is on a file that nobody else finds.
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
