"""Policy gradients: raise the probability of sampled answers whose reward is high."""

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.models.decoder import Decoder
from jaxlm.objectives.loss import Loss, auxiliary_loss, logits_function, read_sharded
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.policy_config import Policy, Ppo
from jaxlm.ops import policy
from jaxlm.ops.cross_entropy import in_chunks, token_scores
from jaxlm.parallel import context

HIGH = 0.999  # quantile of the gap to the sampler
PolicySettings = TypeVar("PolicySettings", bound=Policy | Ppo, covariant=True)


class DrawnScores(NamedTuple):
    """Scores of the distribution that answers are drawn from; the entropy has no gradient."""

    log_p: Float[Array, "B T"]  # of the target, nats
    entropy: Float[Array, "B T"]  # nats
    value: Float[Array, "B T"] | None = None  # expected return, of a model with a value head


@dataclasses.dataclass(frozen=True)
class PolicyLearning(Objective[PolicySettings]):
    """Minimize sum_t w_t L_t / N over sampled tokens, with `Tokens.weights` w and counts N.

    L is a surrogate of `ops.policy`, of the ratio between the model and the distribution that the
    answers were drawn from: the model's, without ids that are no text, at a temperature.

    Metrics: `loss_nats` is the minimized mean. Of sampled tokens with a weight, `entropy_nats` is
    the mean entropy, `clipped_share` the share without a gradient by the clip, `drift_nats` the
    divergence from the distribution drawn from (k3), and `kl_nats` that from the reference.
    `sampler_gap_nats` is the mean distance between both log-probabilities of a token, and
    `sampler_gap_high_nats` its 99.9th percentile; at the first update of a rollout both are of
    rounding alone.

    Args:
      temperature: divisor of the logits that answers are drawn with.
      allowed: mask of ids that are drawn; None for all.
      is_corrected: `Rollout.log_p` is not the sampler's, and there is no gap to it.
      most: largest number of sampled tokens of a row; the logits of others are not computed. None
        computes all.

    Source: see `Policy`.
    """

    temperature: float = 1.0
    allowed: Bool[np.ndarray, "V"] | None = dataclasses.field(default=None, compare=False)
    is_corrected: bool = False
    most: int | None = None

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch of rollouts, see the class; `teacher` is the reference."""
        scores, losses = self.score(model, batch, key)
        objective, metrics = self.policy_loss(scores, batch, teacher)
        return Loss(objective, metrics | losses, auxiliary_loss(losses, batch))

    def policy_loss(
        self, scores: DrawnScores, batch: Tokens, teacher: Model | None
    ) -> tuple[Mean, dict[str, Mean]]:
        """Return the mean that is minimized and the metrics, from the scores of the model."""
        settings, terms, rollout = self.settings, self.settings.terms, batch.rollout
        assert rollout is not None  # the recipe makes the batch
        is_drawn = batch.weights > 0
        log_p = jnp.where(is_drawn, scores.log_p, 0.0)
        log_ratio = jnp.where(is_drawn, log_p - rollout.log_p, 0.0)
        if terms.ratio == "sequence":
            ratio = jnp.exp(policy.sequence_log_ratio(log_ratio, is_drawn))
        else:
            ratio = jnp.exp(log_ratio)
        advantages = rollout.advantages
        metrics, penalty = {}, jnp.zeros_like(log_p)
        if teacher is not None:
            reference = jax.lax.stop_gradient(self.score(teacher, batch, None)[0].log_p)
            reference = jnp.where(is_drawn, reference, 0.0)
            k3 = policy.k3(log_p, reference)
            metrics["kl_nats"] = Mean.of(k3, is_drawn)
            if settings.kl == "reward_k1":
                k1 = policy.k1_to_go(jax.lax.stop_gradient(log_p), reference, is_drawn)
                advantages = advantages - settings.beta * k1
            else:
                is_weighted = settings.kl == "loss_k3_weighted"
                penalty = settings.beta * k3 * (ratio if is_weighted else 1.0)
        limits = {"low": terms.clip_low, "high": terms.clip_high}
        match terms.surrogate:
            case "weight":
                each = policy.weighted(log_p, ratio, advantages, high=terms.clip_high)
                is_clipped = ratio > 1 + terms.clip_high
            case "plain":
                each = -ratio * advantages
                is_clipped = jnp.zeros_like(is_drawn)
            case _:
                each = policy.clipped(ratio, advantages, **limits)
                is_clipped = policy.is_clipped(ratio, advantages, **limits)
        each = jnp.where(is_drawn, batch.weights * (each + penalty), 0.0)
        objective = Mean(each.sum(), rollout.counts.sum())
        metrics |= {
            "loss_nats": objective,
            "entropy_nats": Mean.of(scores.entropy, is_drawn),
            "clipped_share": Mean.of(is_clipped, is_drawn),
            "drift_nats": Mean.of(policy.k3(rollout.log_p, log_p), is_drawn),
        }
        if not self.is_corrected:
            gap = jnp.where(is_drawn, jnp.abs(log_ratio), jnp.nan)
            high = jnp.nanquantile(jax.lax.stop_gradient(gap), HIGH)
            has_any = is_drawn.any().astype(jnp.float32)
            metrics["sampler_gap_nats"] = Mean.of(jnp.abs(log_ratio), is_drawn)
            metrics["sampler_gap_high_nats"] = Mean(jnp.where(has_any > 0, high, 0.0), has_any)
        return objective, metrics

    def score(
        self, model: Model, batch: Tokens, key: Array | None
    ) -> tuple[DrawnScores, dict[str, Mean]]:
        """Return the scores of each target, and the means that layers give; see `loss.score`.

        With `most`, scores of targets that were not sampled are 0, except for values.
        """
        sharded, hidden, parts = read_sharded(model, batch._replace(rollout=None), key)
        logits_of = logits_function(model)

        def scored(values: Array, targets: Array) -> DrawnScores:
            logits = logits_of(values).astype(jnp.float32)
            if self.allowed is not None:
                logits = jnp.where(self.allowed, logits, -jnp.inf)
            logits = logits / self.temperature
            p = jax.nn.softmax(jax.lax.stop_gradient(logits))
            entropy = -jnp.where(p > 0, p * jnp.log(jnp.maximum(p, 1e-37)), 0.0).sum(-1)
            return DrawnScores(-token_scores(logits, targets).nll, entropy)

        values, targets, places = hidden.values, sharded.targets, None
        # A row that is split over devices keeps its slots.
        if self.most and self.most < targets.shape[1] and context.context_size() == 1:
            places = jnp.argsort(sharded.weights == 0, axis=1, stable=True)[:, : self.most]
            # Each place once, so that the gradient is moved and not summed in 16 bits.
            options = {"unique_indices": True, "mode": "promise_in_bounds"}
            values = jax.vmap(lambda x, at: x.at[at].get(**options))(values, places)
            targets = jnp.take_along_axis(targets, places, axis=1)
        scores = in_chunks(scored, values, targets, tokens=self.loss_settings.chunk)
        if places is not None:
            zeros = jnp.zeros(sharded.targets.shape[1])
            spread = jax.vmap(lambda x, at: zeros.at[at].set(x))  # of a row, so within its device
            scores = jax.tree.map(lambda x: spread(x, places), scores)
        if isinstance(model, Decoder) and model.value is not None:
            scores = scores._replace(value=model.value(hidden.values))
        return context.zigzag_unshard(scores, parts), hidden.losses
