"""Records for training: text, JSON lines and Parquet, possibly compressed, and their damage."""

import codecs
import contextlib
import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import conversations, formats, preferred, prompts, record_fields
from jaxlm.data.conversations import (
    NO_MESSAGES,
    PREFERENCES,
    ChatFields,
    Conversation,
    Rejected,
)
from jaxlm.data.formats import BYTE_ORDER_MARK, NOT_JSON, NOT_UTF8, RecordFault, is_packed, unpacked

# Kinds of broken records, like NOT_UTF8 and NOT_JSON; only a small share of them is tolerated.
NO_TEXT, OTHER_TYPE = "without the text key", "with a text of another type"
OTHER_FIELDS = NO_TEXT, NO_MESSAGES, conversations.NO_FIELD  # probably of all records
# Kinds of records without content; any number of them may be dropped.
EMPTY, BLANK = "empty", "only white space"
# Changes to a document, or oddities of one that is kept unchanged.
SURROGATE = "with a lone surrogate, replaced"
MARK = "with a byte order mark, removed"
NUL = "with NUL, kept"
MENDED = (SURROGATE, MARK, NUL)

# Unpacked bytes of a compressed file without a document's end: a megabyte can unpack to ten
# thousand documents. A file that is not compressed shows its size.
MOST_UNPACKED = 2**28

# Files that are read as text: the expression of their records.
TABLES = {
    ".csv": "csv.DictReader(sys.stdin)",
    ".tsv": 'csv.DictReader(sys.stdin, delimiter="\\t")',
}
PROBED_START = 2**12  # bytes of a file that distinguish text from other files
# Byte order marks with their encodings: the mark of UTF-32 begins with that of UTF-16.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
NAMES = {"utf-32": "UTF-32", "utf-16": "UTF-16", "cp1252": "Windows-1252", "latin1": "Latin-1"}
CONTROLS = bytes(set(range(32)) - set(b"\t\n\f\r\x1b"))  # in no text of a legacy encoding
_CONTROLS_OF_LATIN1 = bytes(range(0x80, 0xA0))
_SURROGATES = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """A text and its origin; the text of a conversation is that of its contents.

    `record` is the number of its line or row, from 1; 0 for a file that is one text.
    """

    text: str
    file: str
    record: int
    place: int = 0  # bytes of the file on disk that were read up to here
    conversation: Conversation | None = None


class Broken(NamedTuple):
    """A record that cannot be used: why, and the error to raise if there are too many.

    Any number may be left out without an error. `file` and `record` are those of a `Document`.
    """

    reason: str
    error: DataError | None
    file: str
    record: int


class NoText(DataError):
    """A record of text has no text.

    Attributes:
      is_conversation: it has turns in the fields that `data.kind=chat` reads.
      is_mapped: it has turns in other fields, which `data.fields` can name.
    """

    is_conversation = is_mapped = False


