"""Settings of the stages that look at one document at a time. Defaults are those of the sources that the stages name."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

PiiKind = Literal["email", "phone", "ip", "card", "iban", "us_ssn", "national_id", "key"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """How long a document may be."""

    least: int = setting(200, "shortest text", unit="characters", low=0)
    most: int = setting(10_000_000, "longest text", unit="characters", low=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """There is a length between the two."""
        if self.least > self.most:
            yield "least", f"it is above most = {self.most}", f"--config.length.least={self.most}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Urls:
    """Places that nothing is taken from."""

    blocked: tuple[str, ...] = setting(
        (), "globs of lists: a domain (and all below it) or the start of a URL on each line"
    )
    key: str = setting("url", "field of a record that holds its URL")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """Which languages are kept, as py3langid tells them."""

    keep: tuple[str, ...] = setting(("en",), "codes of ISO 639-1")
    probability: float = setting(0.65, "lowest share of belief in the language", low=0.0, high=1.0)
    read: int = setting(10_000, "how much of a document is looked at", unit="characters", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gopher:
    """Gopher's rules of quality; they are meant for English prose."""

    words_least: int = setting(50, "fewest words", low=0)
    words_most: int = setting(100_000, "most words", low=1)
    word_length_least: float = setting(3.0, "shortest mean of a word", unit="characters", low=0)
    word_length_most: float = setting(10.0, "longest mean of a word", unit="characters", above=0)
    symbols: float = setting(0.1, "most # or ellipses, each, a word", low=0)
    bullets: float = setting(0.9, "largest share of lines that start with a bullet", low=0, high=1)
    ellipses: float = setting(0.3, "largest share of lines that end in an ellipsis", low=0, high=1)
    alphabetic: float = setting(0.8, "smallest share of words with a letter", low=0, high=1)
    stop_words: int = setting(2, "fewest of the eight stop words that must be there", low=0, high=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
    """Gopher's rules of repetition: shares that are the largest allowed."""

    lines: float = setting(0.30, "share of lines that stood before", low=0, high=1)
    paragraphs: float = setting(0.30, "share of paragraphs that stood before", low=0, high=1)
    line_characters: float = setting(0.20, "share of characters in such lines", low=0, high=1)
    paragraph_characters: float = setting(
        0.20, "share of characters in such paragraphs", low=0, high=1
    )
    top: tuple[float, float, float] = setting(
        (0.20, 0.18, 0.16), "share of characters in the commonest 2-, 3-, 4-gram of words", low=0
    )
    repeated: tuple[float, float, float, float, float, float] = setting(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        "share of characters in 5- to 10-grams of words that stand there more than once",
        low=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4:
    """C4's rules: lines are cut out, then whole documents go."""

    line_words: int = setting(3, "fewest words of a line", low=0)
    sentences: int = setting(5, "fewest sentences of a document", low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineWeb:
    """What FineWeb added to the rules of Gopher and C4."""

    punctuated: float = setting(
        0.12, "a larger share of lines must end in punctuation", low=0, high=1
    )
    duplicated: float = setting(
        0.1, "a smaller share of characters must be in lines that stood before", low=0, high=1
    )
    short: float = setting(0.67, "a smaller share of lines must be short", low=0, high=1)
    short_characters: int = setting(30, "what a short line is", unit="characters", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """What source code must be; text in other files passes."""

    line_mean: float = setting(100.0, "longest mean of a line", unit="characters", above=0)
    line_most: int = setting(1000, "longest line", unit="characters", low=1)
    alphanumeric: float = setting(0.25, "smallest share of letters and digits", low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pii:
    """What tells who or where a person is, and what opens their doors."""

    kinds: tuple[PiiKind, ...] = setting(
        ("email", "phone", "ip", "card", "iban", "us_ssn", "key"),
        "what is looked for; national_id, of ten states, needs jaxlm[prepare]",
    )
    action: Literal["mask", "remove"] = setting(
        "mask", "write <EMAIL> and the like in its place, or remove the document"
    )
    finder: Literal["forms", "presidio"] = setting(
        "forms", "our own forms and check digits, or those of Presidio; keys are always ours"
    )
    score: float = setting(0.4, "lowest score of Presidio that counts", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decontaminate:
    """Evaluation sets that no document may share a run of words with."""

    against: tuple[str, ...] = setting((), "globs of evaluation sets, read as the source is")
    words: int = setting(13, "length of a run of words", low=1)
    most: int = setting(0, "runs that a document may share", low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """What a classifier of one's own, made by `jaxlm data train-classifier`, thinks of a document."""

    model: str = setting("", "the classifier's folder")
    label: str = setting("good", "its label whose probability counts")
    least: float = setting(0.5, "lowest probability that is kept", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How surprising a document is to a run of `jaxlm train`. On an accelerator `--workers=1`: each process opens the run."""

    run: str = setting("", "directory of the run; its newest checkpoint is taken")
    tokens: int = setting(4096, "how much of a document is scored", low=2)
    least: float = setting(0.0, "lowest perplexity: what is known by heart lies below", low=0)
    most: float = setting(1000.0, "highest perplexity: what is no language lies above", above=0)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """There is a perplexity between the two."""
        if self.least > self.most:
            yield (
                "least",
                f"it is above most = {self.most}",
                f"--config.perplexity.least={self.most}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harmful:
    """What does harm, by lists and a classifier of one's own."""

    words: tuple[str, ...] = setting(
        (), "globs of lists, a word or several on each line; a file's name is its category"
    )
    hits: int = setting(2, "most entries of a list that a document may hold", low=0)
    model: str = setting(
        "",
        "folder of a classifier whose labels are categories, made by `jaxlm data train-classifier`",
    )
    harmless: str = setting("harmless", "its label of what does no harm")
    most: float = setting(0.5, "highest probability of a category", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Licence:
    """Under which licence a document says that it stands."""

    drop: tuple[str, ...] = setting(
        (),
        "names of SPDX that are not kept; GPL stands for every GPL-..., as LicenseRef for what has none",
    )
    unknown: Literal["keep", "remove"] = setting("keep", "what becomes of one that says nothing")
    read: int = setting(4000, "how much of its beginning is looked at", unit="characters", low=1)
