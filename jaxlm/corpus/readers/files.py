"""Files of any format as documents and broken records; damage to one never stops the others.

Example:
  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     path = Path(folder, "a.jsonl")
  ...     _ = path.write_text('{"text": "One."}\\n{"title": "no text"}\\n')
  ...     [type(each).__name__ for each in read(path, path.name, Recipe(), Counter())]
  ['CorpusDocument', 'BrokenRecord']
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from jaxlm.core.errors import JaxlmError
from jaxlm.corpus import remote
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import BrokenRecord
from jaxlm.corpus.readers import archives, spans, tables, texts, warc
from jaxlm.corpus.readers.encoding import NOT_TEXT, NotText
from jaxlm.corpus.readers.spans import FileSpan
from jaxlm.corpus.readers.streams import DAMAGED, RawFile, Records, is_packed, kind_of, unpacked
from jaxlm.data import stores
from jaxlm.data.formats import FORMATS, TOO_LARGE, TooLarge

OpenStream = Callable[[], AbstractContextManager[IO[bytes]]]
Reader = Callable[[IO[bytes], RawFile], Records]
READERS: dict[str, Reader] = {
    ".csv": functools.partial(tables.separated, mark=","),
    ".tsv": functools.partial(tables.separated, mark="\t"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), texts.html),
    **dict.fromkeys((".warc", ".wet"), warc.records),
    ".py": texts.python,
    ".pdf": texts.pdf,
}
Cut = Callable[[Path, int, int], Iterator[FileSpan]]  # of a path, bytes of a span and of a document
CUTS: dict[str, Cut] = {
    **{
        kind: lambda path, most, limit: spans.of_lines(path, most)
        for kind, format in FORMATS.items()
        if format.is_lines
    },
    ".parquet": lambda path, most, limit: spans.of_row_groups(path, most),
    ".csv": functools.partial(tables.divided, mark=","),
    ".tsv": functools.partial(tables.divided, mark="\t"),
    **dict.fromkeys((".warc", ".wet"), warc.divided),
}
WHOLE = texts.plain, texts.html, texts.python, texts.pdf  # a file is one record
ARCHIVES = {".zip": archives.zipped, ".tar": archives.tarred}
NESTED = "an archive in another"


def is_one_record(name: str) -> bool:
    """Return whether a file is one record, by its name."""
    kind = kind_of(stores.path_in(name))
    return kind not in (*ARCHIVES, *FORMATS) and READERS.get(kind, texts.plain) in WHOLE


def can_cut(name: str) -> bool:
    """Return whether a file can be divided between processes: local, of records, not compressed.

    A member of a compressed archive does not state its size and may contain members.
    """
    return not stores.is_url(name) and not is_packed(name) and kind_of(name) in CUTS


def cut(path: Path, name: str, most: int, limit: int) -> list[FileSpan]:
    """Divide a file into spans of `most` bytes, each with the records that begin in it.

    Where a table or an archive is divided depends on `limit`, the bytes of the largest document.
    A damaged file is not divided; its reader reports the damage. Raises InputMissing if a package
    that reads the format is not installed.
    """
    try:
        return [*CUTS[kind_of(name)](path, most, limit)]
    except JaxlmError:
        raise
    except Exception:  # pyarrow's errors have no common base
        return spans.uncut(path.stat().st_size, most)


def read(
    path: Path,
    name: str,
    recipe: Recipe,
    counts: Counter[str],
    span: FileSpan | None = None,
    is_in: Callable[[str, int], bool] = lambda file, record: True,
) -> Records:
    """Yield every record of a file, or of a span of it.

    Records that are no documents by nature, such as requests in a WARC file, are only counted. In a
    damaged file, the records before the damage are followed by a broken one.

    Args:
      path: the local file.
      name: its name in the output; a URL is downloaded.
      recipe: the settings.
      counts: counts of changes and of records passed over.
      span: the part to read; None reads the whole file.
      is_in: selects records; JSON lines outside the selection are not parsed.
    """
    kind = kind_of(stores.path_in(name))
    open_file: OpenStream = functools.partial(_opened, path, name)
    if span is not None:
        if span.begin == span.end:
            return
        if kind not in FORMATS or FORMATS[kind].is_lines:
            open_file = functools.partial(spans.opened, path, span)
    yield from _guarded(open_file, kind, RawFile(name, recipe, counts, span, is_in))


def _members(stream: IO[bytes], file: RawFile, *, kind: str) -> Records:
    for member in ARCHIVES[kind](stream, file):
        if isinstance(member, BrokenRecord):
            yield member
        elif (inner := kind_of(member.name)) in ARCHIVES:
            yield BrokenRecord(NESTED, member.name, 1, "it is not opened")
        else:
            open_member = functools.partial(_member, member)
            yield from _guarded(open_member, inner, file._replace(name=member.name))


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    is_remote = stores.is_url(name)
    with remote.fetched(name) if is_remote else open(path, "rb") as file:
        with unpacked(file, stores.path_in(name) if is_remote else path.name) as stream:
            yield stream


def _member(member: archives.ArchiveMember) -> IO[bytes]:
    return unpacked(member.open(), member.name)


def _guarded(open_stream: OpenStream, kind: str, file: RawFile) -> Records:
    """Yield the records of a file of a kind; a failure of its reader becomes a broken record."""
    reader, last = READERS.get(kind, texts.plain), file.span.before if file.span else 0
    if kind in FORMATS:
        reader = functools.partial(tables.records, format=FORMATS[kind])
    elif kind in ARCHIVES:
        reader = functools.partial(_members, kind=kind)
    try:
        with open_stream() as stream:
            for each in reader(stream, file):
                last = each.record if each.file == file.name else last
                yield each
    except (GeneratorExit, MemoryError, JaxlmError):
        raise
    # Errors of zlib, lzma, zstandard, zipfile, tarfile, csv and pyarrow have no common base.
    except Exception as error:
        kind = {TooLarge: TOO_LARGE, NotText: NOT_TEXT}.get(type(error), DAMAGED)
        detail = f"{type(error).__name__}: {str(error)[:200]}" if kind == DAMAGED else str(error)
        yield file.broken(kind, last + 1, detail)
