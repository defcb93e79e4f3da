"""Settings of a cleaning recipe: from raw files to a clean corpus."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from jaxlm.core.config import setting
from jaxlm.corpus.dedup.config import MinHash, Spans, Substrings
from jaxlm.corpus.filters.config import (
    C4,
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
    SourceCode,
    Urls,
)
from jaxlm.corpus.mix.config import ShardSettings, entry_problems, named

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
WHOLE = "text"  # name of a corpus without parts, when it is a source of shards
DedupName = Literal["exact", "near", "spans", "substrings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits of a file, above which it counts as damaged or as an attack."""

    document_bytes: int = setting(
        2**26, "largest document, and longest line of a table", unit="bytes", low=1
    )
    archive_bytes: int = setting(
        2**34, "largest total size of the unpacked members of one archive", unit="bytes", low=1
    )
    archive_members: int = setting(100_000, "largest number of members of one archive", low=1)
    pdf_pages: int = setting(5_000, "largest number of pages of a PDF file", low=1)
    pdf_seconds: int = setting(
        60,
        "CPU time limit of a PDF file; a file that takes about as long may or may not be read",
        unit="seconds",
        low=1,
    )
    pdf_memory: int = setting(2**31, "memory limit of a PDF file", unit="bytes", low=2**28)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Raw files, the stages that each document passes in order, and deduplication."""

    ROOT: ClassVar[str] = "recipe"  # the name of the whole in `jaxlm config explain`

    source: tuple[str, ...] = setting(
        ("stdlib:train",),
        "globs of files to clean, or URLs such as s3://bucket/*.gz; stdlib:train and"
        " stdlib:validation are the sources of Python's library",
    )
    parts: tuple[str, ...] = setting(
        (),
        "NAME=PATTERN, such as web=crawl/*: a file belongs to the first part whose pattern matches"
        " its name; parts are read in order, counted separately and weighed by"
        " --config.shards.weights",
    )
    text_key: str = setting("text", "field of a record that contains its text")
    unit_bytes: int = setting(
        2**26,
        "size of a unit of work: files are grouped up to it; a killed process repeats one unit",
        unit="bytes",
        low=1,
    )
    reading: ReadLimits = setting(ReadLimits(), "limits of input files")
    stages: tuple[StageName, ...] = setting(
        ("normalise", "length"), "stages that each document passes, in this order"
    )
    dedup: tuple[DedupName, ...] = setting(
        ("exact",), "kinds of duplicates removed among all documents that the stages keep"
    )
    against: tuple[str, ...] = setting(
        (), "globs of output folders of earlier runs; documents kept there count as duplicates"
    )
    length: Length = setting(Length(), "length limits of a document")
    urls: Urls = setting(Urls(), "blocked URLs")
    language: Language = setting(Language(), "languages to keep")
    gopher: Gopher = setting(Gopher(), "Gopher's rules of quality")
    repetition: Repetition = setting(Repetition(), "Gopher's rules of repetition")
    c4: C4 = setting(C4(), "C4's rules")
    fineweb: FineWeb = setting(FineWeb(), "FineWeb's rules")
    code: SourceCode = setting(SourceCode(), "rules for source code")
    pii: Pii = setting(Pii(), "personal data")
    decontaminate: Decontaminate = setting(
        Decontaminate(), "evaluation sets that must not occur in the corpus"
    )
    quality: Quality = setting(Quality(), "threshold of a trained classifier")
    perplexity: Perplexity = setting(Perplexity(), "perplexity limits under a trained model")
    harmful: Harmful = setting(Harmful(), "word lists and classifier of harmful text")
    licence: Licence = setting(Licence(), "licenses to drop")
    near: MinHash = setting(MinHash(), "near duplicates")
    spans: Spans = setting(Spans(), "repeated lines or paragraphs")
    substrings: Substrings = setting(Substrings(), "repeated runs of words")
    shards: ShardSettings = setting(
        ShardSettings(), "token shards of the kept documents, written to the folder shards"
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that each stage is listed once and has the inputs it needs."""
        for name in ("stages", "dedup"):
            twice = sorted(
                {each for each in getattr(self, name) if getattr(self, name).count(each) > 1}
            )
            if twice:
                once = ",".join(dict.fromkeys(getattr(self, name)))
                yield name, f"{twice[0]} is listed twice", f"--config.{name}={once}"
        if not self.source:
            yield "source", "no input files", "jaxlm config explain source"
        yield from entry_problems("parts", self.parts)
        if self.shards.tokenizer:
            for field, why, fix in self.shards.problems_with(self.part_names, "shards."):
                yield f"shards.{field}", why, fix
        elif self.shards != ShardSettings():
            yield (
                "shards.tokenizer",
                "shards are configured, but without a tokenizer none are written",
                "jaxlm config explain shards.tokenizer",
            )
        if "decontaminate" in self.stages and not self.decontaminate.against:
            yield (
                "decontaminate.against",
                "the stage decontaminate needs evaluation sets",
                "jaxlm config explain decontaminate.against",
            )
        if "quality" in self.stages and not self.quality.model:
            yield (
                "quality.model",
                "the stage quality needs a classifier",
                "jaxlm config explain quality.model",
            )
        if "perplexity" in self.stages and not self.perplexity.run:
            yield (
                "perplexity.run",
                "the stage perplexity needs a trained run",
                "jaxlm config explain perplexity.run",
            )
        if "harmful" in self.stages and not (self.harmful.words or self.harmful.model):
            yield (
                "harmful.words",
                "the stage harmful needs word lists or a classifier",
                "jaxlm config explain harmful.words",
            )
        if "urls" in self.stages and not self.urls.blocked:
            yield (
                "urls.blocked",
                "the stage urls needs a blocklist",
                "jaxlm config explain urls.blocked",
            )

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts; (WHOLE,) if there are none."""
        return tuple(named(self.parts)) or (WHOLE,)

    @property
    def order(self) -> tuple[str, ...]:
        """Stages at which a document can be dropped, in the order it passes them."""
        return ("read", *self.stages, *(name for name in get_args(DedupName) if name in self.dedup))
