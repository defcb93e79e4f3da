"""The records that pass through the stages of a recipe, and the results of a stage."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A text, its origin, and the other fields of its record.

    A member of an archive has the file name ARCHIVE!MEMBER.
    """

    text: str
    file: str
    record: int
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def with_text(self, text: str, **meta: Any) -> "CorpusDocument":
        """Return the document with another text and with `meta` merged into its metadata."""
        return dataclasses.replace(self, text=text, meta={**self.meta, **meta})


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """The rule by which a stage removed a document, and the values that violated it."""

    rule: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that cannot be read as a document: the kind of damage and its detail."""

    kind: str
    file: str
    record: int
    detail: str


# A stage counts the changes that it makes to documents that pass.
Stage = Callable[[CorpusDocument, Counter[str]], CorpusDocument | Removed]


def to_line(value: CorpusDocument | BrokenRecord, **more: Any) -> bytes:
    """Return a line of JSON. Lone surrogates, as in file names, become question marks."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    text = json.dumps(fields | more, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode(errors="replace") + b"\n"


def from_line(line: bytes) -> CorpusDocument:
    """Parse the document of a line of `to_line`, without the additional fields."""
    fields = json.loads(line)
    return CorpusDocument(fields["text"], fields["file"], fields["record"], fields["meta"])
