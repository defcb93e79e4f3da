"""Settings of a recipe: from raw files to a clean corpus."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from jaxlm.core.config import setting
from jaxlm.corpus.dedup.config import MinHash, Spans, Substrings
from jaxlm.corpus.filters.config import (
    C4,
    Code,
    Decontaminate,
    FineWeb,
    Gopher,
    Harmful,
    Language,
    Length,
    Licence,
    Perplexity,
    Pii,
    Quality,
    Repetition,
    Urls,
)
from jaxlm.corpus.mix.config import Shards, entry_problems, named

StageName = Literal[
    "mojibake",
    "normalise",
    "length",
    "urls",
    "language",
    "gopher",
    "repetition",
    "c4",
    "fineweb",
    "code",
    "pii",
    "decontaminate",
    "quality",
    "perplexity",
    "harmful",
    "licence",
]
WHOLE = "text"  # name of a corpus that has no parts, as a source of shards
DedupName = Literal["exact", "near", "spans", "substrings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a file may hold before it is taken for damage or for an attack."""

    document_bytes: int = setting(
        2**26, "largest document, and longest line of a file of lines", unit="bytes", low=1
    )
    archive_bytes: int = setting(
        2**34, "most that the members of one archive may unpack to", unit="bytes", low=1
    )
    archive_members: int = setting(100_000, "most members of one archive", low=1)
    pdf_pages: int = setting(5_000, "most pages of a PDF file", low=1)
    pdf_seconds: int = setting(
        60,
        "most time of a core for a PDF file: what takes about as long may be read or not",
        unit="seconds",
        low=1,
    )
    pdf_memory: int = setting(2**31, "most memory for a PDF file", unit="bytes", low=2**28)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Raw files, the stages that each document passes in this order, and what is then found twice."""

    ROOT: ClassVar[str] = "recipe"  # what `jaxlm config explain` calls all of it

    source: tuple[str, ...] = setting(
        ("stdlib:train",),
        "globs of files to clean, or URLs such as s3://bucket/*.gz; stdlib:train and stdlib:validation are Python's library",
    )
    parts: tuple[str, ...] = setting(
        (),
        "NAME=PATTERN, as web=crawl/*: a file belongs to the first whose pattern its name matches, is read after those of the "
        "parts before, and counted with its part; what --config.shards.weights weighs",
    )
    text_key: str = setting("text", "field of a record that holds its text")
    unit_bytes: int = setting(
        2**26,
        "files are worked on together until they hold this much: what is done again after a kill",
        unit="bytes",
        low=1,
    )
    reading: Reading = setting(Reading(), "what a file may hold")
    stages: tuple[StageName, ...] = setting(
        ("normalise", "length"), "what each document passes, in this order"
    )
    dedup: tuple[DedupName, ...] = setting(
        ("exact",), "what is looked for across all documents that the stages kept"
    )
    against: tuple[str, ...] = setting(
        (), "globs of folders that earlier runs wrote: what they kept is no longer new"
    )
    length: Length = setting(Length(), "how long a document may be")
    urls: Urls = setting(Urls(), "places that nothing is taken from")
    language: Language = setting(Language(), "which languages are kept")
    gopher: Gopher = setting(Gopher(), "Gopher's rules of quality")
    repetition: Repetition = setting(Repetition(), "Gopher's rules of repetition")
    c4: C4 = setting(C4(), "C4's rules")
    fineweb: FineWeb = setting(FineWeb(), "FineWeb's rules")
    code: Code = setting(Code(), "what source code must be")
    pii: Pii = setting(Pii(), "personal data")
    decontaminate: Decontaminate = setting(
        Decontaminate(), "evaluation sets that nothing may be shared with"
    )
    quality: Quality = setting(Quality(), "what a classifier of one's own thinks")
    perplexity: Perplexity = setting(Perplexity(), "how surprising it is to a model")
    harmful: Harmful = setting(Harmful(), "what does harm")
    licence: Licence = setting(Licence(), "what it may be used for")
    near: MinHash = setting(MinHash(), "near duplicates")
    spans: Spans = setting(Spans(), "lines or paragraphs that are there twice")
    substrings: Substrings = setting(Substrings(), "runs of words that are there twice")
    shards: Shards = setting(Shards(), "token shards of what is kept, in the folder shards")

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """A stage stands once, and has what it cannot do without."""
        for name in ("stages", "dedup"):
            twice = sorted(
                {each for each in getattr(self, name) if getattr(self, name).count(each) > 1}
            )
            if twice:
                once = ",".join(dict.fromkeys(getattr(self, name)))
                yield name, f"{twice[0]} stands there twice", f"--config.{name}={once}"
        if not self.source:
            yield "source", "nothing to read", "jaxlm config explain source"
        yield from entry_problems("parts", self.parts)
        if self.shards.tokenizer:
            for field, why, fix in self.shards.problems_with(self.part_names, "shards."):
                yield f"shards.{field}", why, fix
        elif self.shards != Shards():
            yield (
                "shards.tokenizer",
                "shards are described, and none are written without a tokenizer",
                "jaxlm config explain shards.tokenizer",
            )
        if "decontaminate" in self.stages and not self.decontaminate.against:
            yield (
                "decontaminate.against",
                "the stage decontaminate has nothing to compare with",
                "jaxlm config explain decontaminate.against",
            )
        if "quality" in self.stages and not self.quality.model:
            yield (
                "quality.model",
                "the stage quality has no classifier",
                "jaxlm config explain quality.model",
            )
        if "perplexity" in self.stages and not self.perplexity.run:
            yield (
                "perplexity.run",
                "the stage perplexity has no model",
                "jaxlm config explain perplexity.run",
            )
        if "harmful" in self.stages and not (self.harmful.words or self.harmful.model):
            yield (
                "harmful.words",
                "the stage harmful has neither lists nor a classifier",
                "jaxlm config explain harmful.words",
            )
        if "urls" in self.stages and not self.urls.blocked:
            yield (
                "urls.blocked",
                "the stage urls has no list",
                "jaxlm config explain urls.blocked",
            )

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts; that of the whole where there are none."""
        return tuple(named(self.parts)) or (WHOLE,)

    @property
    def order(self) -> tuple[str, ...]:
        """Every place where a document can be lost, in the order in which it comes by."""
        return ("read", *self.stages, *(name for name in get_args(DedupName) if name in self.dedup))
