"""Settings of a cleaning recipe: from raw files to a clean corpus.

Defaults of the filters are those of the sources that the filters cite.

Example:
  >>> Recipe(stages=("length", "pii"), dedup=("near", "exact")).order
  ('read', 'length', 'pii', 'exact', 'near')
"""

import dataclasses
from typing import ClassVar, Literal, get_args

from jaxlm.core.config import setting
from jaxlm.corpus.mix.config import Problems, ShardSettings, entry_problems, named

PiiKind = Literal["email", "phone", "ip", "card", "iban", "us_ssn", "national_id", "key"]


def _order_problems(stage: str, least: float, most: float) -> Problems:
    if least > most:
        yield "least", f"it is above most = {most}", f"--config.{stage}.least={most}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """Length limits of a document."""

    least: int = setting(200, "shortest text", unit="characters", low=0)
    most: int = setting(10_000_000, "longest text", unit="characters", low=1)

    def problems(self) -> Problems:
        """Check that the limits are in order."""
        yield from _order_problems("length", self.least, self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Urls:
    """Blocked URLs."""

    blocked: tuple[str, ...] = setting(
        (), "globs of blocklists: on each line a domain, with its subdomains, or a URL prefix"
    )
    key: str = setting("url", "field of a record that contains its URL")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """Languages to keep, as identified by py3langid."""

    keep: tuple[str, ...] = setting(("en",), "ISO 639-1 codes")
    probability: float = setting(0.65, "lowest probability of the language", low=0.0, high=1.0)
    read: int = setting(10_000, "length of the text to examine", unit="characters", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gopher:
    """Gopher's quality rules, meant for English prose."""

    words_least: int = setting(50, "fewest words", low=0)
    words_most: int = setting(100_000, "most words", low=1)
    word_length_least: float = setting(3.0, "smallest mean word length", unit="characters", low=0)
    word_length_most: float = setting(10.0, "largest mean word length", unit="characters", above=0)
    symbols: float = setting(0.1, "largest ratio of # to words, and of ellipses to words", low=0)
    bullets: float = setting(0.9, "largest share of lines that start with a bullet", low=0, high=1)
    ellipses: float = setting(0.3, "largest share of lines that end in an ellipsis", low=0, high=1)
    alphabetic: float = setting(0.8, "smallest share of words with a letter", low=0, high=1)
    stop_words: int = setting(2, "fewest of the eight stop words", low=0, high=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
    """Gopher's repetition rules: the largest shares allowed."""

    lines: float = setting(0.30, "share of repeated lines", low=0, high=1)
    paragraphs: float = setting(0.30, "share of repeated paragraphs", low=0, high=1)
    line_characters: float = setting(0.20, "share of characters in repeated lines", low=0, high=1)
    paragraph_characters: float = setting(
        0.20, "share of characters in repeated paragraphs", low=0, high=1
    )
    top: tuple[float, float, float] = setting(
        (0.20, 0.18, 0.16), "share of characters in the most frequent 2-, 3-, 4-gram", low=0
    )
    repeated: tuple[float, float, float, float, float, float] = setting(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        "share of characters in repeated 5- to 10-grams of words",
        low=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4:
    """C4's rules: lines are cut out, then whole documents removed."""

    line_words: int = setting(3, "fewest words of a line", low=0)
    sentences: int = setting(5, "fewest sentences of a document", low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineWeb:
    """Rules that FineWeb added to those of Gopher and C4."""

    punctuated: float = setting(
        0.12, "smallest share of punctuated lines, exclusive", low=0, high=1
    )
    duplicated: float = setting(0.1, "largest share of repeated text, exclusive", low=0, high=1)
    short: float = setting(0.67, "largest share of short lines, exclusive", low=0, high=1)
    short_characters: int = setting(30, "length of short lines", unit="characters", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceCode:
    """Rules for source code; other files pass."""

    line_mean: float = setting(100.0, "largest mean line length", unit="characters", above=0)
    line_most: int = setting(1000, "longest line", unit="characters", low=1)
    alphanumeric: float = setting(0.25, "smallest share of letters and digits", low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pii:
    """Personal data and credentials."""

    kinds: tuple[PiiKind, ...] = setting(
        ("email", "phone", "ip", "card", "iban", "us_ssn", "key"),
        "kinds to find; national_id, of ten states, needs jaxlm[prepare]",
    )
    action: Literal["mask", "remove"] = setting("mask", "write e.g. <EMAIL>, or remove documents")
    finder: Literal["forms", "presidio"] = setting(
        "forms", "patterns and check digits of jaxlm or of Presidio; keys are always jaxlm's"
    )
    score: float = setting(0.4, "lowest score of a Presidio match", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decontaminate:
    """Evaluation sets that must not occur in the corpus."""

    against: tuple[str, ...] = setting((), "globs of evaluation sets, in any format of the source")
    words: int = setting(13, "length of a run of words", low=1)
    most: int = setting(0, "largest number of shared runs", low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """Threshold of a classifier made by `jaxlm data train-classifier`."""

    model: str = setting("", "the classifier's folder")
    label: str = setting("good", "label whose probability is compared")
    least: float = setting(0.5, "lowest probability to keep", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Perplexity limits under a run of `jaxlm train`.

    On an accelerator use `--workers=1`: each process loads the model.
    """

    run: str = setting("", "directory of the run; its newest checkpoint is used")
    tokens: int = setting(4096, "number of tokens of a document to score", low=2)
    least: float = setting(0.0, "lowest perplexity; memorized text is below", low=0)
    most: float = setting(1000.0, "highest perplexity; text that is no language is above", above=0)

    def problems(self) -> Problems:
        """Check that the limits are in order."""
        yield from _order_problems("perplexity", self.least, self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harmful:
    """Word lists and a classifier of harmful text."""

    words: tuple[str, ...] = setting(
        (), "globs of lists with one or more words on each line; the file name is the category"
    )
    hits: int = setting(2, "largest number of matches of a list in a document", low=0)
    model: str = setting(
        "", "folder of a classifier of categories, made by `jaxlm data train-classifier`"
    )
    harmless: str = setting("harmless", "label of harmless text")
    most: float = setting(0.5, "highest probability of a category", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Licence:
    """Licenses that texts state."""

    drop: tuple[str, ...] = setting(
        (), "SPDX names to drop; GPL means every GPL-..., LicenseRef those without an SPDX name"
    )
    unknown: Literal["keep", "remove"] = setting("keep", "action on a text without a license")
    read: int = setting(4000, "length of the beginning to examine", unit="characters", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinHash:
    """Near duplicates. `dedup.minhash.recall` computes the share of them that is found."""

    words: int = setting(5, "length of the compared runs of words", low=1)
    bands: int = setting(16, "bands of a signature; more find more pairs", low=1, high=256)
    rows: int = setting(8, "values in a band; more compare fewer dissimilar pairs", low=1, high=64)
    jaccard: float = setting(
        0.7, "smallest share of equal signature values of near duplicates", low=0, high=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """Lines or paragraphs that occurred before, in any document, are cut out."""

    unit: Literal["line", "paragraph"] = setting("paragraph", "unit; empty lines end paragraphs")
    characters: int = setting(100, "smallest length to cut", unit="characters", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Substrings:
    """Runs of words that occurred before, in any document and at any position."""

    words: int = setting(50, "length of a run; only words are compared", low=2)
    action: Literal["cut", "remove"] = setting("cut", "cut runs out, or remove whole documents")
    share: float = setting(0.5, "largest share of words in runs, if removing", low=0, high=1)


StageName = Literal[
    "mojibake",
    "normalize",
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

    document_bytes: int = setting(2**26, "largest document or line", unit="bytes", low=1)
    archive_bytes: int = setting(2**34, "unpacked size of an archive", unit="bytes", low=1)
    archive_members: int = setting(100_000, "largest number of members of one archive", low=1)
    pdf_pages: int = setting(5_000, "largest number of pages of a PDF file", low=1)
    # A file that takes about as long may or may not be read.
    pdf_seconds: int = setting(60, "CPU time limit of a PDF file", unit="seconds", low=1)
    pdf_memory: int = setting(2**31, "memory limit of a PDF file", unit="bytes", low=2**28)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Raw files, the stages that each document passes in order, and deduplication."""

    ROOT: ClassVar[str] = "recipe"  # the name of the whole in `jaxlm config explain`
    VERB: ClassVar[str] = "data run --out=out"  # the verb that reads it

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
        ("normalize", "length"),
        "stages that each document passes, in this order",
        formerly=("stages", {"normalise": "normalize"}),
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

    def problems(self) -> Problems:
        """Check that each stage is listed once and has the inputs it needs."""
        for name in ("stages", "dedup"):
            names = getattr(self, name)
            if twice := sorted({each for each in names if names.count(each) > 1}):
                once = ",".join(dict.fromkeys(names))
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
        harmful = self.harmful.words or self.harmful.model
        needs = (
            ("decontaminate.against", self.decontaminate.against, "evaluation sets"),
            ("quality.model", self.quality.model, "a classifier"),
            ("perplexity.run", self.perplexity.run, "a trained run"),
            ("harmful.words", harmful, "word lists or a classifier"),
            ("urls.blocked", self.urls.blocked, "a blocklist"),
        )
        for field, value, what in needs:
            stage = field.partition(".")[0]
            if stage in self.stages and not value:
                yield field, f"the stage {stage} needs {what}", f"jaxlm config explain {field}"

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts; (WHOLE,) if there are none."""
        return tuple(named(self.parts)) or (WHOLE,)

    @property
    def order(self) -> tuple[str, ...]:
        """Stages at which a document can be dropped, in the order it passes them."""
        return ("read", *self.stages, *(name for name in get_args(DedupName) if name in self.dedup))