class LeftOut(Counter[str]):
    """Counts of documents left out, by reason; `first` has the place of the first of a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] = {}

    def add(self, reason: str, file: str, record: int) -> None:
        """Count a document that is left out."""
        self[reason] += 1
        self.first.setdefault(reason, formats.place(file, record))

    def __str__(self) -> str:
        """Return all counts with these places."""
        return ", ".join(formats.counted(n, why, self.first.get(why)) for why, n in self.items())


@dataclasses.dataclass
class ReadBudget:
    """Budget for reading the start of some files: remaining records and unpacked bytes."""

    records: int
    bytes: int

    @property
    def is_read(self) -> bool:
        """Return whether nothing remains."""
        return not (self.records and self.bytes)


def read(
    path: Path,
    name: str,
    text_key: str,
    counts: Counter[str],
    start: ReadBudget | None = None,
    *,
    chat: ChatFields | None = None,
) -> Iterator[Document | Broken]:
    """Yield every record of a file, as a text or as what is wrong with it.

    Args:
      path: the file.
      name: its name in errors.
      text_key: the field of a record that contains its text.
      counts: counts of oddities of the file.
      start: the budget, reduced by the bytes read. Where it ends, a text ends and a record that it
        cuts is dropped.
      chat: reads conversations instead of texts.

    Raises:
      DataError: the rest of the file cannot be read.
    """
    if is_text(path) and chat is not None:
        rejected = Rejected(NO_MESSAGES, "a file of this name is read as text")
        if (table := TABLES.get(formats.kind_of(path.name))) is not None:
            rejected.fix = _as_lines(Path(name), table)
        yield Broken(NO_MESSAGES, not_a_conversation(rejected, name, 0), name, 0)
        return
    if is_text(path):
        yield _text(path, name, counts, start)
        return
    format = formats.FORMATS[formats.kind_of(path.name)]
    size = path.stat().st_size
    with _damage_named(name), open(path, "rb") as file, contextlib.ExitStack() as opened:
        stream: IO[bytes] = file
        if format.is_lines:
            stream = opened.enter_context(unpacked(file, path.name))
            lines = _LimitedLines(stream, path, name, counts, start)
            if start is not None or is_packed(path.name):
                stream = cast(IO[bytes], lines)
            elif stream.peek(3).startswith(BYTE_ORDER_MARK):  # type: ignore[attr-defined]
                counts[MARK] += 1
        column = text_key if chat is None else None
        records = format.read(stream, formats.ReadOptions(name, column=column))
        for number, value, share in records:
            if isinstance(value, RecordFault):
                yield _broken(value, name, number)
                continue
            document = _document(value, name, number, text_key, chat)
            if isinstance(document, Document):
                if start is not None and not format.is_lines:
                    start.bytes = max(start.bytes - len(document.text), 0)
                place = file.tell() if share is None else int(size * share)
                document = document._replace(place=place)
            yield document


def _document(
    value: Any, name: str, number: int, text_key: str, chat: ChatFields | None
) -> Document | Broken:
    """Return the text or the conversation of a record."""
    if chat is None:
        text = value.get(text_key) if isinstance(value, dict) else None
        if isinstance(text, str):
            return Document(text, name, number)
        is_there = isinstance(value, dict) and text_key in value
        kind = OTHER_TYPE if is_there else NO_TEXT
        return Broken(kind, _no_text(value, name, number, text_key), name, number)
    try:
        record = value
        if chat.fields and isinstance(value, dict):
            record = record_fields.renamed(value, chat.kind, chat.fields)
        if chat.kind == "prompts":
            conversation = prompts.parse(record)
        else:
            read = preferred.parse if chat.kind in PREFERENCES else conversations.parse
            conversation = read(record, chat.kind, chat.roles)
    except Rejected as rejected:
        if isinstance(value, list):
            rejected.fix = _from_array(Path(name))
        if rejected.reason in OTHER_FIELDS and isinstance(value, dict):
            has_form = not rejected.fix.startswith("--")  # no setting reads the record
            has_turns = rejected.reason == NO_MESSAGES and record_fields.has_turns(value)
            if has_form or has_turns:
                rejected.fix = record_fields.hint(value, chat.kind) or rejected.fix
        is_broken = rejected.reason in conversations.BROKEN
        error = not_a_conversation(rejected, name, number) if is_broken else None
        return Broken(rejected.reason, error, name, number)
    return Document(conversation.text, name, number, conversation=conversation)


@dataclasses.dataclass
class _LimitedLines:
    """Lines of a file within a budget, and within the limit of a compressed document."""

    stream: IO[bytes]
    path: Path
    name: str
    counts: Counter[str]
    start: ReadBudget | None
    number: int = 0  # lines so far
    unpacked: int = 0  # bytes since the last line that was not blank

    def readline(self, _: int = -1) -> bytes:
        """Return the next line; empty at the end of the file or of the budget, which may cut it."""
        start = self.start
        line = self.stream.readline(
            _limit(self.path, self.unpacked) if start is None else start.bytes
        )
        self.number += 1
        if start is not None:
            start.bytes -= len(line)
            if not start.bytes:
                return b""
        self.unpacked += len(line)
        if self.unpacked > MOST_UNPACKED and is_packed(self.path.name):
            raise _unpacks_too_far(self.path, formats.place(self.name, self.number))
        if self.number == 1 and line.startswith(BYTE_ORDER_MARK):
            self.counts[MARK] += 1
        if not line.removeprefix(BYTE_ORDER_MARK).isspace():
            self.unpacked = 0
        return line


def is_text(path: Path) -> bool:
    """Return whether a file is one text; otherwise it contains records."""
    return formats.kind_of(path.name) not in formats.FORMATS


def ending(path: Path) -> str:
    """Return the suffix of the format with its compression: `.jsonl.gz`."""
    return "".join(path.suffixes[-2:]) if is_packed(path.name) else path.suffix


def looks_like_text(path: Path) -> bool:
    """Return whether the first bytes of a file look like something that `read` accepts."""
    if not is_text(path) or is_packed(path.name):
        return True
    with open(path, "rb") as file:
        start = file.read(PROBED_START)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def mended(text: str, counts: Counter[str]) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot, by U+FFFD; keep NUL."""
    if "\0" in text:
        counts[NUL] += 1
    if text.isascii() or not _SURROGATES.search(text):
        return text
    counts[SURROGATE] += 1
    return _SURROGATES.sub("\ufffd", text)


