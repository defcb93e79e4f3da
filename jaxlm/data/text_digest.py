"""Digests of raw text, by which what was made of it is found in the cache.

A file is hashed once. Its digest is kept in the cache with the file's size, times and inode, and used as long as all of
these are the same: a write of any kind sets the time of change (ctime), which no program can set back. A file that changed
less than two seconds before it was hashed is hashed again at the next start, as a later write could have the same time.
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
from jaxlm.data import cache
from jaxlm.data.documents import Corpus
from jaxlm.monitor.progress import Progress

THREADS = 4  # hashing lets go of the interpreter's lock
CHUNK_BYTES = 1 << 20
SETTLED_SECONDS = 2  # file systems count time in steps of up to two seconds
MUCH = 2**36  # bytes; shorter texts are hashed in about a minute

Stamp = tuple[int, int, int, int]  # bytes, mtime and ctime in nanoseconds, inode


@dataclasses.dataclass(frozen=True)
class TextDigests:
    """The digests of corpora, from the cache where a file did not change.

    Args:
      root: the cache folder.
      progress: called while files are hashed.
      say: prints a line.
    """

    root: Path
    progress: Progress = lambda what, done, total: None
    say: Callable[[str], None] = lambda text: None
    _made: dict[Corpus, str] = dataclasses.field(default_factory=dict)

    def of(self, corpus: Corpus) -> str:
        """Return the sha256 over the name and contents of every file, read at most once."""
        if corpus not in self._made:
            total = hashlib.sha256(corpus.text_key.encode())
            for name, digest in zip(corpus.names, self._files(corpus), strict=True):
                total.update(f"\0{name}\0{digest}".encode())
            self._made[corpus] = total.hexdigest()
        return self._made[corpus]

    def _files(self, corpus: Corpus) -> list[str]:
        """The sha256 of each file."""
        paths = [os.path.abspath(path) for path in corpus.files]
        place = cache.folder(self.root, "digests", paths=paths).with_suffix(".json")
        before, stamps = _read(place), [_stamp(path) for path in paths]
        known = dict(before)
        digests = [
            known[path][1] if path in known and known[path][0] == stamp else None
            for path, stamp in zip(paths, stamps, strict=True)
        ]
        changed = [number for number, digest in enumerate(digests) if digest is None]
        if not changed:
            return [digest for digest in digests if digest is not None]
        size = sum(stamps[number][0] for number in changed)
        if size > MUCH:
            self.say(
                "raw text is hashed before its first use: token shards, which are not, start at once"
            )
        begun = time.time_ns()
        found = self._hashed([paths[number] for number in changed], size)
        hashed = dict(zip(changed, found, strict=True))
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
            if over.is_set():  # a signal must not wait for the end of large files
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
            faults.transfer("text.read", len(chunk))
            digest.update(chunk)
            moved(len(chunk))
    return digest.hexdigest()


def _stamp(path: str) -> Stamp:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _write(place: Path, known: dict[str, tuple[Stamp, str]]) -> None:
    """Replace the digests that are kept. Processes of several hosts may do so at once, with one process id."""
    partial = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    with cache.writing(place):
        try:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(known))
            os.replace(partial, place)
        finally:
            partial.unlink(missing_ok=True)


def _read(place: Path) -> dict[str, tuple[Stamp, str]]:
    """The digests that were kept; none if the file is missing or damaged."""
    try:
        values = json.loads(place.read_bytes())
        return {
            path: ((int(size), int(mtime), int(ctime), int(inode)), str(digest))
            for path, ((size, mtime, ctime, inode), digest) in values.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
