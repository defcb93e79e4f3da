"""Token losses: negative log-likelihood, multi-token prediction, labels that the model samples.

Example:
  >>> scores = token_scores(jnp.zeros((2, 4)), jnp.array([0, 3]))
  >>> _, metrics = weighted(scores, jnp.array([1.0, 0.0]), LossConfig())
  >>> round(float(metrics["loss_nats"].value), 4)  # log(4), of the first token alone
  1.3863
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import widened
from jaxlm.data.batch import Tokens
from jaxlm.models.backbone import Hidden
from jaxlm.models.build import Model
from jaxlm.models.decoder import Decoder
from jaxlm.nn.moe import ADDED
from jaxlm.objectives.config import LossConfig
from jaxlm.ops import gumbel
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores
from jaxlm.parallel import context


class Loss(NamedTuple):
    """The quantity to minimize, and metrics, as sums and weights.

    Args:
      objective: sum of the loss over trained tokens, and their weight.
      metrics: figures by name.
      added: sum of the auxiliary losses of layers, and the number of tokens that are not padding,
        trained on or not; None without any. The minimized mean is objective.value + added.value, so
        a coefficient of an auxiliary loss means the same however few tokens an objective trains on.
    """

    objective: Mean
    metrics: dict[str, Mean]
    added: Mean | None = None

    @property
    def value(self) -> Array:
        """Return the minimized mean of this batch alone."""
        value = self.objective.value
        return value if self.added is None else value + self.added.value


def token_nll(
    model: Model,
    batch: Tokens,
    key: Array | None,
    config: LossConfig,
    *,
    mtp_weights: tuple[float, ...] = (),
    document_mask: bool = True,
) -> Loss:
    """Return sum_t w_t (nll_t + z log_normalizer_t^2) and the weight sum_t w_t.

    With label smoothing e, nll_t is (1 - e) nll_t + e mean_v(-log p_v), the metric `smoothed_nats`.
    The metric `loss_nats` is the plain negative log-likelihood.

    With multi-token prediction the same sums for the tokens 2, 3, ... ahead are added, times their
    weight. Each is divided by the weight of the next tokens; a document has a few more of those.
    Their metrics are `ahead_2_nats`, `ahead_2_accuracy` and so on. Rows of a mixture that do not
    predict further tokens (`batch.predicts_ahead`) add nothing to them.

    Args:
      model: the model that is trained.
      batch: rows of tokens, targets and weights.
      key: random key of dropout; None turns dropout off.
      config: z-loss, label smoothing, and the tokens whose logits are in memory at a time.
      mtp_weights: loss weights of the tokens 2, 3, ... ahead.
      document_mask: see `read_sharded`.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5 (z-loss, there with 1e-4);
    DeepSeek-AI 2024, arXiv:2412.19437, equations 24 and 25 (multi-token prediction; a weight here
    is lambda / D there).
    """
    sharded, hidden, parts = read_sharded(model, batch, key, document_mask=document_mask)

    def scored(values: Array, targets: Array) -> TokenScores:
        return _scores(model, values, targets, parts, config.chunk, config.label_smoothing)

    total, metrics = weighted(scored(hidden.values, sharded.targets), batch.weights, config)
    losses = hidden.losses
    if mtp_weights:
        assert isinstance(model, Decoder)
        shifted = shifted_targets(batch, len(mtp_weights))
        shifted_shards = context.zigzag_shard(shifted, parts)
        values, added = model.mtp_hidden(
            hidden.stream,
            [(each.tokens, each.is_valid) for each in shifted_shards],
            positions=sharded.positions,
            segments=sharded.segments,
            key=None if key is None else random.stream(key, "ahead"),
            parts=parts,
        )
        losses = Mean.merged(losses, added)
        for number, (weight, value) in enumerate(zip(mtp_weights, values, strict=True)):
            scores = scored(value, shifted_shards[number].targets)
            part, figures = weighted(scores, shifted[number].weights, config)
            total = total + weight * part
            metrics[f"ahead_{number + 2}_nats"] = figures["loss_nats"]
            metrics[f"ahead_{number + 2}_accuracy"] = figures["token_accuracy"]
    return Loss(
        Mean(total, metrics["loss_nats"].weight), metrics | losses, auxiliary_loss(losses, batch)
    )


def sampled_label_nll(model: Model, batch: Tokens, config: LossConfig) -> Loss:
    """Return the negative log-likelihood of next tokens that the model samples, without dropout.

    Its gradient estimates the curvature. `batch.targets` are not ids but a seed for each slot,
    uniform over 0 to 2^31 - 1. The id is a function of the slot's seed and logits alone
    (`ops.gumbel`): micro-batches, chunks and meshes sample the same ids, up to rounding of logits.
    """
    sharded, hidden, parts = read_sharded(model, batch, None)
    logits_of = logits_function(model)

    def nll(values: Array, seeds: Array) -> Array:
        logits = logits_of(values)
        ids = gumbel.sample(jax.lax.stop_gradient(logits), seeds)
        return token_scores(logits, ids).nll

    nats = in_chunks(nll, hidden.values, sharded.targets, tokens=config.chunk)
    return Loss(Mean.of(context.zigzag_unshard(nats, parts), batch.weights), {})


def score(
    model: Model, batch: Tokens, key: Array | None, chunk: int | None
) -> tuple[TokenScores, dict[str, Mean]]:
    """Return the scores of each target, and the means that layers give.

    With ring attention the slots of each row are distributed in zigzag order inside this function,
    and the scores are put back in order: only dropout draws differ from those without a ring.
    Logits of `chunk` tokens are in memory at a time, None computes all at once; None as the `key`
    turns dropout off.
    """
    sharded, hidden, parts = read_sharded(model, batch, key)
    return _scores(model, hidden.values, sharded.targets, parts, chunk, 0.0), hidden.losses


def read_sharded(
    model: Model, batch: Tokens, key: Array | None, *, document_mask: bool = True
) -> tuple[Tokens, Hidden, int]:
    """Return the batch with rows sharded in zigzag, the model's output, and the context's size.

    Without `document_mask` a decoder reads a row as one document, with positions from 0 on. Padding
    is at the end of a row, where no token sees it.
    """
    parts = context.context_size() if model.config.has_ring else 1
    sharded = context.zigzag_shard(batch, parts)
    if document_mask:
        return sharded, model.read(sharded, key=key, parts=parts), parts
    assert isinstance(model, Decoder)
    index = jnp.asarray(context.zigzag_order(batch.tokens.shape[1], parts), jnp.int32)
    positions = jnp.broadcast_to(index, batch.tokens.shape)
    return sharded, model.hidden(sharded.tokens, positions=positions, key=key, parts=parts), parts


def logits_function(model: Model) -> Callable[[Array], Array]:
    """Return `model.logits`, the gradients of whose weights are summed in float32 over chunks."""
    graph, state = nnx.split(model)
    wide, narrowed = widened(state)
    return lambda values: nnx.merge(graph, narrowed(wide)).logits(values)


def weighted(
    scores: TokenScores, weights: Array, config: LossConfig
) -> tuple[Array, dict[str, Mean]]:
    """Return the sum to minimize of scored tokens, and its metrics."""
    nats = Mean.of(scores.nll, weights)
    metrics = {"loss_nats": nats, "token_accuracy": Mean.of(scores.correct, weights)}
    total = nats.total
    if scores.smoothed is not None:
        metrics["smoothed_nats"] = Mean.of(scores.smoothed, weights)
        total = metrics["smoothed_nats"].total
    if config.z_loss:
        metrics["z"] = Mean.of(jnp.square(scores.log_normalizer), weights)
        total = total + config.z_loss * metrics["z"].total
    return total, metrics


def auxiliary_loss(losses: dict[str, Mean], batch: Tokens) -> Mean | None:
    """Return the auxiliary losses of layers over tokens that are not padding; None without any."""
    if ADDED not in losses:
        return None
    return Mean(losses[ADDED].total, (batch.segments > 0).sum(dtype=jnp.float32))


def _scores(
    model: Model, values: Array, targets: Array, parts: int, chunk: int | None, smoothing: float
) -> TokenScores:
    logits_of = logits_function(model)

    def scored(values: Array, targets: Array) -> TokenScores:
        with jax.named_scope("unembed"):
            return token_scores(logits_of(values), targets, smoothing)

    return context.zigzag_unshard(in_chunks(scored, values, targets, tokens=chunk), parts)


class ShiftedTargets(NamedTuple):
    """For each slot, the token k slots ahead and the one after it, which is the target."""

    tokens: Int[Array, "B T"]
    is_valid: Bool[Array, "B T"]  # whether the token is in the slot's document
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]  # 0 if the target is beyond its document or its row


def shifted_targets(batch: Tokens, count: int) -> list[ShiftedTargets]:
    """Return the targets k slots ahead for k from 1 to `count`, never of another document."""
    counted = (
        batch.weights if batch.predicts_ahead is None else batch.weights * batch.predicts_ahead
    )
    shifted = []
    for k in range(1, count + 1):
        tokens, targets, weights, segments = (
            jnp.pad(each[:, k:], [(0, 0), (0, k)])
            for each in (batch.tokens, batch.targets, counted, batch.segments)
        )
        is_valid = (segments == batch.segments) & (batch.segments > 0)
        shifted.append(ShiftedTargets(tokens, is_valid, targets, jnp.where(is_valid, weights, 0.0)))
    return shifted


def mtp_views(batch: Tokens, count: int) -> list[Tokens]:
    """Return the batch once for each further token, with the weights that its head trains on."""
    return [
        batch._replace(weights=jnp.pad(each.weights[:, :-k], [(0, 0), (k, 0)]))
        for k, each in enumerate(shifted_targets(batch, count), 1)
    ]
