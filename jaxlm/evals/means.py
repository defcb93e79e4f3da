"""Named means over the batches of a set, added on the host in float64."""

from collections.abc import Callable, Iterable, Iterator, Mapping

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

    def computed() -> Iterator[dict[str, Mean]]:
        pending: dict[str, Mean] = {}
        for batch in batches:
            means = step(put(batch))
            yield pending
            pending = means
        yield pending

    return added(computed())


def added(batches: Iterable[Mapping[str, Mean]]) -> dict[str, np.ndarray]:
    """Return (total, weight) of each mean over the means of batches, float64."""
    sums: dict[str, np.ndarray] = {}
    for means in batches:
        for name, mean in means.items():
            sums[name] = sums.get(name, np.zeros(2)) + np.asarray(mean, np.float64)
    return sums


def figures(totals: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return total / weight of each mean; those of weight 0 are left out."""
    return {name: float(total / weight) for name, (total, weight) in totals.items() if weight}
