"""Digests of raw text, which are cache keys of everything made from it.

A file is hashed once. The cache stores its digest with size, times and inode, valid as long as all
of these are equal: every write sets the time of change (ctime), which no program can set back. A
file that changed less than two seconds before hashing is hashed again at the next start, because a
later write could have the same time.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxlm.core import faults
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.data import cache
from jaxlm.data.documents import Corpus

THREADS = 4  # hashing releases the interpreter lock
CHUNK_BYTES = 1 << 20
SETTLED_SECONDS = 2  # file systems have a time resolution of up to two seconds
SLOW_BYTES = 2**36  # bytes, about a minute of hashing

Stamp = tuple[int, int, int, int]  # bytes, mtime and ctime in nanoseconds, inode


@dataclasses.dataclass(frozen=True)
class TextDigests:
    """Digests of corpora; files that did not change come from the cache."""

    root: Path
    progress: OnProgress = lambda what, done, total: None  # called while files are hashed
    log: Log = lambda text: None
    _made: dict[Corpus, str] = dataclasses.field(default_factory=dict)

    def of(self, corpus: Corpus) -> str:
        """Return the sha256 over name and contents of every file; each is read at most once."""
        if corpus not in self._made:
            total = hashlib.sha256(corpus.text_key.encode())
            if corpus.chat is not None:
                kind, roles, *fields = corpus.chat
                total.update(repr((kind, roles, *filter(None, fields))).encode())
            for name, digest in zip(corpus.names, self._files(corpus), strict=True):
                total.update(f"\0{name}\0{digest}".encode())
            self._made[corpus] = total.hexdigest()
        return self._made[corpus]

    def _files(self, corpus: Corpus) -> list[str]:
        """Return the sha256 of each file."""
        paths = [os.path.abspath(path) for path in corpus.files]
        place = cache.folder(self.root, "digests", paths=paths).with_suffix(".json")
        before, stamps = _read(place), [_stamp(path) for path in paths]
        known = dict(before)
        stored = (known.get(path, (None, None)) for path in paths)
        digests = [d if s == stamp else None for (s, d), stamp in zip(stored, stamps, strict=True)]
        changed = [number for number, digest in enumerate(digests) if digest is None]
        if not changed:
            return [digest for digest in digests if digest is not None]
        size = sum(stamps[number][0] for number in changed)
        if size > SLOW_BYTES:
            self.log("hashing raw text before its first use; token shards would start at once")
        begun = time.time_ns()
        hashes = self._hashed([paths[number] for number in changed], size)
        hashed = dict(zip(changed, hashes, strict=True))
        for number, digest in hashed.items():
            stamp = _stamp(paths[number])
            is_settled = begun - max(stamp[1:3]) >= SETTLED_SECONDS * 1_000_000_000
            if is_settled and stamp == stamps[number]:
                known[paths[number]] = (stamp, digest)
            else:
                known.pop(paths[number], None)
        if known != before:
            _write(place, known)
        return [digest or hashed[number] for number, digest in enumerate(digests)]

    def _hashed(self, paths: list[str], size: int) -> list[str]:
        lock, over = threading.Lock(), threading.Event()
        read = 0

        def moved(count: int) -> None:
            nonlocal read
            if over.is_set():  # a signal must not wait for large files
                raise InterruptedError
            with lock:
                read += count
                self.progress("hashing raw text", read, size)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            try:
                return list(pool.map(lambda path: _digest(path, moved), paths))
            finally:
                over.set()


def _digest(path: str, moved: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            faults.point("text.read", size=len(chunk))
            digest.update(chunk)
            moved(len(chunk))
    return digest.hexdigest()


def _stamp(path: str) -> Stamp:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _write(place: Path, known: dict[str, tuple[Stamp, str]]) -> None:
    """Replace the stored digests; processes of several hosts may do so at once, with equal ids."""
    partial = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    with cache.writing(place):
        try:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(known))
            os.replace(partial, place)
        finally:
            partial.unlink(missing_ok=True)


def _read(place: Path) -> dict[str, tuple[Stamp, str]]:
    """Return the stored digests; empty if the file is missing or damaged."""
    try:
        values = json.loads(place.read_bytes())
        return {
            path: ((int(size), int(mtime), int(ctime), int(inode)), str(digest))
            for path, ((size, mtime, ctime, inode), digest) in values.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
