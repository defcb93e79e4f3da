"""What an objective gives back."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import widened
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.models.decoder import Decoder
from jaxlm.nn.moe import ADDED
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.mtp import shifted_targets
from jaxlm.ops import gumbel
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores
from jaxlm.parallel import context


class Loss(NamedTuple):
    """What is minimised, and what is worth knowing; all of it sums and weights.

    Args:
      objective: the loss of the tokens that are trained on, and their weight.
      metrics: figures by name.
      added: what layers add, and the number of tokens that it is a sum over: all that are not padding, trained on or not. So
        the mean that is minimised is objective.value + added.value, and a coefficient of `added` means the same however few
        tokens an objective trains on. None if no layer adds anything.
    """

    objective: Mean
    metrics: dict[str, Mean]
    added: Mean | None = None

    @property
    def value(self) -> Array:
        """Return the mean that is minimised, of this batch alone."""
        return (
            self.objective.value if self.added is None else self.objective.value + self.added.value
        )


# The negative log-likelihood of the batch's targets.


def token_nll(
    model: Model,
    batch: Tokens,
    key: Array | None,
    config: LossConfig,
    ahead: tuple[float, ...] = (),
) -> Loss:
    """sum_t w_t (nll_t + z log_normalizer_t^2), and the weight sum_t w_t; apart from it, what the layers add.

    With label smoothing e, nll_t is (1 - e) nll_t + e mean_v(-log p_v), the metric `smoothed_nats`. The metric
    `loss_nats` is the likelihood alone. `key` turns dropout on. What layers add is `nn.moe`'s sum over all tokens that are
    not padding, and its weight their number (`Loss.added`).

    `ahead` are the weights of the same sums for the tokens 2, 3, ... ahead, which the model's heads predict: so each is
    divided by the weight of the next tokens, of which a document has a few more. Their metrics are `ahead_2_nats` and
    `ahead_2_accuracy`, and so on; all others are of the next token. Rows of a mixture that do not predict them add nothing to
    these sums (`batch.predicts_ahead`).

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5 (z-loss, there with 1e-4); DeepSeek-AI 2024, arXiv:2412.19437,
    equations 24 and 25 (further tokens, where each weight is lambda / D).
    """
    parts = context.context_size() if model.config.has_ring else 1
    dealt = context.zigzag_shard(batch, parts)
    hidden = model.read(dealt, key=key, dealt=parts)

    def scored(values: Array, targets: Array) -> TokenScores:
        return _scores(model, values, targets, parts, config.chunk, config.label_smoothing)

    total, metrics = _total(scored(hidden.values, dealt.targets), batch.weights, config)
    losses = hidden.losses
    if ahead:
        assert isinstance(model, Decoder)
        following = shifted_targets(batch, len(ahead))
        there = context.zigzag_shard(following, parts)
        values, added = model.ahead(
            hidden.stream,
            [(each.tokens, each.is_there) for each in there],
            positions=dealt.positions,
            segments=dealt.segments,
            key=None if key is None else random.stream(key, "ahead"),
            dealt=parts,
        )
        losses = Mean.merged(losses, added)
        for number, (weight, value) in enumerate(zip(ahead, values, strict=True)):
            scores = scored(value, there[number].targets)
            own, found = _total(scores, following[number].weights, config)
            total = total + weight * own
            metrics[f"ahead_{number + 2}_nats"] = found["loss_nats"]
            metrics[f"ahead_{number + 2}_accuracy"] = found["token_accuracy"]
    auxiliary = None
    if ADDED in losses:
        auxiliary = Mean(losses[ADDED].total, (batch.segments > 0).sum(dtype=jnp.float32))
    return Loss(Mean(total, metrics["loss_nats"].weight), metrics | losses, auxiliary)


def sampled_label_nll(model: Model, batch: Tokens, config: LossConfig) -> Loss:
    """Return the likelihood of next tokens that the model itself samples, without dropout; its gradient gives the curvature.

    `batch.targets` are not ids but a seed for each slot, even over 0 to 2^31 - 1. The id is a function of the slot's seed and
    logits alone (`ops.gumbel`): micro-batches, chunks and meshes sample the same ids, up to rounding of the logits.
    """
    parts = context.context_size() if model.config.has_ring else 1
    dealt = context.zigzag_shard(batch, parts)
    hidden = model.read(dealt, key=None, dealt=parts)

    logits_of = _logits(model)

    def of(values: Array, seeds: Array) -> Array:
        logits = logits_of(values)
        ids = gumbel.sample(jax.lax.stop_gradient(logits), seeds)
        return token_scores(logits, ids).nll

    nll = in_chunks(of, hidden.values, dealt.targets, tokens=config.chunk)
    return Loss(Mean.of(context.zigzag_unshard(nll, parts), batch.weights), {})


def score(
    model: Model, batch: Tokens, key: Array | None, chunk: int | None
) -> tuple[TokenScores, dict[str, Mean]]:
    """The scores of each target, its logits `chunk` tokens at a time; and the means that layers give.

    Where keys go round a ring, the slots of each row are dealt out to its devices in here, and the scores put back: so
    every token has its own score, and only dropout draws differ from those without a ring.
    """
    parts = context.context_size() if model.config.has_ring else 1
    dealt = context.zigzag_shard(batch, parts)
    hidden = model.read(dealt, key=key, dealt=parts)
    return _scores(model, hidden.values, dealt.targets, parts, chunk, 0.0), hidden.losses


def _scores(
    model: Model, values: Array, targets: Array, parts: int, chunk: int | None, smoothing: float
) -> TokenScores:
    logits = _logits(model)

    def of(values: Array, targets: Array) -> TokenScores:
        with jax.named_scope("unembed"):
            return token_scores(logits(values), targets, smoothing)

    return context.zigzag_unshard(in_chunks(of, values, targets, tokens=chunk), parts)


def _logits(model: Model) -> Callable[[Array], Array]:
    """Return `model.logits`, whose weights' gradients are summed in float32 over chunks of tokens."""
    graph, state = nnx.split(model)
    wide, narrowed = widened(state)
    return lambda values: nnx.merge(graph, narrowed(wide)).logits(values)


def _total(
    scores: TokenScores, weights: Array, config: LossConfig
) -> tuple[Array, dict[str, Mean]]:
    """What is minimised, as a sum, and what is worth knowing."""
    loss = Mean.of(scores.nll, weights)
    metrics = {"loss_nats": loss, "token_accuracy": Mean.of(scores.correct, weights)}
    total = loss.total
    if scores.smoothed is not None:
        metrics["smoothed_nats"] = Mean.of(scores.smoothed, weights)
        total = metrics["smoothed_nats"].total
    if config.z_loss:
        metrics["z"] = Mean.of(jnp.square(scores.log_normalizer), weights)
        total = total + config.z_loss * metrics["z"].total
    return total, metrics
