"""Settings of checkpoints."""

import dataclasses
from typing import Literal

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and which steps to keep."""

    every: Span = setting(Span.parse("10%"), "how often to save")
    keep_last: int = setting(2, "newest steps that are kept", low=1)
    keep_best: int = setting(
        1, "steps with the lowest evaluation loss that are kept as well", low=0
    )
    keep_every: int | None = setting(
        None,
        "steps that are multiples of this are kept for good; None keeps none for that",
        unit="steps",
        low=1,
    )
    space: Literal["check", "ignore"] = setting(
        "check", "refuse to start where the kept steps will not fit on the disk, or do not look"
    )
