"""Settings of the evaluation during and after training."""

import dataclasses
from typing import Literal

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often, and on how much."""

    every: Span = setting(Span.parse("10%"), "how often the validation sets are evaluated")
    batch: int | Literal["auto"] = setting(
        "auto", "rows evaluated at a time; auto is train.batch", unit="rows", low=1
    )
    follow: str = setting(
        "auto",
        "the validation set whose loss ranks checkpoints and counts for train.patience; auto is the first",
    )
    batches: int | Literal["all"] = setting(
        "all",
        "batches of each validation set while training, of rows that a fixed shuffle draws; the end takes all",
        low=1,
    )