def _text(
    path: Path, name: str, counts: Counter[str], start: ReadBudget | None
) -> Document | Broken:
    with _damage_named(name), open(path, "rb") as file, unpacked(file, path.name) as stream:
        data = stream.read(_limit(path) if start is None else start.bytes)
    if len(data) > MOST_UNPACKED and is_packed(path.name):
        raise _unpacks_too_far(path, name)
    if data.startswith(BYTE_ORDER_MARK):
        counts[MARK] += 1
    is_whole = start is None or len(data) < start.bytes
    if start is not None:
        start.bytes -= len(data)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data.removeprefix(BYTE_ORDER_MARK), final=is_whole)
        return Document(text, name, 0, path.stat().st_size)
    except UnicodeDecodeError as error:
        return Broken(NOT_UTF8, not_utf8(name, error, "byte"), name, 0)


def _broken(fault: RecordFault, name: str, line: int) -> Broken:
    if isinstance(fault.error, UnicodeDecodeError):
        damage = not_utf8(name, fault.error, f"line {line}, byte")
        return Broken(NOT_UTF8, damage, name, line)
    fix = "one JSON object a line\na name that ends in .txt"
    if line == 1 and getattr(fault.error, "doc", "").lstrip().startswith("["):
        fix = _from_array(Path(name))
    damage = DataError(
        "a line is not JSON", where=formats.place(name, line), why=str(fault.error), fix=fix
    )
    return Broken(NOT_JSON, damage, name, line)


def note_of_table(pattern: str) -> str | None:
    """Return that a table is read as one text and how to read its records; None for other files.

    Args:
      pattern: a path or a glob of `data.train`, also with the name of a source before it.
    """
    name = pattern.rpartition("=")[2]
    if (records := TABLES.get(formats.kind_of(name))) is None:
        return None
    note = f"{name} is read as one text, with the delimiters and quotes of its columns"
    is_file = "://" not in name and not any(each in name for each in "*?[")
    read = _as_lines(Path(name), records) if is_file else "jaxlm docs corpus"
    return f"{note}; to read its records: {read}"


def not_utf8(name: str, error: UnicodeDecodeError, unit: str) -> DataError:
    """Return the error of a file that is not UTF-8, whose fix converts it and keeps the old one.

    A file with control characters, as an image has, is no text: the fix hides it.
    """
    path, data = Path(name), error.object
    where = f"{name}, {unit} {error.start}"
    why = f"0x{data[error.start]:02x}: {error.reason}"
    is_marked = any(data.startswith(mark) for mark, _ in MARKS)
    if unit == "byte" and not is_marked and data.translate(None, CONTROLS) != data:
        hidden = path.with_name(f".{path.name}")
        fix = f"{shlex.join(['mv', name, str(hidden)])}    # hidden files are not read"
        why += ", and it has control characters"
        return DataError("a file is no text", where=where, why=why, fix=fix)
    fix = _to_utf8(path, likely_encoding(data))
    return DataError("a file is not UTF-8", where=where, why=why, fix=fix)


def likely_encoding(data: bytes) -> str:
    """Return the name in `iconv` of the likely encoding of bytes that are not UTF-8.

    Bytes from 0x80 to 0x9f are control characters in Latin-1, and quotes and dashes in cp1252.
    """
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return encoding
    if data.translate(None, _CONTROLS_OF_LATIN1) == data:
        return "latin1"
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:  # five of these bytes are no character there
        return "latin1"
    return "cp1252"


