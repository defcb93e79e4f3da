"""Removal of documents by lists: of URLs, and of evaluation sets that must not be trained on."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.corpus.config import Decontaminate, Recipe, Urls
from jaxlm.corpus.document import BrokenRecord, CorpusDocument, Removed, Stage
from jaxlm.corpus.ngrams import hashed, runs, words
from jaxlm.corpus.readers.files import read
from jaxlm.data.documents import Corpus


def urls(config: Urls) -> Stage:
    """Remove documents whose URL is blocked. Raises InputMissing if a pattern matches no list.

    An entry with a slash is a URL prefix; others are domains, including their subdomains.
    """
    paths = Corpus.find(config.blocked, "", "urls.blocked").files
    domains = set(itertools.chain.from_iterable(map(_entries, paths)))
    starts = {entry for entry in domains if "/" in entry}
    domains -= starts
    lengths = sorted({len(start) for start in starts})

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        url = document.meta.get(config.key)
        if not isinstance(url, str) or not url:
            return document
        try:
            host = (urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:
            return Removed("malformed", url[:200])
        labels = host.split(".")
        for start in range(len(labels)):
            if (domain := ".".join(labels[start:])) in domains:
                return Removed("domain", domain)
        bare = _bare(url)
        for size in lengths:
            if bare[:size] in starts:
                return Removed("start", bare[:size])
        return document

    return stage


def _entries(path: Path) -> Iterator[str]:
    """Yield the entries of a list: one on a line, without comments after `#`."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if entry := line.partition("#")[0].strip():
            yield _bare(entry)


def _bare(url: str) -> str:
    """Return a URL without scheme and with its host in lower case."""
    rest = url.partition("://")[2] or url
    host, slash, path = rest.partition("/")
    return host.lower() + slash + path


def decontaminate(config: Decontaminate, sets: "Evaluations") -> Stage:
    """Remove documents that share more than `most` runs of words with a record of a set.

    Source: Brown et al. 2020, arXiv:2005.14165, appendix C, also with runs of 13 words. There the
    shared passage is cut out; here the document is removed, naming the record and shared words.
    """

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        text_words = words(document.text)
        numbers = runs(hashed(text_words), config.words)
        shared = np.flatnonzero(sets.holds(numbers))
        if len(np.unique(numbers[shared])) <= config.most:
            return document
        first = int(shared[0])
        name = sets.name(numbers[first])
        names = {sets.name(number).rpartition(", ")[0] for number in np.unique(numbers[shared])}
        for each in sorted(names):
            counts[f"decontaminate: documents that share with {each}"] += 1
        quoted = " ".join(text_words[first : first + config.words])
        return Removed("shared", f"{len(shared)} runs, the first with {name}: {quoted}")

    return stage


class Evaluations:
    """Hashed runs of words of evaluation sets, and the first record of each."""

    def __init__(self, numbers: np.ndarray, origins: np.ndarray, names: list[str], short: int):
        self.numbers, first = np.unique(numbers, return_index=True)
        self._origins, self._names = origins[first], names
        self.records = len(names)
        self.short = short  # records with fewer words than a run, which cannot be found

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """Return which hashes are runs of an evaluation set."""
        places = np.searchsorted(self.numbers, numbers)
        places[places == len(self.numbers)] = 0
        return self.numbers[places] == numbers

    def name(self, number: np.uint64) -> str:
        """Return the first record that contains a run."""
        return self._names[self._origins[np.searchsorted(self.numbers, number)]]


def evaluations(recipe: Recipe) -> Evaluations:
    """Read the evaluation sets of a recipe. Raises InputMissing if a pattern matches no file.

    Raises DataError if a record is broken, as it could then be trained on, or none has a whole run.
    """
    config = recipe.decontaminate
    corpus = Corpus.find(config.against, recipe.text_key, "decontaminate.against")
    every: list[np.ndarray] = []  # hashes of each record
    names: list[str] = []
    longest = 0
    for path, name in zip(corpus.files, corpus.names, strict=True):
        for record in read(path, name, recipe, Counter()):
            if isinstance(record, BrokenRecord):
                raise DataError(
                    "a record of an evaluation set could not be read",
                    where=f"{name}, record {record.record}",
                    why=f"{record.kind}: {record.detail}",
                    fix="leave the file out of decontaminate.against",
                )
            text_words = words(record.text)
            longest = max(longest, len(text_words))
            every.append(runs(hashed(text_words), config.words))
            names.append(f"{name}, record {record.record}")
    sizes = list(map(len, every))
    if not sum(sizes):
        what = f"no record of the evaluation sets has {config.words} words"
        why = f"{len(sizes)} records have fewer; the longest has {longest}"
        flag = f"--config.decontaminate.words={longest}"
        fix = flag if longest else "name evaluation sets with text"
        raise DataError(what, where=", ".join(config.against), why=why, fix=fix)
    origins = np.repeat(np.arange(len(names)), sizes)
    return Evaluations(np.concatenate(every), origins, names, sizes.count(0))
