"""Settings of the objective and of the loss."""

import dataclasses
from typing import Literal

from jaxlm.core.config import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal:
    """Each token is predicted from those before it."""

    name: Literal["causal"] = "causal"


Objective = Causal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How the token loss is computed."""

    z_loss: float = setting(
        0.0, "coefficient of the squared log normalizer, which keeps logits near zero", low=0
    )
    label_smoothing: float = setting(
        0.0,
        "share of each label that is spread evenly over all ids; loss_nats stays the plain likelihood",
        low=0,
        high=1,
    )
    chunk: int | None = setting(
        None,
        "tokens unembedded at a time, the others' logits never existing; None takes all at once",
        unit="tokens",
        low=1,
    )
