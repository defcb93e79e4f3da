"""Named means over the batches of a set, added on the host in float64."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens


def totals(
    step: Callable[[Tokens], dict[str, Mean]],
    batches: Iterable[Tokens],
    put: Callable[[Tokens], Tokens],
) -> dict[str, np.ndarray]:
    """Return (total, weight) of each mean, float64.

    Each batch is fetched after the next has been dispatched; `put` places it on the devices.
    """
    added: dict[str, np.ndarray] = {}
    pending: dict[str, Mean] = {}

    def add(means: dict[str, Mean]) -> None:
        for name, mean in means.items():
            added[name] = added.get(name, np.zeros(2)) + np.asarray(mean, np.float64)

    for batch in batches:
        means = step(put(batch))
        add(pending)
        pending = means
    add(pending)
    return added


def figures(totals: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return total / weight of each mean; those of weight 0 are left out."""
    return {name: float(total / weight) for name, (total, weight) in totals.items() if weight}
