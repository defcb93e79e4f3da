"""Filters that use a model: language, quality, perplexity, harmful text."""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError, DataError, InputMissing, not_installed
from jaxlm.corpus.config import Harmful, Language, Perplexity, Quality
from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.linear import LinearClassifier
from jaxlm.corpus.ngrams import hashed, runs, words
from jaxlm.data.documents import Corpus


def language(config: Language) -> Stage:
    """Keep documents in one of the languages; code and probability become metadata.

    Raises InputMissing if py3langid is not installed, ConfigError if it does not know a language.

    Source: Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool", with
    byte n-grams; the model is in the wheel.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise not_installed("the stage language", "py3langid", "prepare", where="stages") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    known = set(identifier.labels)
    if unknown := [code for code in config.keep if code not in known]:
        what = f"py3langid does not support the language {unknown[0]!r}"
        why = f"it supports {', '.join(sorted(known))}"
        raise ConfigError(what, where="language.keep", why=why, fix="--config.language.keep=en")

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        code, probability = identifier.classify(document.text[: config.read])
        probability = round(float(probability), 3)
        if code not in config.keep:
            return Removed("other", f"{code}, {probability}", {"language": code})
        if probability < config.probability:
            return Removed("unsure", f"{code}, {probability}", {"language": code})
        counts[f"language: {code}"] += 1
        return document.with_text(document.text, language=code, language_probability=probability)

    return stage


def quality(config: Quality) -> Stage:
    """Keep documents with a high probability of the label; it becomes metadata.

    Raises InputMissing if there is no classifier, ConfigError if it lacks the label.
    """
    model = LinearClassifier.read(Path(config.model), "quality.model")
    index = model.number(config.label, "quality.label")

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        probability = round(float(model.probabilities(document.text)[index]), 4)
        if probability < config.least:
            return Removed("low", f"{config.label} {probability}", {"quality": probability})
        return document.with_text(document.text, quality=probability)

    return stage


# The perplexity of a text; None if it is too short to predict anything.
Scorer = Callable[[str], float | None]
MakeScorer = Callable[[Perplexity], Scorer]


def perplexity(config: Perplexity, make: MakeScorer | None) -> Stage:
    """Keep documents with a perplexity between two limits; it becomes metadata.

    `make` opens the model at the first document; it needs JAX, which cleaning does without. Raises
    InputMissing if the run does not exist, or there is no scorer.

    Source: Wenzek et al. 2020, arXiv:1911.00359, §3.3, with thresholds in place of thirds.
    """
    what, why = f"there is no run in {config.run}", "it has no config.json"
    if make is None:
        what = "the stage perplexity has no scorer"
        why = "only the command `jaxlm data run` provides one"
    if make is None or not (Path(config.run) / "config.json").is_file():
        raise InputMissing(what, where="perplexity.run", why=why, fix="find . -name checkpoints")
    scorer = functools.cache(make)

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        score = scorer(config)(document.text)
        if score is None:
            counts["perplexity: too short to have one"] += 1
            return document
        value = float(f"{score:.4g}")
        if value > config.most:
            return Removed("high", f"{value:g}", {"perplexity": value})
        if value < config.least:
            return Removed("low", f"{value:g}", {"perplexity": value})
        return document.with_text(document.text, perplexity=value)

    return stage


_NAME = re.compile(r"[\w-]{1,60}")  # a category is also a folder of the output


def harmful(config: Harmful) -> Stage:
    """Remove documents with more than `hits` matches of a list, or with a category of a classifier.

    Lists and classifier come from the user. An entry of one or more words matches regardless of
    case and of the characters between words, in languages with spaces between words.

    Raises InputMissing if a list or a classifier is missing, ConfigError if it lacks the label
    `harmless`, DataError if an entry has no words or a category cannot name a folder.
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
                quoted = (" ".join(text_words[offset : offset + n]) for offset, n in hits)
                shown = ", ".join(dict.fromkeys(quoted))
                return Removed(category, f"{len(hits)} of its words: {shown}"[:200])
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