def _from_array(path: Path) -> str:
    """Return the command that writes the elements of a JSON array as lines of another file."""
    return _as_lines(path, "json.load(sys.stdin)")


def _as_lines(path: Path, records: str) -> str:
    """Return the command that writes records, a Python expression, as lines of another file."""
    program = f"import csv, json, sys; [print(json.dumps(each)) for each in {records}]"
    lines = path.with_name(f"{path.name.partition('.')[0]}-lines.jsonl")
    unpack = f"{packer} -dc" if (packer := formats.COMPRESSIONS.get(path.suffix)) else "cat"
    file, target = shlex.quote(str(path)), shlex.quote(str(lines))
    return (
        f"{unpack} {file} | python3 -c {shlex.quote(program)} > {target}    # and name these lines"
    )


def _to_utf8(path: Path, encoding: str) -> str:
    """Return the command that converts a file to UTF-8; the old one gets a hidden name."""
    hidden = (path.with_name(f".{path.name}.{kind}") for kind in ("utf8", encoding))
    file, new, old = (shlex.quote(str(each)) for each in (path, *hidden))
    command = f"iconv -f {encoding} -t utf-8"
    if packer := formats.COMPRESSIONS.get(path.suffix):
        command = f"{packer} -dc {file} | {command} | {packer} > {new}"
    else:
        command = f"{command} {file} > {new}"
    return f"{command} && mv {file} {old} && mv {new} {file}    # if it is {NAMES[encoding]}"


def _limit(path: Path, unpacked: int = 0) -> int:
    """Return the number of bytes to request: one above the limit, or all."""
    return MOST_UNPACKED + 1 - unpacked if is_packed(path.name) else -1


def _unpacks_too_far(path: Path, where: str) -> DataError:
    return DataError(
        "a compressed file unpacks to more than the limit of a document",
        where=where,
        why=f"over {MOST_UNPACKED:,} bytes without a document's end,"
        f" from a file of {path.stat().st_size:,}",
        fix="leave it out of the glob\nunpack it, and split it into documents",
    )


@contextlib.contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Name the file in an error of a decompressor or of pyarrow."""
    try:
        yield
    except (DataError, InputMissing, GeneratorExit):
        raise
    except Exception as error:
        # zlib.error, EOFError, ZstdError and ArrowInvalid have no common base.
        what = "a file is damaged or has another format than its name"
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(
            what, where=name, why=why, fix="fetch it again\nleave it out of the glob"
        ) from error


def not_a_conversation(rejected: Rejected, name: str, number: int) -> DataError:
    """Return the error of a record that is no usable conversation."""
    what = f"a record {rejected.reason} is no conversation"
    if rejected.reason == conversations.NO_FIELD:
        what = f"a record is {rejected.reason}"
    elif rejected.reason in (conversations.REFUSED, conversations.NO_MASK):
        what = f"a conversation is {rejected.reason}"
    where = formats.place(name, number)
    return DataError(what, where=where, why=rejected.why, fix=rejected.fix)


def _no_text(record: Any, name: str, number: int, text_key: str) -> NoText:
    is_object = isinstance(record, dict)
    texts = {k: v for k, v in record.items() if isinstance(v, str)} if is_object else {}
    turns = record_fields.proposed(record, "chat") if is_object else ""
    is_conversation = is_object and not record.keys().isdisjoint(("messages", "conversations"))
    if is_conversation:
        fix = "--config.data.kind=chat"
    elif texts:
        longest = max(texts, key=lambda name: len(texts[name]))  # others are titles, addresses
        fix = f"--config.data.text_key={longest}"
        if turns:
            fix = f"--config.data.kind=chat {turns}\n{fix}"
        if {"chosen", "rejected"} <= record.keys():
            fix = f"--config.data.kind=pairs --config.objective.name=preference\n{fix}"
    elif turns:
        fix = f"--config.data.kind=chat {turns}"
    elif isinstance(record, list):
        fix = _from_array(Path(name))
    else:
        fix = "one JSON object a line, with its text in one field"
    error = NoText(
        f"a record has no text under {text_key!r}",
        where=formats.place(name, number),
        why=f"its fields with text: {', '.join(texts) or 'none'}"
        if is_object
        else conversations.described(record),
        fix=fix,
    )
    error.is_conversation, error.is_mapped = is_conversation, bool(turns) and not is_conversation
    return error
