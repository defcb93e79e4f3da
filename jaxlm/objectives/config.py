"""Settings of objectives and of the loss they share."""

import dataclasses
from typing import Literal

from jaxlm.core.config import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal:
    """Each token from those before it in its document."""

    name: Literal["causal"] = "causal"


Objective = Causal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How a token's negative log-likelihood is computed and regularised."""

    z_loss: float = setting(0.0, "weight of log(Z)**2, which keeps the softmax's normaliser near 1 (PaLM, arXiv:2204.02311, section 5)", low=0.0)
    chunk: int | None = setting(None, "positions of each row whose logits exist at a time; None computes all at once", unit="tokens", low=1)
