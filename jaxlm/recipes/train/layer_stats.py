"""Figures of layers while a run is trained."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxlm.core.divisors import divisors
from jaxlm.core.errors import ConfigError
from jaxlm.parallel import host, logical
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run
from jaxlm.training import figures
from jaxlm.training.figures import Noise
from jaxlm.training.observe import Observed

MAX_PARTS = 8  # of a batch, for the noise of its gradient, where the step has no micro-batches
MEANT = 20  # estimates of the noise whose mean is taken


def microbatches_for_noise(run: Run, sizes: Sizes) -> int:
    """Micro-batches of what watches: the step's own, or enough to tell the gradient's noise.

    Raises:
      ConfigError: where noise is to be told and a device has one row.
    """
    own = run.train.microbatches
    if "noise" not in run.log.layers or own > 1:
        return own
    ways = logical.ways(sizes, "batch")
    rows = math.gcd(*(stage.rows for stage in run.pace.phases))
    found = max(n for n in divisors(max(rows // ways, 1)) if n <= MAX_PARTS)
    if found == 1:
        raise ConfigError(
            "the noise of the gradient cannot be told",
            where="log.layers",
            why=f"{rows} rows of a batch on {ways} devices do not divide into equal parts of whole rows, and "
            "noise is the difference between a part's gradient and the batch's",
            fix="\n".join(
                [_twice_the_rows(run), f"{_without_noise(run)}    # does not measure the noise"]
            ),
        )
    return found


def _twice_the_rows(run: Run) -> str:
    """Return the flags that double the rows of every batch."""
    entries = [entry.partition("@") for entry in run.train.batch_warmup]
    doubled = ",".join(f"{2 * int(rows)}@{span}" for rows, _, span in entries)
    warmup = f" --config.train.batch_warmup={doubled}" if doubled else ""
    return f"--config.train.batch={2 * run.train.batch}{warmup}"


def _without_noise(run: Run) -> str:
    rest = ",".join(name for name in run.log.layers if name != "noise")
    return f"--config.log.layers={rest}" if rest else "'--config.log.layers=()'"


def is_due(run: Run, completed: int) -> bool:
    """Whether the step that completes so many is watched: the first logged one from each multiple of `log.layers_every` on."""
    if not run.log.layers:
        return False
    total, tokens = run.train.steps, run.tokens_per_step
    every = run.log.every.steps(total, tokens)
    span = run.log.layers_every.steps(total, tokens)
    if completed == total:
        return True
    return min(every, span) > 0 and completed % every == 0 and completed % span < every


class LayerStatsCollector:
    """Observes the steps that are due, and keeps what it saw until they are logged.

    Args:
      sizes: of the mesh's axes.
      before: the run's earlier records, in which are the estimates of its noise.
    """

    def __init__(self, run: Run, sizes: Sizes, before: Iterable[Mapping[str, Any]]):
        self._run, self._parts = run, microbatches_for_noise(run, sizes)
        self._seen: dict[int, Observed] = {}  # by step; a step is logged after the next one began
        self._noises = [
            Noise(record["gradient_square"], record["gradient_noise"])
            for record in before
            if record.get("gradient_noise") is not None
        ]

    def look(self, observe: Callable[[], Observed], completed: int) -> None:
        """Observes the step that will complete so many, where that is due. To be called before it."""
        if is_due(self._run, completed):
            self._seen[completed] = observe()

    def take(self, step: int) -> dict[str, float]:
        """The figures of a step as parts of its record; none where it was not observed."""
        if step not in self._seen:
            return {}
        found = host.fetch(self._seen.pop(step))
        record = figures.by_layer(found)
        if "noise" in self._run.log.layers:
            self._noises.append(figures.noise(found, self._parts))
            last = self._noises[-1]
            square, trace = (sum(part) for part in zip(*self._noises[-MEANT:], strict=True))
            record |= {"gradient_square": last.square, "gradient_noise": last.trace}
            if square > 0:
                record["noise_scale_tokens"] = trace / square
        return record
