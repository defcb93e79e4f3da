"""Samples of scored items, and their means with intervals.

Example:
  >>> line = {"id": "a", "group": "a", "metrics": {"accuracy": 1.0}, "weight": 1.0, "choices": 2}
  >>> summary([line, line | {"id": "b", "group": "b"}])["metrics"]["accuracy"]["mean"]
  1.0
"""

import array
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.evals import calibration, metrics, statistics
from jaxlm.evals.tasks.config import Choice, Pair, Task
from jaxlm.evals.tasks.requests import Question


def sample(
    task: Task, question: Question, nats: Sequence[float], unconditional: Sequence[float]
) -> dict[str, Any]:
    """Return the line of samples.jsonl of an item.

    Args:
      task: the task.
      question: the item and its requests.
      nats: -log p of each request.
      unconditional: those without the context; empty if there are none.
    """
    tokens = [each.tokens for each in question.requests]
    line = _shared(question) | {"tokens": tokens}
    match task.kind:
        case Choice():
            return line | _choice(question, nats, unconditional)
        case Pair():
            metrics = {"accuracy": float(nats[0] < nats[1])}
            return line | {"metrics": metrics, "weight": 1.0, "nats": list(nats), "choices": 2}
        case _:
            total, size = math.fsum(nats), len(question.item.gold.encode())
            metrics = {"bits_per_byte": total / math.log(2) / size}
            figures = {"nats": total, "tokens": sum(tokens), "bytes": size}
            return line | figures | {"metrics": metrics, "weight": float(size)}


def _shared(question: Question) -> dict[str, Any]:
    """Return the fields of a sample of every kind."""
    item = question.item
    return {
        "id": item.id,
        "group": item.group,
        **({"subset": item.subset} if item.subset else {}),
        "shots": list(question.shots),
        "spans_border": any(each.spans_border for each in question.requests),
    }


def _choice(
    question: Question, nats: Sequence[float], unconditional: Sequence[float]
) -> dict[str, Any]:
    """Return the scores of choices by each normalization; the lowest wins, the first of equals."""
    item = question.item
    sizes = [len(each.encode()) for each in question.choices]
    tokens = [each.tokens for each in question.requests]
    scores = {
        "accuracy": list(nats),
        "accuracy_bytes": [n / size for n, size in zip(nats, sizes, strict=True)],
        "accuracy_tokens": [n / size for n, size in zip(nats, tokens, strict=True)],
    }
    if unconditional:
        scores["accuracy_pmi"] = [n - m for n, m in zip(nats, unconditional, strict=True)]
    picks = {name: min(range(len(each)), key=each.__getitem__) for name, each in scores.items()}
    return {
        "metrics": {name: float(pick == item.answer) for name, pick in picks.items()},
        "weight": 1.0,
        "answer": item.answer,
        "picks": picks,
        "nats": list(nats),
        "unconditional": list(unconditional) or None,
        "bytes": sizes,
        "choices": len(sizes),
    }


def written(question: Question, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the line of samples.jsonl of a generated answer with the fields of `judged`."""
    return _shared(question) | fields


def is_finite(line: Mapping[str, Any]) -> bool:
    """Return whether every score of a sample is finite, and the logits of its answer were."""
    nats = line.get("nats", [])
    scores = nats if isinstance(nats, list) else [nats]
    is_drawn = line.get("finish_reason") != "error"
    return is_drawn and all(map(math.isfinite, [*scores, *(line.get("unconditional") or ())]))


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each metric's mean, standard error, interval and chance level, also by subset.

    Memory holds a few numbers of each line, and the answers if a metric is of all together.
    """
    every, subsets = _Part(), defaultdict[str, _Part](_Part)
    texts, references = list[str](), list[str]()
    names: list[str] = []
    for number, line in enumerate(lines):
        every.add(line)
        if "subset" in line:
            subsets[line["subset"]].add(line)
        if not number:
            names = [name for name in metrics.OF_CORPORA if name in line["metrics"]]
        if names:
            texts.append(line["extracted"] or "")
            references.append(line["expected"])
    result = every.figures()
    if subsets:
        result["subsets"] = {name: subsets[name].figures() for name in sorted(subsets)}
    if names:
        result["corpus"] = {name: metrics.corpus_score(name, texts, references) for name in names}
    return result


class _Part:
    """Numbers of the lines of a task, or of a subset."""

    def __init__(self) -> None:
        self._values: dict[str, "array.array[float]"] = defaultdict(lambda: array.array("d"))
        self._weights, self._groups = array.array("d"), array.array("Q")
        self._chances, self._confidences = array.array("d"), array.array("d")
        self._spans = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of a line."""
        for name, value in line["metrics"].items():
            self._values[name].append(value)
        self._weights.append(line["weight"])
        name = hashlib.sha256(line["group"].encode()).digest()
        self._groups.append(int.from_bytes(name[:8], "big"))
        self._spans += bool(line.get("spans_border"))
        if "choices" in line:
            self._chances.append(1 / line["choices"])
        if "picks" in line:
            self._confidences.append(calibration.confidence(line["nats"]))

    def figures(self) -> dict[str, Any]:
        """Return counts and estimates."""
        chance = math.fsum(self._chances) / len(self._chances) if self._chances else None
        groups: Any = np.asarray(self._groups)
        estimates = {}
        for name, values in self._values.items():
            is_share = name not in metrics.LOSSES
            figures = statistics.estimate(
                values, self._weights, groups, is_share=is_share
            )._asdict()
            estimates[name] = figures | {"chance": chance if name.startswith("accuracy") else None}
        error = {}
        if self._confidences:
            right = self._values["accuracy"]
            error["calibration_error"] = calibration.error(self._confidences, right)
        return {
            "items": len(self._weights),
            "groups": len(np.unique(groups)),
            **error,
            "spans_border": self._spans,
            "metrics": estimates,
        }
