"""Records that pass through the stages of a recipe, results of a stage, and their counts."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxlm.core.errors import JaxlmError


@dataclasses.dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A text, its origin, and the other fields of its record.

    A member of an archive has the file name ARCHIVE!MEMBER.

    Example:
      >>> document = CorpusDocument("A text.", "a.jsonl", 1, {"url": "https://example.org"})
      >>> document.with_text(document.text, language="en").meta
      {'url': 'https://example.org', 'language': 'en'}
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
    """The rule by which a stage removed a document, and the values that violated it.

    `measured` are these values by the name that they have in the metadata of a kept document.
    """

    rule: str
    detail: str
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that cannot be read as a document: the kind of damage and its detail."""

    kind: str
    file: str
    record: int
    detail: str


# A stage counts the changes that it makes to documents that pass.
StageResult = CorpusDocument | Removed
Stage = Callable[[CorpusDocument, Counter[str]], StageResult]
_Settings = TypeVar("_Settings")


def stage(
    apply: Callable[[_Settings, CorpusDocument, Counter[str]], StageResult],
) -> Callable[[_Settings], Stage]:
    """Turn a function of settings, document and counts into one of settings that returns a stage.

    Example:
      >>> @stage
      ... def lower(language: str, document: CorpusDocument, counts: Counter[str]) -> StageResult:
      ...     counts["lower: documents"] += 1
      ...     return document.with_text(document.text.lower(), language=language)
      >>> lower("en")(CorpusDocument("A Text", "a.txt", 1), Counter()).text
      'a text'
    """
    return lambda settings: functools.partial(apply, settings)


def to_line(value: CorpusDocument | BrokenRecord, **more: Any) -> bytes:
    """Return a line of JSON. Lone surrogates, as in file names, become question marks."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    text = json.dumps(fields | more, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode(errors="replace") + b"\n"


def from_line(line: bytes) -> CorpusDocument:
    """Parse the document of a line of `to_line`, without the additional fields."""
    fields = json.loads(line)
    return CorpusDocument(fields["text"], fields["file"], fields["record"], fields["meta"])


def bins(document: CorpusDocument) -> dict[str, str]:
    """Return the bin of a document in each histogram: its lower limit, or its language.

    Characters and perplexity are counted by powers of two, probabilities by tenths.

    Example:
      >>> bins(CorpusDocument("ten words!", "a.txt", 1, {"language": "en", "quality": 0.97}))
      {'characters': '8', 'language': 'en', 'quality': '0.9'}
    """
    named = {"characters": str(1 << max(len(document.text), 1).bit_length() - 1)}
    meta = document.meta
    if isinstance(language := meta.get("language"), str):
        named["language"] = language
    if isinstance(quality := meta.get("quality"), float):
        named["quality"] = f"{min(math.floor(10 * quality), 9) / 10:.1f}"
    if isinstance(perplexity := meta.get("perplexity"), float) and math.isfinite(perplexity):
        named["perplexity"] = str(1 << max(int(perplexity), 1).bit_length() - 1)
    return named


@dataclasses.dataclass
class Counts:
    """Documents and characters by outcome, changes made, and histograms.

    Outcomes are `read`, `kept`, `removed.STAGE.RULE` and `broken.KIND`. A histogram counts kept and
    removed documents by a measure: `MEASURE.kept.BIN`, see `bins`.
    """

    documents: Counter[str] = dataclasses.field(default_factory=Counter)
    characters: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: Counter[str] = dataclasses.field(default_factory=Counter)
    histograms: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, outcome: str, text: str = "", count: int = 1) -> None:
        """Count a document, or with -1 take it back."""
        self.documents[outcome] += count
        self.characters[outcome] += count * len(text)

    def measure(self, outcome: str, document: CorpusDocument, count: int = 1) -> None:
        """Count a document in the histograms of an outcome, or with -1 take it back."""
        for measure, name in bins(document).items():
            self.histograms[f"{measure}.{outcome}.{name}"] += count

    def __iadd__(self, other: "Counts") -> "Counts":
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))
        return self

    def check(self, where: str) -> None:
        """Raise JaxlmError unless every document read is kept, removed or broken exactly once."""
        totals = Counter[str]()
        for outcome, count in self.documents.items():
            totals[outcome.partition(".")[0]] += count
        if totals["read"] != totals["kept"] + totals["removed"] + totals["broken"]:
            numbers = ", ".join(f"{totals[name]} {name}" for name in ("kept", "removed", "broken"))
            what = "documents were lost or counted twice"
            why = f"{totals['read']} read, but {numbers}"
            raise JaxlmError(what, where=where, why=why, fix="report it with the recipe")

    def under(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (suffix, count) of the outcomes below `prefix`, the most frequent first."""
        counts = [
            (name.removeprefix(f"{prefix}."), count)
            for name, count in self.documents.items()
            if name.startswith(f"{prefix}.") and count
        ]
        yield from sorted(counts, key=lambda pair: (-pair[1], pair[0]))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, sorted by name: equal counts give equal bytes."""
        return {
            field.name: dict(sorted(getattr(self, field.name).items()))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Counts":
        """Restore from `to_json`."""
        return cls(**{field.name: Counter(data[field.name]) for field in dataclasses.fields(cls)})
