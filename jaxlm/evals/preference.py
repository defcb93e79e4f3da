"""Evaluation of answers that were compared or judged, and their scores under a fixed model."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jax import Array

from jaxlm.core.errors import DataError
from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.evals import means, statistics

ACCURACY = "preference_accuracy"
# Figures of token losses that a loss of whole answers does not have.
NO_FIGURES = ("perplexity", "bits_per_byte", "bits_per_byte_text")


def evaluate(
    step: Callable[[Tokens], dict[str, Mean]],
    batches: Iterable[Tokens],
    put: Callable[[Tokens], Tokens],
    *,
    has_interval: bool = False,
) -> dict[str, float | int | None]:
    """Return the figures of a set, the same as in training, from sums in float64.

    Each batch is fetched after the next has been dispatched; `put` places it on the devices. A
    figure that no answer has is left out. `has_interval` adds the number of pairs, or of answers
    with a label, and the 95% interval of the accuracy.

    Raises:
      DataError: if the set has no answer.
    """
    tokens = 0

    def counted() -> Iterator[Tokens]:
        nonlocal tokens
        for batch in batches:
            tokens += int((np.asarray(batch.weights) > 0).sum())
            yield batch

    totals = means.totals(step, counted(), put)
    if "loss_nats" not in totals or not totals["loss_nats"][1]:
        raise DataError(
            "there is nothing to evaluate",
            where="the validation set",
            why="no pair of the set was read",
            fix="name more pairs in --config.data.validation",
        )
    figures: dict[str, float | int | None] = {**means.figures(totals)}
    figures |= dict.fromkeys(NO_FIGURES) | {"tokens": tokens}
    if has_interval and ACCURACY in totals:
        total, count = totals[ACCURACY]
        right, rest = divmod(total, 1)  # two ties count as one that is right and one that is not
        values = np.repeat(
            [1.0, rest, 0.0], [int(right), 1 if rest else 0, round(count - right - rest)]
        )
        interval = statistics.estimate(values, is_share=True)
        figures |= {f"{ACCURACY}_low": interval.low, f"{ACCURACY}_high": interval.high}
        figures["pairs"] = int(count)
    return figures


def scores_of_answers(
    score: Callable[[Tokens], Array],
    fetch: Callable[[Array], np.ndarray],
    batches: Iterable[Tokens],
) -> Iterable[np.ndarray]:
    """Yield the scores [B, S] of each batch; each is fetched after the next was dispatched."""
    pending: Array | None = None
    for batch in batches:
        scores = score(batch)
        if pending is not None:
            yield fetch(pending)
        pending = scores
    if pending is not None:
        yield fetch(pending)
