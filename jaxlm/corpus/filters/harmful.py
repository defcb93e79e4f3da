"""What does harm, by lists of words and a classifier that the user brings: none is shipped, as what is harmful is not ours to say."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Harmful
from jaxlm.corpus.filters.linear import Linear
from jaxlm.corpus.ngrams import hashed, runs, words
from jaxlm.data.documents import Corpus

_NAME = re.compile(r"[\w-]{1,60}")  # a category names a folder of the output


def harmful(config: Harmful) -> Stage:
    """Documents with more than `hits` entries of a list, or in which a classifier sees a category.

    An entry is a word or several, found whatever their case and what is between them, in languages with spaces between words.

    Raises:
      InputMissing: where a list or a classifier is not there.
      ConfigError: where the classifier lacks the label `harmless`.
      DataError: where a list has an entry without words, or a category has a name that no folder may have.
    """
    lists = _lists(config)
    model = Linear.read(Path(config.model), "harmful.model") if config.model else None
    seen = []
    if model is not None:
        model.number(config.harmless, "harmful.harmless")
        seen = [_named(label, config.model) for label in model.labels]

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        spoken = words(document.text)
        numbers = hashed(spoken)
        for category, entries in lists.items():
            hits = sorted(
                (int(at), length)
                for length, known in entries.items()
                for at in np.flatnonzero(np.isin(runs(numbers, length), known))
            )
            if len(hits) > config.hits:
                quoted = dict.fromkeys(" ".join(spoken[at : at + n]) for at, n in hits)
                return Removed(category, f"{len(hits)} of its words: {', '.join(quoted)}"[:200])
        if model is not None:
            found = model.probabilities(document.text)
            for number in np.argsort(-found).tolist():
                if seen[number] != config.harmless and found[number] > config.most:
                    return Removed(seen[number], f"probability {found[number]:.3f}")
        return document

    return stage


def _lists(config: Harmful) -> dict[str, dict[int, np.ndarray]]:
    """Of each category the numbers of its entries, by how many words they have. A category is the name of its file."""
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    if config.words:
        for path in Corpus.find(config.words, "", "harmful.words").files:
            category = _named(path.stem, str(path))
            for entry in _entries(path):
                found[category][len(entry)].append(int(runs(hashed(entry), len(entry))[0]))
    return {
        category: {length: np.array(known, np.uint64) for length, known in entries.items()}
        for category, entries in sorted(found.items())
    }


def _entries(path: Path) -> Iterator[list[str]]:
    """The words of each entry: one a line, all behind a `#` left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise _wrong("a list of words is not UTF-8", str(path), str(error)) from error
    for number, line in enumerate(lines, 1):
        if entry := line.partition("#")[0].strip():
            if not (spoken := words(entry)):
                raise _wrong("an entry has no word", f"{path}, line {number}", f"it is {entry!r}")
            yield spoken


def _named(category: str, where: str) -> str:
    if _NAME.fullmatch(category):
        return category
    raise _wrong("a category cannot name a folder", where, f"it is {category!r}")


def _wrong(what: str, where: str, why: str) -> DataError:
    return DataError(what, where=where, why=why, fix="mend it: letters, digits, _ and - will do")
