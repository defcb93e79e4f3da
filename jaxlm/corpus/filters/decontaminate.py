"""Evaluation sets that no document may share a run of words with."""

from collections import Counter

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import Broken, Document, Removed, Stage
from jaxlm.corpus.filters.config import Decontaminate
from jaxlm.corpus.ngrams import hashed, runs, words
from jaxlm.corpus.readers.files import read
from jaxlm.data.documents import Corpus


def decontaminate(config: Decontaminate, found: "Evaluations") -> Stage:
    """Documents that share more than `most` runs of words with a record of an evaluation set.

    Source: Brown et al. 2020, arXiv:2005.14165, appendix C, where runs have 13 words too. There a text is cut around what it
    shares; here the document goes, with the record that it shares and the first shared words.
    """

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        spoken = words(document.text)
        numbers = runs(hashed(spoken), config.words)
        shared = np.flatnonzero(found.holds(numbers))
        if len(np.unique(numbers[shared])) <= config.most:
            return document
        first = int(shared[0])
        name = found.name(numbers[first])
        sets = {found.name(number).rpartition(", ")[0] for number in np.unique(numbers[shared])}
        for each in sorted(sets):
            counts[f"decontaminate: documents that share with {each}"] += 1
        quoted = " ".join(spoken[first : first + config.words])
        return Removed("shared", f"{len(shared)} runs, the first with {name}: {quoted}")

    return stage


class Evaluations:
    """The runs of words of evaluation sets, and where each stands first."""

    def __init__(self, numbers: np.ndarray, origins: np.ndarray, names: list[str], short: int):
        self.numbers, first = np.unique(numbers, return_index=True)
        self._origins, self._names = origins[first], names
        self.records = len(names)
        self.short = short  # records with fewer words than a run, which cannot be looked for

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """Which of the numbers are runs of an evaluation set."""
        at = np.searchsorted(self.numbers, numbers)
        at[at == len(self.numbers)] = 0
        return self.numbers[at] == numbers

    def name(self, number: np.uint64) -> str:
        """The record in which a run stands first."""
        return self._names[self._origins[np.searchsorted(self.numbers, number)]]


def evaluations(recipe: Recipe) -> Evaluations:
    """What the evaluation sets of a recipe hold.

    Raises:
      InputMissing: where a pattern matches no file.
      DataError: where a record is broken, as one that is not compared could be trained on; or none is as long as a run.
    """
    config = recipe.decontaminate
    corpus = Corpus.find(config.against, recipe.text_key, "decontaminate.against")
    numbers: list[np.ndarray] = []
    origins: list[np.ndarray] = []
    names: list[str] = []
    short = longest = 0
    for path, name in zip(corpus.files, corpus.names, strict=True):
        for record in read(path, name, recipe, Counter()):
            if isinstance(record, Broken):
                raise DataError(
                    "a record of an evaluation set cannot be read",
                    where=f"{name}, record {record.record}",
                    why=f"{record.kind}: {record.detail}",
                    fix="leave the file out of decontaminate.against",
                )
            spoken = words(record.text)
            longest = max(longest, len(spoken))
            found = runs(hashed(spoken), config.words)
            short += not len(found)
            numbers.append(found)
            origins.append(np.full(len(found), len(names)))
            names.append(f"{name}, record {record.record}")
    if not sum(map(len, numbers)):
        raise DataError(
            f"no record of the evaluation sets has {config.words} words",
            where=", ".join(config.against),
            why=f"{short} records have fewer, of which the longest has {longest}",
            fix=f"--config.decontaminate.words={longest}"
            if longest
            else "name evaluation sets that hold text",
        )
    return Evaluations(np.concatenate(numbers), np.concatenate(origins), names, short)
