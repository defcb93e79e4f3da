"""Layer statistics and gradient noise: the steps that are observed, and the results."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import divisors
from jaxlm.parallel import host, logical
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run
from jaxlm.training.observe import Noise, Observed, gradient_noise, layer_metrics

MAX_NOISE_PARTS = 8  # of a batch, to measure gradient noise if the step has no micro-batches
NOISE_WINDOW = 20  # estimates of the noise that are averaged


def microbatches_for_noise(run: Run, sizes: Sizes) -> int:
    """Return the micro-batches of the observer: the step's, or enough to measure gradient noise.

    Raises ConfigError if a device has one row.
    """
    microbatches = run.train.microbatches
    if microbatches > 1:
        return microbatches
    ways = logical.ways(sizes, "batch")
    rows = math.gcd(*(phase.rows for phase in run.pace.phases))
    parts = max(n for n in divisors(max(rows // ways, 1)) if n <= MAX_NOISE_PARTS)
    if parts == 1:
        entries = [entry.partition("@") for entry in run.train.batch_warmup]
        doubled = ",".join(f"{2 * int(rows)}@{span}" for rows, _, span in entries)
        warmup = f" --config.train.batch_warmup={doubled}" if doubled else ""
        rest = ",".join(name for name in run.log.layers if name != "noise")
        without = f"--config.log.layers={rest}" if rest else "'--config.log.layers=()'"
        raise ConfigError(
            "log.layers cannot measure the noise of the gradient",
            where="log.layers",
            why=f"noise is the difference between the gradients of equal parts of a batch, and"
            f" {rows} rows on {ways} devices do not divide into parts of whole rows",
            fix=f"--config.train.batch={2 * run.train.batch}{warmup}\n"
            f"{without}    # does not measure the noise",
        )
    return parts


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
        self._parts = microbatches_for_noise(run, sizes) if "noise" in run.log.layers else 1
        self._observed: dict[int, Observed] = {}  # a step is logged after the next one began
        self._noises = [
            Noise(record["gradient_square"], record["gradient_noise"])
            for record in records
            if record.get("gradient_noise") is not None
        ]

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
            self._noises.append(gradient_noise(observed, self._parts))
            last = self._noises[-1]
            square, trace = (sum(part) for part in zip(*self._noises[-NOISE_WINDOW:], strict=True))
            record |= {"gradient_square": last.square, "gradient_noise": last.trace}
            if square > 0:
                record["noise_scale_tokens"] = trace / square
        return record
