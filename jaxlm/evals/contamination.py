"""Search for texts of evaluated items in the documents that a run trained on.

Example:
  >>> index = ItemIndex({"a": "the cat sat on the mat"})
  >>> index.items_in("He wrote: 'The cat sat, on\\nthe mat.'"), index.items_in("the cat sat")
  (['a'], [])
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlm.corpus import ngrams
from jaxlm.evals import statistics
from jaxlm.evals.metrics import LOSSES

WORDS = 13  # of a run; Brown et al. 2020, arXiv:2005.14165, appendix C
LEAST_WORDS = 5  # of an item that is searched for: shorter ones are everywhere


class ItemIndex:
    """Hashed runs of words of items; an item with fewer than `words` words is one run, whole.

    Words are letters and digits in lower case, so line ends and punctuation do not matter.

    Args:
      texts: text of each item.
      words: length of a run.

    Attributes:
      too_short: items with fewer than LEAST_WORDS words, which are not searched for.
    """

    def __init__(self, texts: Mapping[str, str], words: int = WORDS):
        self._ids = list(texts)
        self.too_short: list[str] = []
        hashes: dict[int, list[np.ndarray]] = {}
        owners: dict[int, list[np.ndarray]] = {}
        for number, (name, text) in enumerate(texts.items()):
            numbers = ngrams.hashed(ngrams.words(text))
            if len(numbers) < LEAST_WORDS:
                self.too_short.append(name)
                continue
            length = min(words, len(numbers))
            made = np.unique(ngrams.runs(numbers, length))
            hashes.setdefault(length, []).append(made)
            owners.setdefault(length, []).append(np.full(len(made), number))
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for length, parts in hashes.items():
            joined = np.concatenate(parts)
            order = np.argsort(joined, kind="stable")
            self._tables[length] = joined[order], np.concatenate(owners[length])[order]

    def items_in(self, document: str) -> list[str]:
        """Return the items that share a run with a document, in their order."""
        numbers = ngrams.hashed(ngrams.words(document))
        touched: set[int] = set()
        for length, (known, owners) in self._tables.items():
            made = np.unique(ngrams.runs(numbers, length))
            begins = np.searchsorted(known, made)
            ends = np.searchsorted(known, made, side="right")
            for number in np.flatnonzero(ends > begins):
                touched.update(owners[begins[number] : ends[number]].tolist())
        return [self._ids[number] for number in sorted(touched)]


def scores(samples: list[dict[str, Any]], touched: set[str]) -> dict[str, Any]:
    """Return counts and estimates of each metric for contaminated items (touched) and the others.

    Args:
      samples: lines of samples.jsonl.
      touched: ids of the contaminated items.
    """
    parts = {
        "touched": [line for line in samples if line["id"] in touched],
        "untouched": [line for line in samples if line["id"] not in touched],
    }
    return {name: _estimates(lines) for name, lines in parts.items()}


def _estimates(lines: list[dict[str, Any]]) -> dict[str, Any]:
    weights = [float(line["weight"]) for line in lines]
    groups = [line["group"] for line in lines]
    metrics = {
        name: statistics.estimate(
            [float(line["metrics"][name]) for line in lines],
            weights,
            groups,
            is_share=name not in LOSSES,
        )._asdict()
        for name in (lines[0]["metrics"] if lines else ())
    }
    return {"items": len(lines), "groups": len(set(groups)), "metrics": metrics}
