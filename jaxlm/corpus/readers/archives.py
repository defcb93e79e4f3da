"""Members of archives, as streams; members that are not plain files are refused.

Nothing is unpacked to disk, so no member name can point anywhere.
"""

import functools
import io
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, NamedTuple

from jaxlm.corpus.config import ReadLimits
from jaxlm.corpus.document import BrokenRecord
from jaxlm.corpus.readers.streams import RawFile
from jaxlm.data.formats import ByteReader, TooLarge

_ENTRY_BYTES = 512  # of a zip directory, per member: 46 and its name
NO_FILE, LEADS_OUT = "no plain file of an archive", "a name that leads out of its archive"


class ArchiveMember(NamedTuple):
    """A file of an archive."""

    name: str  # ARCHIVE!MEMBER
    open: Callable[[], IO[bytes]]


class _Budget:
    """The limits of an archive, and the members and bytes so far."""

    def __init__(self, limits: ReadLimits):
        self.limits, self.bytes, self.members = limits, 0, 0

    def count_member(self) -> None:
        self.members += 1
        if self.members > self.limits.archive_members:
            raise TooLarge(f"more than {self.limits.archive_members:,} members")


class _Metered(ByteReader):
    """A member's bytes, counted against the limit of the archive: sizes in headers can be wrong."""

    def __init__(self, source: IO[bytes], budget: _Budget):
        super().__init__(source)
        self._budget = budget

    def pull(self, size: int) -> bytes:
        data, most = self._source.read(size), self._budget.limits.archive_bytes
        self._budget.bytes += len(data)
        if self._budget.bytes > most:
            raise TooLarge(f"its members unpack to more than {most:,} bytes")
        return data


def _metered(stream: IO[bytes], budget: _Budget) -> IO[bytes]:
    return io.BufferedReader(_Metered(stream, budget), 2**16)


def zipped(stream: IO[bytes], file: RawFile) -> Iterator[ArchiveMember | BrokenRecord]:
    """Yield the members of a zip file, in order."""
    budget, most = _Budget(file.recipe.reading), file.recipe.reading.archive_members
    start, size = _directory(stream)
    if size > most * _ENTRY_BYTES:
        raise TooLarge(f"more than {most:,} members, by the size of its directory")
    for _ in _entries(stream, start, size):
        budget.count_member()
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            name, is_link = f"{file.name}!{entry.filename}", stat.S_ISLNK(entry.external_attr >> 16)
            if problem := _problem(entry.filename, not is_link):
                yield BrokenRecord(problem, name, 1, "it is not read")
            else:
                yield ArchiveMember(name, functools.partial(_opened, archive, entry, budget))


def tarred(stream: IO[bytes], file: RawFile) -> Iterator[ArchiveMember | BrokenRecord]:
    """Yield the members of a tar file, in order, as they are read."""
    budget = _Budget(file.recipe.reading)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            budget.count_member()
            if entry.isdir():
                continue
            name = f"{file.name}!{entry.name}"
            content = archive.extractfile(entry) if entry.isreg() else None
            problem = _problem(entry.name, content is not None)
            if problem or content is None:
                yield BrokenRecord(problem, name, 1, "it is not read")
            else:
                yield ArchiveMember(name, functools.partial(_metered, content, budget))
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them


def _opened(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: _Budget) -> IO[bytes]:
    return _metered(archive.open(entry), budget)


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
