"""The negative log-likelihood of the batch's targets."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.decoder import Decoder
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import Loss
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores


def token_nll(model: Decoder, batch: Tokens, key: Array | None, config: LossConfig) -> Loss:
    """sum_t w_t (nll_t + z log_normalizer_t^2), and its weight.

    The metric `loss_nats` is the likelihood alone. `key` turns dropout on.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5 (z-loss, there with 1e-4).
    """
    scores = score(model, batch, key, config.chunk)
    loss = Mean.of(scores.nll, batch.weights)
    metrics = {"loss_nats": loss, "token_accuracy": Mean.of(scores.correct, batch.weights)}
    if not config.z_loss:
        return Loss(loss, metrics)
    z = Mean.of(jnp.square(scores.log_normalizer), batch.weights)
    return Loss(Mean(loss.total + config.z_loss * z.total, loss.weight), metrics | {"z": z})


def score(model: Decoder, batch: Tokens, key: Array | None, chunk: int | None) -> TokenScores:
    """The scores of each target, its logits `chunk` tokens at a time."""
    hidden = model(batch.tokens, positions=batch.positions, segments=batch.segments, key=key)

    def of(values: Array, targets: Array) -> TokenScores:
        with jax.named_scope("unembed"):
            return token_scores(model.logits(values), targets)

    return in_chunks(of, hidden.values, batch.targets, tokens=chunk)
