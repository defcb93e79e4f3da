"""Train a text classifier on labeled files, measure it on held-out texts, and write it."""

import dataclasses
import functools
import hashlib
import math
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError, NotWritable, cannot_write
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import BrokenRecord
from jaxlm.corpus.filters.linear import Features, LinearClassifier
from jaxlm.corpus.readers.files import read
from jaxlm.data import cache
from jaxlm.data.documents import Corpus

THRESHOLDS = 0.1, 0.3, 0.5, 0.7, 0.9
MIN_EXAMPLES = 10  # of each label, to train and to measure


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierOptions:
    """Examples and training settings of a classifier."""

    examples: dict[str, tuple[str, ...]]  # globs of files by label
    out: Path
    text_key: str = "text"
    held_out: float = 0.1  # share of the examples of each label to measure on
    epochs: int = 5
    batch: int = 64
    lr: float = 0.05  # decays linearly to zero
    seed: int = 0
    features: Features = dataclasses.field(default_factory=Features)


class _Examples(NamedTuple):
    texts: list[str]
    labels: np.ndarray  # i32[examples]
    held_out: np.ndarray  # bool[examples]


def train(options: ClassifierOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Train, measure and write a classifier; returns counts and metrics.

    Labels weigh the same, regardless of their number of examples: probabilities assume equal
    priors. Memory: all texts, and at most 8 bytes x `features.run` x `features.words` per text for
    features.

    Raises:
      InputMissing: if a pattern matches no file.
      DataError: if a label has too few examples.
      NotWritable: if the folder exists or cannot be written.
    """
    if options.out.exists():
        raise NotWritable(
            "the folder exists",
            where=str(options.out),
            why="a classifier is never overwritten: its filtered data could not be reproduced",
            fix=shlex.quote(f"--out={options.out}-2"),
        )
    counts = Counter[str]()
    examples = _read(options, counts)
    say(f"{len(examples.texts):,} examples, {int(examples.held_out.sum()):,} of them held out")
    model = _fitted(options, examples)
    answer = {
        "examples": _by_label(options, examples.labels[~examples.held_out]),
        "held_out": _by_label(options, examples.labels[examples.held_out]),
        "left_out": dict(sorted(counts.items())),
        **measured(model, examples.texts, examples.labels, examples.held_out),
    }
    try:
        with cache.built(options.out) as folder:
            if folder is not None:
                model.write(folder, {"measured": answer})
    except OSError as error:
        raise cannot_write(
            "the classifier", options.out, error, fix="--out=classifier-2"
        ) from error
    return answer


def measured(
    model: LinearClassifier, texts: list[str], labels: np.ndarray, chosen: np.ndarray
) -> dict[str, Any]:
    """Return the accuracy, and precision and recall of each label.

    A label is predicted if it is the most likely, or at thresholds of its probability.
    """
    rows = np.flatnonzero(chosen)
    truth = labels[rows]
    probabilities = np.array([model.probabilities(texts[row]) for row in rows])
    best = probabilities.argmax(axis=1)
    figures: dict[str, dict[str, Any]] = {}
    for number, label in enumerate(model.labels):
        is_it, likely = truth == number, probabilities[:, number]
        thresholds = {f"{t:g}": _figures(likely >= t, is_it) for t in THRESHOLDS}
        figures[label] = {**_figures(best == number, is_it), "thresholds": thresholds}
    return {"accuracy": float((best == truth).mean()), "labels": figures}


def _figures(predicted: np.ndarray, actual: np.ndarray) -> dict[str, float | None]:
    """Return precision and recall; precision is None without positives."""
    hits = int((predicted & actual).sum())
    return {
        "precision": hits / int(predicted.sum()) if predicted.any() else None,
        "recall": hits / int(actual.sum()),
    }


def _read(options: ClassifierOptions, counts: Counter[str]) -> _Examples:
    """Return every example once; the hash of a text decides if it is held out."""
    labels: dict[str, int] = {}
    ambiguous = set[str]()
    for number, (label, patterns) in enumerate(options.examples.items()):
        for text in _texts(label, patterns, options.text_key, counts):
            if labels.setdefault(text, number) != number:
                ambiguous.add(text)
    for text in ambiguous:
        counts["under two labels"] += 1
        del labels[text]
    texts = list(labels)
    encoded = [text.encode(errors="replace") for text in texts]
    drawn = [hashlib.blake2b(each, digest_size=8).digest() for each in encoded]
    below = options.held_out * 2**64
    held_out = np.array([int.from_bytes(d, "little") < below for d in drawn], bool)
    examples = _Examples(texts, np.array(list(labels.values()), np.int32), held_out)
    for number, label in enumerate(options.examples):
        for side, name in ((held_out, "held out"), (~held_out, "to learn from")):
            count = int((side & (examples.labels == number)).sum())
            if count < MIN_EXAMPLES:
                raise DataError(
                    f"{label} has {count} examples {name}",
                    where=", ".join(options.examples[label]),
                    why=f"training and measuring need {MIN_EXAMPLES} each",
                    fix=f"--held_out={min(0.5, max(0.1, 2 * options.held_out)):.0%}"
                    if side is held_out and options.held_out < 0.5
                    else "name more files of examples",
                )
    return examples


def _texts(
    label: str, patterns: tuple[str, ...], text_key: str, counts: Counter[str]
) -> Iterator[str]:
    corpus = Corpus.find(patterns, text_key, f"--examples={label}")
    recipe = Recipe(source=patterns, text_key=text_key)
    for path, name in zip(corpus.files, corpus.names, strict=True):
        for record in read(path, name, recipe, counts):
            if isinstance(record, BrokenRecord):
                counts[f"broken: {record.kind}"] += 1
            elif record.text.strip():
                yield record.text


def _by_label(options: ClassifierOptions, labels: np.ndarray) -> dict[str, int]:
    counted = np.bincount(labels, minlength=len(options.examples)).tolist()
    return dict(zip(options.examples, counted, strict=True))


def _fitted(options: ClassifierOptions, examples: _Examples) -> LinearClassifier:
    """Minimize with Adam the mean over labels of the mean -log probability of the right label."""
    chosen = np.flatnonzero(~examples.held_out)
    features = [options.features.of(examples.texts[index]) for index in chosen]
    labels = examples.labels[chosen]
    count = len(options.examples)
    weight = len(labels) / (count * np.bincount(labels, minlength=count))
    width = 2 ** math.ceil(math.log2(max(1, *map(len, features))))
    steps = options.epochs * math.ceil(len(chosen) / options.batch)
    optimizer = optax.adam(optax.linear_schedule(options.lr, 0.0, steps))
    params = {
        "weights": jnp.zeros((options.features.buckets, count), jnp.float32),
        "bias": jnp.zeros((count,), jnp.float32),
    }
    state = optimizer.init(params)
    step = jax.jit(functools.partial(_step, optimizer), donate_argnums=(0, 1))
    draw = np.random.default_rng(options.seed)
    for _ in range(options.epochs):
        order = draw.permutation(len(chosen))
        for begin in range(0, len(order), options.batch):
            rows = order[begin : begin + options.batch]
            ids = np.full((options.batch, width), options.features.buckets, np.int32)
            for slot, row in enumerate(rows):
                ids[slot, : len(features[row])] = features[row]
            targets = np.zeros(options.batch, np.int32)
            weights = np.zeros(options.batch, np.float32)
            targets[: len(rows)] = labels[rows]
            weights[: len(rows)] = weight[labels[rows]]
            params, state = step(params, state, ids, targets, weights)
    arrays = jax.device_get(params)
    return LinearClassifier(
        tuple(options.examples), options.features, arrays["weights"], arrays["bias"]
    )


def _step(
    optimizer: optax.GradientTransformation,
    params: Any,
    state: Any,
    ids: jax.Array,  # i32[batch, features], padded with an index beyond the table
    targets: jax.Array,  # i32[batch]
    weights: jax.Array,  # f32[batch], 0 for padding rows
) -> tuple[Any, Any]:
    def loss(params: Any) -> jax.Array:
        buckets = params["weights"].shape[0]
        vectors = jnp.take(params["weights"], ids, axis=0, mode="fill", fill_value=0.0)
        size = jnp.maximum((ids < buckets).sum(axis=1, keepdims=True), 1)
        logits = vectors.sum(axis=1) / jnp.sqrt(size) + params["bias"][None]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (nll * weights).sum() / jnp.maximum(weights.sum(), 1e-9)

    updates, state = optimizer.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state
