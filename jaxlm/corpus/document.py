"""What flows through the stages of a recipe: documents, and what becomes of those that do not reach its end."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A text, where it came from, and what else its record said. A member of an archive is in the file ARCHIVE!MEMBER."""

    text: str
    file: str
    record: int
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def with_text(self, text: str, **meta: Any) -> "Document":
        """The same document with another text, and with more in its meta."""
        return dataclasses.replace(self, text=text, meta={**self.meta, **meta})


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """Why a stage lets a document go no further: the rule, and the numbers that broke it."""

    rule: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """A record that cannot be read as a document: its class, and what was found."""

    kind: str
    file: str
    record: int
    detail: str


# What a stage changes in the documents that it lets pass, it counts.
Stage = Callable[[Document, Counter[str]], Document | Removed]


def to_line(value: Document | Broken, **more: Any) -> bytes:
    """A line of JSON. What UTF-8 cannot spell, as halves of surrogate pairs in names, becomes a question mark."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    text = json.dumps(fields | more, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode(errors="replace") + b"\n"


def from_line(line: bytes) -> Document:
    """The document that `to_line` wrote, without what was added to it."""
    fields = json.loads(line)
    return Document(fields["text"], fields["file"], fields["record"], fields["meta"])
