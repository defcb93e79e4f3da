"""The negative log-likelihood of the batch's targets."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.decoder import Decoder
from jaxlm.nn.moe import ADDED
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import Loss
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores
from jaxlm.parallel import context


def token_nll(model: Decoder, batch: Tokens, key: Array | None, config: LossConfig) -> Loss:
    """sum_t w_t (nll_t + z log_normalizer_t^2) + what the layers add, and the weight sum_t w_t.

    With label smoothing e, nll_t is (1 - e) nll_t + e mean_v(-log p_v), the metric `smoothed_nats`. The metric
    `loss_nats` is the likelihood alone. `key` turns dropout on. What layers add is `nn.moe`'s sum over all
    tokens that are not padding, trained on or not.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5 (z-loss, there with 1e-4).
    """
    scores, losses = score(model, batch, key, config.chunk, config.label_smoothing)
    loss = Mean.of(scores.nll, batch.weights)
    metrics = {"loss_nats": loss, "token_accuracy": Mean.of(scores.correct, batch.weights)}
    total = loss.total
    if scores.smoothed is not None:
        metrics["smoothed_nats"] = Mean.of(scores.smoothed, batch.weights)
        total = metrics["smoothed_nats"].total
    if config.z_loss:
        metrics["z"] = Mean.of(jnp.square(scores.log_normalizer), batch.weights)
        total = total + config.z_loss * metrics["z"].total
    if ADDED in losses:
        total = total + losses[ADDED].total
    return Loss(Mean(total, loss.weight), metrics | losses)


def score(
    model: Decoder, batch: Tokens, key: Array | None, chunk: int | None, smoothing: float = 0.0
) -> tuple[TokenScores, dict[str, Mean]]:
    """The scores of each target, its logits `chunk` tokens at a time; and the means that layers give.

    Where keys go round a ring, the slots of each row are dealt out to its devices in here, and the scores put back: so
    every token has its own score, and only dropout draws differ from those without a ring.
    """
    parts = context.ways() if model.config.has_ring else 1
    dealt = context.deal(batch, parts)
    hidden = model(
        dealt.tokens,
        positions=dealt.positions,
        segments=dealt.segments,
        reach=dealt.reach,
        inner=dealt.inner,
        key=key,
        dealt=parts,
    )

    def of(values: Array, targets: Array) -> TokenScores:
        with jax.named_scope("unembed"):
            return token_scores(model.logits(values), targets, smoothing)

    scores = in_chunks(of, hidden.values, dealt.targets, tokens=chunk)
    return context.undeal(scores, parts), hidden.losses
