"""The one token-level objective: causal and prefix LM, masked LM, span corruption and fine-tuning differ in their data only."""

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.decoder import Decoder
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import Loss
from jaxlm.ops import cross_entropy


class Scores(Protocol):
    """What is made of each position's logits before they are dropped."""

    def __call__(self, logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> dict[str, Float[Array, "B T"]]: ...


def score(model: Decoder, batch: Tokens, scores: Scores, chunk: int | None, key: Array | None = None) -> dict[str, Float[Array, "B T"]]:
    """`scores` of every position, with the logits of `chunk` positions of a row at a time."""
    hidden = model(batch.tokens, positions=batch.positions, segments=batch.segments, key=key)

    def part(values: Array, targets: Array) -> dict[str, Array]:
        return scores(model.logits(values), targets)

    return cross_entropy.chunked(part, batch.tokens.shape[1], chunk, hidden.values, batch.targets)


def token_nll(model: Decoder, batch: Tokens, key: Array | None, config: LossConfig) -> Loss:
    """sum of weight x (nll + z_loss log(Z)**2), over the sum of weights.

    Metrics: `loss_nats`, the negative log-likelihood alone.
    """

    def scores(logits: Array, targets: Array) -> dict[str, Array]:
        nll, log_z = cross_entropy.token_nll(logits, targets)
        return {"nll": nll, "penalised": nll + config.z_loss * jnp.square(log_z)} if config.z_loss else {"nll": nll}

    out = score(model, batch, scores, config.chunk, key)
    nll = Mean.of(jax.lax.stop_gradient(out["nll"]), batch.weights)
    return Loss(Mean.of(out.get("penalised", out["nll"]), batch.weights), {"loss_nats": nll})
