"""Layer statistics and gradient noise: the steps that are observed, and the results."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxlm.parallel import host
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.training.observe import Noise, Observed, gradient_noise, layer_metrics

NOISE_WINDOW = 20  # estimates of the noise that are averaged


def is_observed(run: Run, step: int) -> bool:
    """Return whether layers are observed in a step: the first logged one of `log.layers_every`."""
    if not run.log.layers:
        return False
    total, tokens = run.train.steps, run.tokens_per_step
    every = run.log.every.steps(total, tokens)
    span = run.log.layers_every.steps(total, tokens)
    if step == total:
        return True
    return min(every, span) > 0 and step % every == 0 and step % span < every


class LayerStatsCollector:
    """Observes the steps that are due, and keeps their statistics until they are logged.

    `records` are earlier ones of the run, with estimates of its gradient noise.
    """

    def __init__(self, run: Run, sizes: Sizes, records: Iterable[Mapping[str, Any]]):
        self._run = run
        self._parts = divisibility.observer_microbatches(run, sizes)
        self.continue_from(records)

    def continue_from(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Keep the estimates of some records alone, as a run that resumes after them does."""
        self._observed: dict[int, Observed] = {}  # a step is logged after the next one began
        noises = [
            Noise(record["gradient_square"], record["gradient_noise"])
            for record in records
            if None not in (record.get("gradient_square"), record.get("gradient_noise"))
        ]
        self._noises = noises[-NOISE_WINDOW:]

    def observe_if_due(self, observe: Callable[[], Observed], step: int) -> None:
        """Observe a step before it is computed, if that is due."""
        if is_observed(self._run, step):
            self._observed[step] = observe()

    def take(self, step: int) -> dict[str, float]:
        """Return the statistics of a step as fields of its record; empty if it was not observed."""
        if step not in self._observed:
            return {}
        observed = host.fetch(self._observed.pop(step))
        record = layer_metrics(observed)
        if "noise" in self._run.log.layers:
            last = gradient_noise(observed, self._parts)
            record |= {"gradient_square": last.square, "gradient_noise": last.trace}
            if all(map(math.isfinite, last)):  # else no mean with it would be a number
                self._noises = [*self._noises, last][-NOISE_WINDOW:]
            square = sum(each.square for each in self._noises)
            if square > 0:
                trace = sum(each.trace for each in self._noises)
                record["noise_scale_tokens"] = trace / square
        return record
