"""Samples of scored items, and their means with intervals.

Example:
  >>> line = {"id": "a", "group": "a", "metrics": {"accuracy": 1.0}, "weight": 1.0, "choices": 2}
  >>> summary([line, line | {"id": "b", "group": "b"}])["metrics"]["accuracy"]["mean"]
  1.0
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

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
    """Return whether every score of a sample is finite."""
    nats = line.get("nats", [])
    scores = nats if isinstance(nats, list) else [nats]
    return all(map(math.isfinite, [*scores, *(line.get("unconditional") or ())]))


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each metric's mean, standard error, interval and chance level, also by subset."""
    result = _figures(lines)
    subsets = defaultdict(list)
    for line in lines:
        if "subset" in line:
            subsets[line["subset"]].append(line)
    if subsets:
        result["subsets"] = {name: _figures(subsets[name]) for name in sorted(subsets)}
    if names := [name for name in metrics.OF_CORPORA if name in lines[0]["metrics"]]:
        texts = [line["extracted"] or "" for line in lines]
        references = [line["expected"] for line in lines]
        result["corpus"] = {name: metrics.corpus_score(name, texts, references) for name in names}
    return result


def _figures(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    groups = [line["group"] for line in lines]
    weights = [line["weight"] for line in lines]
    counts = [line["choices"] for line in lines if "choices" in line]
    chance = math.fsum(1 / count for count in counts) / len(counts) if counts else None
    estimates = {}
    for name in lines[0]["metrics"]:
        values = [line["metrics"][name] for line in lines]
        figures = statistics.estimate(values, weights, groups)._asdict()
        estimates[name] = figures | {"chance": chance if name.startswith("accuracy") else None}
    picks = [(line["nats"], line["metrics"]["accuracy"] == 1) for line in lines if "picks" in line]
    return {
        "items": len(lines),
        "groups": len(set(groups)),
        **({"calibration_error": calibration.error(picks)} if picks else {}),
        "spans_border": sum(line.get("spans_border", False) for line in lines),
        "metrics": estimates,
    }
