"""Settings of the training loop."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting
from jaxlm.nn.config import REMAT_NAMES


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how many rows a step, and how the layers are run."""

    steps: int = setting(1000, "updates in the whole run", unit="steps", low=1)
    batch: int = setting(
        32, "rows of the global batch, over all devices and micro-batches", unit="rows", low=1
    )
    microbatches: int = setting(
        1,
        "parts that a batch is cut into; gradients are summed over them, then applied once",
        low=1,
    )
    stack: Literal["scan", "unroll"] = setting(
        "scan",
        "run the layers as one compiled loop, or one after the other: same parameters, same result",
    )
    remat: str = setting(
        "none",
        "what the backward pass computes again: none, dots (keep matrix products), full, or save:NAME,NAME",
    )
    patience: int | None = setting(
        None,
        "stop after this many evaluations in a row without a better loss; None never stops early",
        unit="evaluations",
        low=1,
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Micro-batches are equal parts of a batch, and the remat policy is one of those there are."""
        if self.batch % self.microbatches:
            fit = next(n for n in range(self.microbatches, 0, -1) if self.batch % n == 0)
            yield (
                "microbatches",
                f"batch = {self.batch} rows does not divide by {self.microbatches}",
                f"--config.train.microbatches={fit}",
            )
        kind, _, names = self.remat.partition(":")
        if self.remat not in ("none", "dots", "full") and (
            kind != "save" or not set(names.split(",")) <= set(REMAT_NAMES)
        ):
            yield (
                "remat",
                f"{self.remat!r} is none of: none, dots, full, save:{','.join(REMAT_NAMES)}",
                "--config.train.remat=dots",
            )
