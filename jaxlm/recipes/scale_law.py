"""Where a law of loss comes from: what others published, or finished runs of one's own; and how well those foretell one another."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.models.loss_fit import Points, fit, noise, resample
from jaxlm.models.loss_law import PUBLISHED, PUBLISHED_FLOPS, Law
from jaxlm.recipes.config import Run

DRAWS = 200
SHARE = 0.8  # of the draws lie within an interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that came to its end.

    Args:
      run: its config, the vocabulary filled in.
      parameters: that a token meets, embeddings included.
      tokens: trained on, padding not counted.
      flops: of its whole training, by `cost.flops_per_token`.
      loss_nats: of its first validation set, all of it, after the last step.
      data: the fingerprint of its data.
    """

    path: Path
    run: Run
    parameters: int
    tokens: int
    flops: float
    loss_nats: float
    data: dict[str, Any]


def points(runs: Sequence[Finished]) -> Points:
    """The runs as arrays."""
    rows = [(each.parameters, each.tokens, each.loss_nats) for each in runs]
    return Points(*np.array(rows, np.float64).reshape(-1, 3).T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A law, and others that are as likely: published beside it, or from runs drawn again."""

    law: Law
    name: str
    others: list[Law]
    flops: tuple[float, float]  # of the smallest and the largest run behind it


def published() -> Source:
    """The replication, whose optimum agrees with the other two approaches of the original, beside the original."""
    (name, law), *others = PUBLISHED.items()
    return Source(
        law=law, name=name, others=[law, *(each for _, each in others)], flops=PUBLISHED_FLOPS
    )


def fitted(runs: Sequence[Finished]) -> Source:
    """A law of one's own runs."""
    there = points(runs)
    law = fit(there)
    flops = [each.flops for each in runs]
    return Source(
        law=law,
        name=f"{len(runs)} runs",
        others=resample(there, law, DRAWS),
        flops=(min(flops), max(flops)),
    )


def self_check(runs: Sequence[Finished]) -> dict[str, Any] | None:
    """The largest run by FLOPs, predicted from all others; None where those are too few for a law."""
    *others, largest = sorted(runs, key=lambda each: each.flops)
    if not points(others).suffice:
        return None
    source = fitted(others)
    at = (largest.parameters, largest.tokens)
    predicted = float(source.law.loss(*at))
    # A run differs from its law too, by as much as the others do.
    spread = noise(source.law, points(others))
    own = np.exp(spread * np.random.default_rng(0).standard_normal(DRAWS))
    drawn = [float(law.loss(*at)) * factor for law, factor in zip(source.others, own, strict=True)]
    return {
        "run": str(largest.path),
        "from_runs": len(others),
        "flops_beyond": largest.flops / source.flops[1],
        "loss_nats": largest.loss_nats,
        "predicted_nats": predicted,
        "interval_nats": quantiles(drawn, SHARE),
        "error": predicted / largest.loss_nats - 1,
    }


def quantiles(values: Sequence[float], share: float) -> list[float]:
    """The ends of the middle `share` of the values."""
    return [float(each) for each in np.quantile(values, [(1 - share) / 2, (1 + share) / 2])]
