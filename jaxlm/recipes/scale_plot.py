"""The picture of a law of one's own: its runs, its curve for each size, and how low a budget goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.models.loss_law import Law
from jaxlm.monitor import plots, sinks, words
from jaxlm.recipes import shapes
from jaxlm.recipes.scale_law import Finished

FILE = "scale.png"
POINTS = 60  # of a curve


def draw(answer: dict[str, Any], runs: Sequence[Finished], folder: Path) -> Path:
    """Writes scale.png into a folder: loss by training FLOPs, from the smallest run to the budget. Raises NotWritable."""
    law = Law(**{name: answer["law"][name] for name in ("E", "A", "B", "alpha", "beta")})
    last = runs[-1].run
    assert last.model.vocab != "auto"
    costs = shapes.costs(last, last.model.vocab)
    sizes = []
    for size in sorted({each.parameters for each in runs}):
        own = [(each.flops, each.loss_nats) for each in runs if each.parameters == size]
        flops = np.geomspace(min(own)[0] / 2, max(own)[0] * 2, POINTS)
        curve = law.loss(size, flops / costs.at(float(size)))
        sizes.append(plots.Size(words.count(size), own, list(zip(flops, curve, strict=True))))
    ends = (runs[0].flops, max(runs[-1].flops, answer["budget_flops"]))
    budgets = np.geomspace(*ends, POINTS)
    best = [(each, law.optimum(each, costs).loss_nats) for each in map(float, budgets)]
    target = folder / FILE
    spent = (answer["budget_flops"], answer["loss_nats"], answer["band"]["loss_nats"])
    sinks.replace(target, plots.scaling(sizes, best, spent))
    return target
