"""Heuristic filters of quality: length, the rules of Gopher, C4 and FineWeb, and source code."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

import numpy as np

from jaxlm.corpus.config import C4, FineWeb, Gopher, Length, Repetition, SourceCode
from jaxlm.corpus.document import CorpusDocument, Removed, StageResult, stage
from jaxlm.corpus.ngrams import covered, hashed, occurred, runs
from jaxlm.corpus.readers.streams import kind_of


@stage
def length(config: Length, document: CorpusDocument, counts: Counter[str]) -> StageResult:
    """Keep documents with a length between two limits."""
    size = len(document.text)
    if size < config.least:
        return Removed("short", f"{size} characters")
    if size > config.most:
        return Removed("long", f"{size} characters")
    return document


STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS = "•", "‣", "◦", "●", "▪", "-", "*"
ELLIPSES = "...", "…"


@stage
def gopher(config: Gopher, document: CorpusDocument, counts: Counter[str]) -> StageResult:
    """Remove documents by number and length of words, symbols, bullets, ellipses and stop words.

    Source: Rae et al. 2021, arXiv:2112.11446, §A.1.1 "Quality Filtering". Words are separated by
    white space. `symbols` applies to each symbol alone, as in the source, which does not list the
    characters that are bullets.
    """
    text, words = document.text, document.text.split()
    count = len(words)
    if not config.words_least <= count <= config.words_most:
        return Removed("words", f"{count} words")
    if not count:
        return document
    mean = sum(map(len, words)) / count
    if not config.word_length_least <= mean <= config.word_length_most:
        return Removed("word_length", f"a mean of {mean:.2f} characters")
    symbols = {"#": text.count("#"), "ellipses": sum(map(text.count, ELLIPSES))}
    for name, number in symbols.items():
        if number > config.symbols * count:
            return Removed("symbols", f"{number} {name} in {count} words")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    bullets = sum(line.startswith(BULLETS) for line in lines)
    if bullets > config.bullets * len(lines):
        return Removed("bullets", f"{bullets} of {len(lines)} lines")
    ellipses = sum(line.endswith(ELLIPSES) for line in lines)
    if ellipses > config.ellipses * len(lines):
        return Removed("ellipses", f"{ellipses} of {len(lines)} lines")
    alphabetic = sum(any(map(str.isalpha, word)) for word in words)
    if alphabetic < config.alphabetic * count:
        return Removed("alphabetic", f"{alphabetic} of {count} words")
    # Stop words are frequent, so few words are examined.
    stop_words = set[str]()
    for word in words:
        if len(stop_words) >= config.stop_words:
            break
        if (plain := word.strip(".,;:!?\"'()").lower()) in STOP_WORDS:
            stop_words.add(plain)
    if len(stop_words) < config.stop_words:
        return Removed("stop_words", f"{len(stop_words)} of the eight")
    return document


_PARAGRAPHS = re.compile(r"\n\s*\n")


@stage
def repetition(config: Repetition, document: CorpusDocument, counts: Counter[str]) -> StageResult:
    """Remove documents with a large share of repeated lines, paragraphs or runs of words.

    Source: Rae et al. 2021, arXiv:2112.11446, table A1. First occurrences are not counted, so a
    share is what could be cut out. Characters are those of words, without spaces; a word in two
    runs counts once.
    """
    for rule, share, most in _shares(document.text, config):
        if share > most:
            return Removed(rule, f"a share of {share:.3f}")
    return document


def repeated(pieces: list[str]) -> tuple[float, float]:
    """Return the share of pieces that occurred before, and their share of characters.

    Example:
      >>> repeated(["ab", "cd", "ab", "ab"])
      (0.5, 0.5)
    """
    size, first = sum(map(len, pieces)), set(pieces)
    characters = size - sum(map(len, first))
    return (len(pieces) - len(first)) / max(1, len(pieces)), characters / max(1, size)


def _shares(text: str, config: Repetition) -> Iterator[tuple[str, float, float]]:
    """Yield each rule, the share in the text, and its limit; cheap rules first."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    share, characters = repeated(lines)
    yield "lines", share, config.lines
    yield "line_characters", characters, config.line_characters
    share, characters = repeated([part.strip() for part in _PARAGRAPHS.split(text) if part.strip()])
    yield "paragraphs", share, config.paragraphs
    yield "paragraph_characters", characters, config.paragraph_characters
    words = text.split()
    sizes = np.fromiter(map(len, words), np.int64, len(words))
    total = max(1, int(sizes.sum()))
    numbers = hashed(words)
    for length, most in enumerate(config.top, 2):
        yield f"top_{length}_gram", top_share(numbers, sizes, length, total), most
    for length, most in enumerate(config.repeated, 5):
        later = occurred(runs(numbers, length))
        yield f"repeated_{length}_grams", _characters(later, sizes, length) / total, most


def top_share(numbers: np.ndarray, sizes: np.ndarray, length: int, total: int) -> float:
    """Return the share of characters in the most frequent run, the first of equals; 0 if unique."""
    hashes = runs(numbers, length)
    values, first, count = np.unique(hashes, return_index=True, return_counts=True)
    if count.max(initial=1) == 1:
        return 0.0
    top = min(np.flatnonzero(count == count.max()), key=lambda run: first[run])
    return _characters(hashes == values[top], sizes, length) / total


