"""Harmful text, by word lists and a classifier that the user provides."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Harmful
from jaxlm.corpus.filters.linear import LinearClassifier
from jaxlm.corpus.ngrams import hashed, runs, words
from jaxlm.data.documents import Corpus

_NAME = re.compile(r"[\w-]{1,60}")  # a category is also a folder of the output


def harmful(config: Harmful) -> Stage:
    """Remove documents with more than `hits` matches of a list, or with a category of a classifier.

    An entry of one or more words matches regardless of case and of the characters between words,
    in languages with spaces between words.

    Raises:
      InputMissing: a list or a classifier is missing.
      ConfigError: the classifier lacks the label `harmless`.
      DataError: an entry has no words, or a category cannot name a folder.
    """
    lists = _lists(config)
    model = LinearClassifier.read(Path(config.model), "harmful.model") if config.model else None
    categories = []
    if model is not None:
        model.number(config.harmless, "harmful.harmless")
        categories = [_named(label, config.model) for label in model.labels]

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        text_words = words(document.text)
        numbers = hashed(text_words)
        for category, entries in lists.items():
            hits = sorted(
                (int(offset), length)
                for length, known in entries.items()
                for offset in np.flatnonzero(np.isin(runs(numbers, length), known))
            )
            if len(hits) > config.hits:
                quoted = dict.fromkeys(
                    " ".join(text_words[offset : offset + n]) for offset, n in hits
                )
                return Removed(category, f"{len(hits)} of its words: {', '.join(quoted)}"[:200])
        if model is not None:
            probabilities = model.probabilities(document.text)
            for number in np.argsort(-probabilities).tolist():
                if categories[number] != config.harmless and probabilities[number] > config.most:
                    return Removed(categories[number], f"probability {probabilities[number]:.3f}")
        return document

    return stage


def _lists(config: Harmful) -> dict[str, dict[int, np.ndarray]]:
    """Return hashed entries by category and number of words; a category is a file name."""
    categories: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    if config.words:
        for path in Corpus.find(config.words, "", "harmful.words").files:
            category = _named(path.stem, str(path))
            for entry in _entries(path):
                categories[category][len(entry)].append(int(runs(hashed(entry), len(entry))[0]))
    return {
        category: {length: np.array(known, np.uint64) for length, known in entries.items()}
        for category, entries in sorted(categories.items())
    }


def _entries(path: Path) -> Iterator[list[str]]:
    """Yield the words of each entry: one on a line, without comments after `#`."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise _wrong("a list of words is not UTF-8", str(path), str(error)) from error
    for number, line in enumerate(lines, 1):
        if entry := line.partition("#")[0].strip():
            if not (entry_words := words(entry)):
                raise _wrong("an entry has no word", f"{path}, line {number}", f"it is {entry!r}")
            yield entry_words


def _named(category: str, where: str) -> str:
    if _NAME.fullmatch(category):
        return category
    raise _wrong("a category cannot name a folder", where, f"it is {category!r}")


def _wrong(what: str, where: str, why: str) -> DataError:
    return DataError(what, where=where, why=why, fix="use letters, digits, _ and - only")
