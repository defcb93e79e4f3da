"""Documents of the files that patterns match, and of Python's own library."""

import contextlib
import copy
import dataclasses
import functools
import glob
import hashlib
import itertools
import shlex
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxlm.core import hub
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.core.nearest import nearest_word
from jaxlm.data import from_python, records, remote
from jaxlm.data.conversations import ChatFields
from jaxlm.data.manifest import NAME as MANIFEST
from jaxlm.data.records import Broken, Document, LeftOut, ReadBudget, ending, looks_like_text
from jaxlm.data.remote import Downloads

PROBED_RECORDS = 1000  # of each source are read before tokenizing
PROBED_BYTES = 2**27  # limit for all sources: half a second of text, a second of JSON
COUNTED_BYTES = 2**30  # limit for counting broken records: a few seconds
MAX_DROPPED = 0.001  # share of the records
UNFINISHED = "unfinished"  # folder in the output of `jaxlm data run` and `data mix` until their end
STDLIB_PARTS = {"stdlib:train", "stdlib:validation"}
# pydoc_data is one generated file of prose; it would be 60% of the validation bytes.
STDLIB_LEFT_OUT = frozenset(
    "test tests idle_test pydoc_data site-packages dist-packages __pycache__".split()
)
SHOWN = 6  # names of a folder that an error lists
PROBED_FILES = 10_000  # limit for a folder that was named instead of its files
STDLIB_HELD_OUT = 13  # of the 256 values of a path hash's first byte: about 5%


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The files that some patterns match, sorted by path; `names` are their names in reports.

    Broken records are left out and counted, up to a share `max_dropped` of all: a crawl of a
    billion pages has some, a wrong text key or file format has many. A record without the text key
    among the first ones is an error: it is probably one of many, and no work has been done yet.
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    text_key: str
    max_dropped: float = MAX_DROPPED
    other_encoding: int = 0  # files of Python's library that are left out
    not_text: int = 0  # files of named folders that are left out
    chat: ChatFields | None = None  # of conversations

    @classmethod
    def find(
        cls,
        patterns: tuple[str, ...],
        text_key: str,
        setting: str,
        max_dropped: float = MAX_DROPPED,
        entries: tuple[str, ...] = (),
        chat: ChatFields | None = None,
        downloads: Downloads = remote.SILENT,
    ) -> "Corpus":
        """Return every file that a pattern matches.

        Args:
          patterns: paths, folders, globs, URLs, `hf:ORG/NAME` for a data set of the Hugging Face
            Hub, `stdlib:train` and `stdlib:validation`, or `python:DIGEST`.
          text_key: field of a record with its text.
          setting: path of the setting, or flag, of the patterns.
          max_dropped: share of the records that may be broken.
          entries: the whole setting if the patterns are one source of several, as NAME=PATTERN.
          chat: form of the records if these are conversations.
          downloads: copies of remote files.

        Raises:
          InputMissing: if a pattern matches no file; the fix keeps all other entries.
          DataError: if a file matches two patterns, or is reached through a link as well.
        """
        names: dict[Path, str] = {}
        real_names: dict[Path, str] = {}
        other_encoding = not_text = 0
        for pattern in patterns:
            if pattern in STDLIB_PARTS:
                files, left_out = _stdlib()[pattern]
                other_encoding += left_out
            elif from_python.is_entry(pattern):
                files = {from_python.located(pattern): pattern}
                if names.keys() & files.keys():
                    raise _listed_twice(pattern, pattern, pattern, setting)
            else:
                others = entries or patterns
                if remote.is_remote(pattern):
                    flag = functools.partial(_flag, setting, pattern, others)
                    files = downloads.files(pattern, setting, flag)
                else:
                    matches = matching_files(pattern, setting, others)
                    files = {Path(path): path for path in matches}
                    if Path(pattern).is_dir():
                        not_text += sum(1 for _ in _files_in(Path(pattern))) - len(files)
                for path, name in files.items():
                    before = real_names.setdefault(path.resolve(), name)
                    if before != name or path in names:
                        raise _listed_twice(before, name, pattern, setting)
            names |= files
        shown = tuple(names.values())
        return cls(
            tuple(names), shown, text_key, max_dropped, other_encoding, not_text=not_text, chat=chat
        )

    def named(self) -> Iterator[tuple[Path, str]]:
        """Yield files that the user named, without Python's library, and their names."""
        files = zip(self.files, self.names, strict=True)
        return ((path, name) for path, name in files if str(path) == name or _is_entry(name))

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self, counts: LeftOut, start: ReadBudget | None = None) -> Iterator[Document]:
        """Yield every document, or those covered by `start`; count what is left out or repaired.

        Raise DataError if a file has another format than its name, or more than `max_dropped` of
        the records are broken.
        """
        if self.other_encoding:
            counts["files of the library in another encoding"] += self.other_encoding
        if self.not_text:
            counts["files of a folder that are no text"] += self.not_text
        seen = dropped = 0
        first: Broken | None = None
        for record, before in self._records(counts, start):
            seen += 1
            if isinstance(record, Broken):
                counts.add(record.reason, record.file, record.record)
                if record.error is None:
                    continue
                dropped += 1
                first = first or record
                if self._exceeds(self.max_dropped, record, dropped, seen):
                    raise self._too_many(first, dropped, seen)
                continue
            text, chat = records.mended(record.text, counts), record.conversation
            if chat is not None and (text != record.text or chat.has_more):
                record = record._replace(
                    conversation=chat.mapped(lambda each: records.mended(each, Counter()))
                )
            if not text or text.isspace():
                reason = records.BLANK if text else records.EMPTY
                counts.add(reason, record.file, record.record)
            else:
                yield record._replace(text=text, place=before + record.place)
        is_all = start is None or not start.is_read
        if first and is_all and dropped > self.max_dropped * seen:
            raise self._too_many(first, dropped, seen)

    def _records(
        self, counts: Counter[str], start: ReadBudget | None
    ) -> Iterator[tuple[Document | Broken, int]]:
        """Yield every record that `start` covers, with the bytes on disk of the files before."""
        before = 0
        for path, name in zip(self.files, self.names, strict=True):
            for record in records.read(path, name, self.text_key, counts, start, chat=self.chat):
                yield record, before
                if start is not None:
                    start.records -= 1
                    if start.is_read:
                        return
            before += path.stat().st_size

    @functools.cached_property
    def _least(self) -> int:
        """Return the least number of records: a text file is one, of others it is not known."""
        return len(self.files) if all(map(records.is_text, self.files)) else PROBED_RECORDS

    def _exceeds(self, share: float, record: Broken, dropped: int, seen: int) -> bool:
        """Return whether this broken record is one too many, before all records are read."""
        # A single broken record among the first few would exceed the share.
        most_dropped = share * max(seen, self._least)
        is_early = record.reason in records.OTHER_FIELDS and seen <= PROBED_RECORDS
        return dropped > most_dropped or (is_early and dropped >= most_dropped)

    def _accepted_share(self) -> float:
        """Return the smallest `max_dropped`, in percent, that accepts all records."""
        seen = dropped = percent = 0
        for record, _ in self._records(LeftOut(), ReadBudget(sys.maxsize, COUNTED_BYTES)):
            seen += 1
            if isinstance(record, Broken) and record.error is not None:
                dropped += 1
                while self._exceeds(percent / 100, record, dropped, seen):
                    percent += 1
        while dropped > percent / 100 * seen:
            percent += 1
        return percent / 100

    def _too_many(self, first: Broken, dropped: int, read: int) -> DataError:
        error = copy.copy(first.error)  # the class of the error is part of it
        assert error is not None
        error.why += (
            f"; {dropped} of the {read} records so far {'are' if dropped > 1 else 'is'} broken, "
            f"data.max_dropped = {self.max_dropped:g} of them may be"
        )
        if first.record <= 1:  # no record before it in the file is whole
            return error
        with contextlib.suppress(DataError, InputMissing):  # of a damaged file behind it
            share = self._accepted_share()
            if share <= 0.5:
                without = f"--config.data.max_dropped={share:g}    # leaves such records out"
                is_field = isinstance(error, records.NoText)
                error.fix = without if is_field else f"{error.fix}\n{without}"
        return error


