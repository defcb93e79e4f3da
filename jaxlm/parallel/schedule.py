"""Pipeline schedule: the micro-batch of each stage at each tick. Free of JAX."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """M micro-batches through P stages, each with R groups of consecutive layers.

    Group g is on stage g mod P, so a micro-batch circulates R times. At tick t, stage s is at item
    i = t - s: micro-batch i mod M in the stage's group i // M, for 0 <= i < M R; before and after
    that its work is discarded. R = 1 is GPipe, otherwise the circular (interleaved) schedule: a
    tick has R times less work, and so has the bubble. A micro-batch must not return to the first
    stage before all have left it: M >= P if R > 1.

    Source: Huang et al. 2019, arXiv:1811.06965 (GPipe); Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2 (interleaved stages), there with one backward tick after each forward tick; here
    the backward pass is the transpose of the whole forward pass.
    """

    stages: int
    microbatches: int
    repeats: int = 1

    @property
    def ticks(self) -> int:
        """M R + P - 1 forward, and as many backward."""
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of ticks in which a stage is idle: (P - 1) / (M R + P - 1)."""
        return (self.stages - 1) / self.ticks

    def item(self, stage: Any, tick: Any) -> tuple[Any, Any, Any]:
        """Return whether work at a tick counts, its micro-batch and group; numbers or arrays."""
        item = tick - stage
        counts = (item >= 0) & (item < self.microbatches * self.repeats)
        return counts, item % self.microbatches, item // self.microbatches % self.repeats

    def fitted(self, rows: int, ways: int) -> "Schedule | None":
        """Return the schedule for a batch of another size, such as an evaluation's, split `ways`.

        It has the most micro-batches that divide both its own number and the rows of each device;
        None if they are too few to circulate.
        """
        if rows % ways:
            return None
        fitted = dataclasses.replace(self, microbatches=math.gcd(self.microbatches, rows // ways))
        return None if self.repeats > 1 and fitted.microbatches < self.stages else fitted

    def __str__(self) -> str:
        groups = f" x {self.repeats} groups of layers" if self.repeats > 1 else ""
        return f"{self.stages} stages{groups}, {self.microbatches} micro-batches"