def _characters(starts: np.ndarray, sizes: np.ndarray, length: int) -> int:
    """Count the characters of words in runs of `length` words that begin at `starts`."""
    return int(sizes[covered(np.flatnonzero(starts), length, len(sizes))].sum())


TERMINAL = ".", "!", "?", '"', "\u201d"
_POLICY = re.compile("terms of use|privacy policy|cookie policy|(?:uses|use of|use) cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*(?=\s|$)")


@stage
def c4(config: C4, document: CorpusDocument, counts: Counter[str]) -> StageResult:
    """Keep long lines with terminal punctuation; remove pages with few sentences, braces or filler.

    Source: Raffel et al. 2020, JMLR 21(140), §2.2, without its word list. Sentences are counted by
    their ends, in place of NLTK. Rules on policies and citation marks are those of its program,
    which the paper omits.
    """
    lower = document.text.lower()
    if "lorem ipsum" in lower:
        return Removed("lorem_ipsum", "it contains the phrase")
    if "{" in document.text:
        return Removed("brace", f"at character {document.text.index('{')}")
    lines, cut = [], Counter[str]()
    for line in document.text.split("\n"):
        line = _CITATION.sub("", line.strip())
        if why := _fault(line, config):
            cut[why] += 1
        else:
            lines.append(line)
    text = "\n".join(lines)
    sentences = len(_SENTENCE_END.findall(text))
    if sentences < config.sentences:
        return Removed("sentences", f"{sentences} in the kept lines")
    for why, count in cut.items():
        counts[f"c4: lines {why}"] += count
    return document if text == document.text else document.with_text(text)


def _fault(line: str, config: C4) -> str:
    """Return why a line is cut out, or an empty string."""
    if not line.endswith(TERMINAL) or line.endswith("..."):
        return "without terminal punctuation"
    if len(line.split()) < config.line_words:
        return "too short"
    lower = line.lower()
    if "javascript" in lower:
        return "with javascript"
    return "about a policy" if _POLICY.search(lower) else ""


PUNCTUATION = ".", "!", "?", '"', "'", "\u201d", "\u2019", "\u3002", "\uff01", "\uff1f"


@stage
def fineweb(config: FineWeb, document: CorpusDocument, counts: Counter[str]) -> StageResult:
    """Remove lists and menus: few lines with punctuation, repeated lines, short lines.

    Source: Penedo et al. 2024, arXiv:2406.17557, §3.6. Shares are of nonempty lines.
    """
    lines = [line.strip() for line in document.text.split("\n") if line.strip()]
    if not lines:
        return document
    punctuated = sum(line.endswith(PUNCTUATION) for line in lines) / len(lines)
    if punctuated <= config.punctuated:
        return Removed("punctuation", f"a share of {punctuated:.3f} of the lines")
    short = sum(len(line) < config.short_characters for line in lines) / len(lines)
    if short >= config.short:
        return Removed("short_lines", f"a share of {short:.3f} of the lines")
    _, duplicated = repeated(lines)
    if duplicated >= config.duplicated:
        return Removed("duplicated_lines", f"a share of {duplicated:.3f} of the characters")
    return document


ENDINGS = frozenset(
    ".py .pyi .c .h .cc .cpp .hpp .cs .go .java .js .jsx .ts .tsx .kt .lua .php .pl .r .rb .rs"
    " .scala .sh .swift".split()
)
GENERATED = (
    "auto-generated|autogenerated|automatically generated|@generated|generated by|do not edit"
).split("|")
LOOKED_AT = 5  # lines, in which a generator names itself
_CODE_PARSED = 2**20  # characters; Python's parser takes a hundred times the size of its input


@stage
def code(config: SourceCode, document: CorpusDocument, counts: Counter[str]) -> StageResult:
    """Remove code with long lines or few letters, generated code, and Python with syntax errors.

    Files whose name is not one of code pass.
    Source: Chen et al. 2021, arXiv:2107.03374, §3.1 (generated files, lines of 100 and 1000
    characters, few alphanumeric characters); Li et al. 2023, arXiv:2305.06161, §3.2 (a quarter).
    """
    text, kind = document.text, kind_of(document.file.rpartition("!")[2])
    if kind not in ENDINGS:
        return document
    lines = text.split("\n")
    longest = max(map(len, lines))
    if longest > config.line_most:
        return Removed("long_line", f"{longest} characters")
    mean = len(text) / len(lines)
    if mean > config.line_mean:
        return Removed("long_lines", f"a mean of {mean:.1f} characters")
    alphanumeric = sum(map(str.isalnum, text)) / max(1, len(text))
    if alphanumeric < config.alphanumeric:
        return Removed("alphanumeric", f"a share of {alphanumeric:.3f}")
    head = "\n".join(lines[:LOOKED_AT]).lower()
    if mark := next((mark for mark in GENERATED if mark in head), ""):
        return Removed("generated", f"it contains {mark!r}")
    if kind in (".py", ".pyi") and (fault := _syntax_error(text, PurePath(document.file).name)):
        return Removed("syntax", fault)
    return document


def _syntax_error(text: str, name: str) -> str:
    """Return why Python's parser refuses a text; empty if it accepts it or it is too long."""
    if len(text) > _CODE_PARSED:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are no errors yet
            ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno} of {name}: {error.msg}"[:200]
    except (ValueError, RecursionError, MemoryError) as error:  # NUL, or nested too deeply
        return type(error).__name__
    return ""