def _listed_twice(before: str, name: str, pattern: str, setting: str) -> DataError:
    return DataError(
        "the data lists a file twice",
        where=setting,
        why=f"{before} and {name} are one file"
        if before != name
        else f"{pattern} and an earlier pattern match {name}",
        fix="name each file once: no overlapping patterns, no links to files that they match",
    )


def matching_files(pattern: str, setting: str, entries: tuple[str, ...] = ()) -> list[str]:
    """Return the files of a path, a folder or a glob, sorted.

    Args:
      pattern: the path, the folder or the glob.
      setting: name of the setting, or a flag, in errors.
      entries: all patterns of the setting, which the fix keeps.

    Raises:
      InputMissing: if there are none; the fix has a similar name.
    """
    is_folder = Path(pattern).is_dir()
    has_shards = is_folder and bool(_shards(pattern))
    globs = text_globs(Path(pattern)) if is_folder and not has_shards else ()
    paths = (path for each in globs or (pattern,) for path in glob.glob(each, recursive=True))
    matches = sorted(path for path in paths if Path(path).is_file())
    if matches:
        return matches
    parents = (Path(pattern), *Path(pattern).parents)
    folder = next((path for path in parents if path.is_dir()), Path())
    meant = _meant(pattern)
    if is_folder:
        what = f"{pattern} is a folder {'of several data sets' if has_shards else 'without text'}"
        why = "each folder of token shards is named" if has_shards else "no file in it is text"
    else:
        what = f"no file matches {pattern}"
        why = (
            "a pattern is a path or a glob such as 'texts/**/*.txt', relative to the current "
            "directory"
        )
        if not Path(pattern).suffix and (name := hub.guessed_name(pattern)):
            why = f"{why}, and a data set of the Hugging Face Hub begins with {hub.PREFIX}"
            meant = [*meant, name]
    names = sorted(each.name for each in folder.iterdir())[:SHOWN]
    fix = "\n".join(_flags(setting, pattern, meant, entries)) or f"ls {shlex.quote(str(folder))}"
    raise InputMissing(
        what, where=setting, why=f"{why}; {folder} holds {', '.join(names) or 'nothing'}", fix=fix
    )


