"""Members of archives, as streams.

Nothing is unpacked to disk, so no member name can point anywhere; members that are not plain files
are refused.
"""

import dataclasses
import functools
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO

from jaxlm.corpus.config import ReadLimits
from jaxlm.corpus.document import BrokenRecord
from jaxlm.data.formats import ByteReader, TooLarge

_ENTRY_BYTES = 512  # of a zip directory, per member: 46 and its name
NO_FILE, LEADS_OUT = "no plain file of an archive", "a name that leads out of its archive"


@dataclasses.dataclass(frozen=True)
class Member:
    """A file of an archive."""

    name: str  # ARCHIVE!MEMBER
    open: Callable[[], IO[bytes]]


class _Metered(ByteReader):
    """A member's bytes, counted against the limit of the archive: sizes in headers can be wrong."""

    def __init__(self, source: IO[bytes], budget: "_Budget"):
        super().__init__(source)
        self._budget = budget

    def pull(self, size: int) -> bytes:
        data = self._source.read(size)
        self._budget.take(len(data))
        return data


class _Budget:
    def __init__(self, config: ReadLimits):
        self._config, self._bytes, self._members = config, 0, 0

    def member(self) -> None:
        self._members += 1
        if self._members > self._config.archive_members:
            raise TooLarge(f"more than {self._config.archive_members:,} members")

    def take(self, count: int) -> None:
        self._bytes += count
        if self._bytes > self._config.archive_bytes:
            raise TooLarge(f"its members unpack to more than {self._config.archive_bytes:,} bytes")

    def metered(self, stream: IO[bytes]) -> IO[bytes]:
        return io.BufferedReader(_Metered(stream, self), 2**16)


def zipped(stream: IO[bytes], name: str, config: ReadLimits) -> Iterator[Member | BrokenRecord]:
    """Yield the members of a zip file, in order."""
    budget = _Budget(config)
    start, size = _directory(stream)
    if size > config.archive_members * _ENTRY_BYTES:
        raise TooLarge(
            f"more than {config.archive_members:,} members, by the size of its directory"
        )
    for _ in _entries(stream, start, size):
        budget.member()
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            is_link = (entry.external_attr >> 16) & 0o170000 == 0o120000
            if problem := _problem(entry.filename, not is_link):
                yield BrokenRecord(problem, f"{name}!{entry.filename}", 1, "it is not read")
            else:
                opening = functools.partial(_opened, archive, entry, budget)
                yield Member(f"{name}!{entry.filename}", opening)


def tarred(stream: IO[bytes], name: str, config: ReadLimits) -> Iterator[Member | BrokenRecord]:
    """Yield the members of a tar file, in order, as they are read."""
    budget = _Budget(config)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            budget.member()
            if entry.isdir():
                continue
            content = archive.extractfile(entry) if entry.isreg() else None
            problem = _problem(entry.name, content is not None)
            if problem or content is None:
                yield BrokenRecord(problem, f"{name}!{entry.name}", 1, "it is not read")
            else:
                yield Member(f"{name}!{entry.name}", functools.partial(budget.metered, content))
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them


def _opened(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: _Budget) -> IO[bytes]:
    return budget.metered(archive.open(entry))


def _directory(stream: IO[bytes]) -> tuple[int, int]:
    """Return the offset and size of a zip file's directory.

    zipfile reads all of it and makes an object of every entry before it yields the first.
    Source: PKWARE's APPNOTE 6.3, §4.3.14 to §4.3.16: the end record, and that of ZIP64 if present.
    """
    begin = stream.seek(max(0, stream.seek(0, io.SEEK_END) - 2**16 - 64))
    tail = stream.read()
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or end + 16 > len(tail):
        return 0, 0  # zipfile reports the damage
    size, stop = struct.unpack_from("<L", tail, end + 12)[0], begin + end
    if end >= 20 and tail.startswith(b"PK\x06\x07", end - 20):
        stream.seek(struct.unpack_from("<Q", tail, end - 12)[0])
        record = stream.read(56)
        if len(record) == 56 and record.startswith(b"PK\x06\x06"):
            size, stop = struct.unpack_from("<Q", record, 40)[0], stop - 20 - 56
    return stop - size, size


def _entries(stream: IO[bytes], start: int, size: int) -> Iterator[None]:
    """Yield None for each whole entry of the directory. Source: the same, §4.3.12."""
    offset = max(start, 0)
    while offset + 46 <= start + size:
        stream.seek(offset)
        head = stream.read(46)
        if len(head) < 46 or not head.startswith(b"PK\x01\x02"):
            return
        offset += 46 + sum(struct.unpack_from("<3H", head, 28))
        yield


def _problem(inner: str, is_plain: bool) -> str:
    path = PurePosixPath(inner.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        return LEADS_OUT
    return "" if is_plain else NO_FILE
