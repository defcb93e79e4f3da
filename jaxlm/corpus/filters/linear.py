"""A linear classifier of text: numpy alone applies it, so that cleaning needs no accelerator. `recipes.train_classifier` makes one.

A folder holds classifier.safetensors (weights, bias) and classifier.json (labels, how text is read, what was measured).
"""

import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.core.spelling import nearest
from jaxlm.corpus.ngrams import hashed, runs, words

TENSORS, ABOUT = "classifier.safetensors", "classifier.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """How a text becomes numbers of buckets."""

    buckets: int = 2**18  # of the table that runs of words are hashed into
    run: int = 2  # words of the longest run
    words: int = 2000  # of a text's beginning, which are looked at

    def of(self, text: str) -> np.ndarray:
        """i64[n]: the buckets of all runs of 1 to `run` words, each once, in order."""
        numbers = hashed(words(text)[: self.words])
        every = [runs(numbers, length) for length in range(1, self.run + 1)]
        return np.unique(np.concatenate(every) % np.uint64(self.buckets)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Probabilities softmax(bias + sum of the weights of a text's n buckets / sqrt(n)).

    Source: Joulin et al. 2017, "Bag of Tricks for Efficient Text Classification", §2, with hashed runs of words; here without
    a layer between, and scaled by the square root of n in place of n.
    """

    labels: tuple[str, ...]
    features: Features
    weights: np.ndarray  # f32[buckets, labels]
    bias: np.ndarray  # f32[labels]

    def probabilities(self, text: str) -> np.ndarray:
        """f64[labels]; those of the bias alone for a text without words."""
        found = self.features.of(text)
        logits = self.weights[found].sum(axis=0, dtype=np.float64) / max(1, len(found)) ** 0.5
        logits += self.bias
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()

    def write(self, folder: Path, about: dict[str, Any]) -> None:
        """Both files, the one that names the other last; `about` is what else is known of it."""
        from safetensors.numpy import save

        data = save({"weights": self.weights, "bias": self.bias})
        (folder / TENSORS).write_bytes(data)
        noted = {
            "labels": self.labels,
            "features": dataclasses.asdict(self.features),
            "sha256": hashlib.sha256(data).hexdigest(),
            **about,
        }
        (folder / ABOUT).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, setting: str) -> "Linear":
        """What `write` wrote.

        Raises:
          InputMissing: where there is no classifier; `setting` named it.
          DataError: where it is not what was written.
        """
        if not (folder / ABOUT).is_file():
            raise InputMissing(
                f"there is no classifier in {folder}",
                where=setting,
                why=f"it has no {ABOUT}",
                fix=f"find . -name {ABOUT}",
            )
        try:
            return cls._read(folder)
        except Exception as error:  # JSON, safetensors and the file system share no parent
            raise DataError(
                "a classifier cannot be read",
                where=str(folder),
                why=f"{type(error).__name__}: {str(error)[:200]}",
                fix="train it again",
            ) from error

    @classmethod
    def _read(cls, folder: Path) -> "Linear":
        from safetensors.numpy import load

        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        labels, features = tuple(about["labels"]), Features(**about["features"])
        data = (folder / TENSORS).read_bytes()
        if hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise ValueError(f"{TENSORS} is not the one that {ABOUT} names")
        tensors = load(data)
        if tensors["weights"].shape != (features.buckets, len(labels)):
            raise ValueError(f"weights of {tensors['weights'].shape}")
        return cls(labels, features, tensors["weights"], tensors["bias"])

    def number(self, label: str, setting: str) -> int:
        """The place of a label.

        Raises:
          ConfigError: where the classifier has no such label; `setting` named it.
        """
        if label not in self.labels:
            near = nearest(label, self.labels)
            raise ConfigError(
                f"the classifier knows no label {label!r}",
                where=setting,
                why=f"it knows {', '.join(self.labels)}",
                fix=shlex.quote(f"--config.{setting}={near}")
                if near
                else f"name the label that is meant: {', '.join(self.labels)}",
            )
        return self.labels.index(label)