def _flags(setting: str, pattern: str, meant: list[str], entries: tuple[str, ...]) -> list[str]:
    """Return the flags that replace a pattern by `meant` and keep the other entries."""
    if setting.startswith("--"):
        return [shlex.quote(f"{setting}={each}") for each in meant]
    flags = []
    for entry in entries if meant else ():
        name, equals, value = entry.partition("=")
        if value == pattern and equals:
            flags += [f"{name}={each}" for each in meant]
        else:
            flags += meant if entry == pattern else [entry]
    return [shlex.quote(f"--config.{setting}={','.join(flags)}")] if flags else []


def _is_entry(name: str) -> bool:
    """Return whether a file has the name of its entry: remote data, and data from Python."""
    return remote.is_remote(name) or from_python.is_entry(name)


def _flag(setting: str, pattern: str, entries: tuple[str, ...], meant: str) -> str:
    """Return the flag that replaces a pattern by one other and keeps the other entries."""
    return _flags(setting, pattern, [meant], entries)[0]


def _meant(pattern: str) -> list[str]:
    """Return the patterns that were probably meant: text in the folder, or a similar path."""
    path = Path(pattern)
    if path.is_dir():
        return _shards(pattern)
    if near := nearest_word(pattern, STDLIB_PARTS):
        return [near]
    for number, part in enumerate(path.parts):
        folder = Path(*path.parts[:number])
        if glob.has_magic(part) or not folder.is_dir() or (folder / part).exists():
            continue
        near = nearest_word(part, (each.name for each in folder.iterdir()))
        candidate = near and str(Path(*path.parts[:number], near, *path.parts[number + 1 :]))
        return [candidate] if candidate and glob.glob(candidate, recursive=True) else []
    return []


def _shards(folder: str) -> list[str]:
    """Return the folders of token shards in a folder."""
    return sorted(str(each.parent) for each in Path(folder).glob(f"*/{MANIFEST}"))


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, without hidden ones."""
    for each in folder.rglob("*"):
        if each.is_file() and not any(part[0] == "." for part in each.relative_to(folder).parts):
            yield each


def notes_of_tables(entries: Iterable[str]) -> Iterator[str]:
    """Yield the note on each table among entries of `data.train`, and in their folders."""
    for entry in entries:
        place = Path(entry.rpartition("=")[2])
        globs = text_globs(place) if place.is_dir() and not _shards(str(place)) else [entry]
        yield from filter(None, map(records.note_of_table, globs))


def notes_of_unfinished(entries: Iterable[str]) -> Iterator[str]:
    """Yield the folder of each entry in which `jaxlm data run` or `data mix` has not finished."""
    for entry in entries:
        place = Path(entry.rpartition("=")[2])
        for folder in (place, *itertools.islice(place.parents, 3)):  # OUT/train/NAME/tokens-*
            if (folder / UNFINISHED).is_dir() and (folder / "recipe.json").is_file():
                why = "the command that began it continues it, and it may lack documents until then"
                yield f"{folder} is not finished: {why}"


def text_globs(folder: Path) -> list[str]:
    """Return a glob for each kind of text in a folder, by file-name ending."""
    kinds: dict[str, bool] = {}  # ending -> is a file in a subfolder
    for path in itertools.islice(_files_in(folder), PROBED_FILES):
        kind = ending(path)
        if kind in kinds or looks_like_text(path):
            kinds[kind] = kinds.get(kind, False) or path.parent != folder
    if len(kinds) > 1:
        kinds.pop("", None)  # a glob for names without an ending matches all files
    root = glob.escape(str(folder))
    return [f"{root}/{'**/' if deep else ''}*{kind}" for kind, deep in sorted(kinds.items())]


@functools.cache
def _stdlib() -> dict[str, tuple[dict[Path, str], int]]:
    """Return files of Python's library, without its tests, and the number left out, by part.

    The first byte of sha256 of a path decides between training and validation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, dict[Path, str]] = {part: {} for part in STDLIB_PARTS}
    left_out = Counter[str]()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        inner = path.relative_to(root)
        if STDLIB_LEFT_OUT.intersection(inner.parts[:-1]):
            continue
        held_out = hashlib.sha256(inner.as_posix().encode()).digest()[0] < STDLIB_HELD_OUT
        part = "stdlib:validation" if held_out else "stdlib:train"
        try:
            path.read_bytes().decode()
            files[part][path] = inner.as_posix()
        except UnicodeDecodeError:  # a few library files declare another encoding
            left_out[part] += 1
    return {part: (files[part], left_out[part]) for part in STDLIB_PARTS}
