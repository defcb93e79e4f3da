"""Settings of the filters of single documents; the defaults are those of the cited sources."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

PiiKind = Literal["email", "phone", "ip", "card", "iban", "us_ssn", "national_id", "key"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """Length limits of a document."""

    least: int = setting(200, "shortest text", unit="characters", low=0)
    most: int = setting(10_000_000, "longest text", unit="characters", low=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that the limits are in order."""
        if self.least > self.most:
            yield "least", f"it is above most = {self.most}", f"--config.length.least={self.most}"


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
        0.12, "share of lines ending in punctuation; it must be larger", low=0, high=1
    )
    duplicated: float = setting(
        0.1, "share of characters in repeated lines; it must be smaller", low=0, high=1
    )
    short: float = setting(0.67, "share of short lines; it must be smaller", low=0, high=1)
    short_characters: int = setting(
        30, "length below which a line is short", unit="characters", low=1
    )


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
    action: Literal["mask", "remove"] = setting(
        "mask", "replace a match by <EMAIL> and the like, or remove the document"
    )
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

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that the limits are in order."""
        if self.least > self.most:
            yield (
                "least",
                f"it is above most = {self.most}",
                f"--config.perplexity.least={self.most}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harmful:
    """Word lists and a classifier of harmful text."""

    words: tuple[str, ...] = setting(
        (), "globs of lists with one or more words on each line; the file name is the category"
    )
    hits: int = setting(2, "largest number of matches of a list in a document", low=0)
    model: str = setting(
        "",
        "folder of a classifier of categories, made by `jaxlm data train-classifier`",
    )
    harmless: str = setting("harmless", "label of harmless text")
    most: float = setting(0.5, "highest probability of a category", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Licence:
    """Licenses that texts state."""

    drop: tuple[str, ...] = setting(
        (),
        "SPDX names to drop; GPL means every GPL-..., LicenseRef those without an SPDX name",
    )
    unknown: Literal["keep", "remove"] = setting("keep", "action on a text without a license")
    read: int = setting(4000, "length of the beginning to examine", unit="characters", low=1)
