"""A linear classifier of text; numpy alone applies it, so cleaning needs no accelerator.

`recipes.train_classifier` makes one. Its folder contains classifier.safetensors (weights, bias) and
classifier.json (labels, features, measured accuracy).
"""

import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.core.nearest import nearest_word
from jaxlm.corpus.ngrams import hashed, runs, words

TENSORS, ABOUT = "classifier.safetensors", "classifier.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """Features of a text: hashed runs of words."""

    buckets: int = 2**18  # size of the hash table
    run: int = 2  # words of the longest run
    words: int = 2000  # words of the beginning that are used

    def of(self, text: str) -> np.ndarray:
        """Return i64[n]: the sorted unique buckets of all runs of 1 to `run` words."""
        numbers = hashed(words(text)[: self.words])
        every = [runs(numbers, length) for length in range(1, self.run + 1)]
        return np.unique(np.concatenate(every) % np.uint64(self.buckets)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class LinearClassifier:
    """Probabilities softmax(bias + sum of the weights of a text's n buckets / sqrt(n)).

    Source: Joulin et al. 2017, "Bag of Tricks for Efficient Text Classification", §2, with hashed
    runs of words; here without a hidden layer, and divided by sqrt(n) instead of n.
    """

    labels: tuple[str, ...]
    features: Features
    weights: np.ndarray  # f32[buckets, labels]
    bias: np.ndarray  # f32[labels]

    def probabilities(self, text: str) -> np.ndarray:
        """Return f64[labels]; a text without words has those of the bias."""
        buckets = self.features.of(text)
        logits = self.weights[buckets].sum(axis=0, dtype=np.float64) / max(1, len(buckets)) ** 0.5
        logits += self.bias
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()

    def write(self, folder: Path, about: dict[str, Any]) -> None:
        """Write both files, the description last; `about` is added to it."""
        from safetensors.numpy import save

        data = save({"weights": self.weights, "bias": self.bias})
        (folder / TENSORS).write_bytes(data)
        parts = {"labels": self.labels, "features": dataclasses.asdict(self.features)}
        description = {**parts, "sha256": hashlib.sha256(data).hexdigest(), **about}
        (folder / ABOUT).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, setting: str) -> "LinearClassifier":
        """Read a classifier that `write` wrote.

        Raises InputMissing if the folder that `setting` names has none, DataError if it is damaged.
        """
        if not (folder / ABOUT).is_file():
            what = f"the folder {folder} contains no classifier"
            why = f"it has no {ABOUT}"
            raise InputMissing(what, where=setting, why=why, fix=f"find . -name {ABOUT}")
        from safetensors.numpy import load

        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            labels, features = tuple(about["labels"]), Features(**about["features"])
            data = (folder / TENSORS).read_bytes()
            if hashlib.sha256(data).hexdigest() != about["sha256"]:
                raise ValueError(f"{TENSORS} is not the one that {ABOUT} names")
            tensors = load(data)
            if tensors["weights"].shape != (features.buckets, len(labels)):
                raise ValueError(f"weights of {tensors['weights'].shape}")
            return cls(labels, features, tensors["weights"], tensors["bias"])
        except Exception as error:  # errors of JSON, safetensors and files have no common base
            what = "a classifier could not be read"
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise DataError(what, where=str(folder), why=why, fix="train it again") from error

    def number(self, label: str, setting: str) -> int:
        """Return the index of a label. Raises ConfigError, which names `setting`, without it."""
        if label not in self.labels:
            what, every = f"the classifier has no label {label!r}", ", ".join(self.labels)
            near = nearest_word(label, self.labels)
            flag = shlex.quote(f"--config.{setting}={near}")
            fix = flag if near else f"name one of its labels: {every}"
            raise ConfigError(what, where=setting, why=f"its labels are {every}", fix=fix)
        return self.labels.index(label)
