"""Settings of checkpoints.

Example:
    >>> CheckpointConfig(keep_every=1000).keep_last
    2
"""

import dataclasses
from typing import Literal

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Interval between checkpoints, and the steps that are kept."""

    every: Span = setting(Span.parse("10%"), "interval between checkpoints")
    keep_last: int = setting(2, "number of newest checkpoints to keep", low=1)
    keep_best: int = setting(
        1, "number of checkpoints with the lowest evaluation loss to keep as well", low=0
    )
    keep_every: int | None = setting(
        None,
        "step multiple whose checkpoints are kept permanently; None keeps none permanently",
        unit="steps",
        low=1,
    )
    space: Literal["check", "ignore"] = setting(
        "check", "check at the start that the kept checkpoints will fit on the disk, or ignore it"
    )
