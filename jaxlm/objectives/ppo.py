"""Proximal policy optimization: a policy gradient against values that the model predicts."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.objectives.loss import Loss, auxiliary_loss
from jaxlm.objectives.policy import PolicyLearning
from jaxlm.objectives.policy_config import Ppo
from jaxlm.ops import policy


@dataclasses.dataclass(frozen=True)
class ProximalPolicy(PolicyLearning[Ppo]):
    """Minimize the loss of the policy plus c sum_t w_t E_t / N, E of `ops.policy.value_error`.

    c is `objective.value_weight`, w and N are those of `PolicyLearning`. The value of a slot is
    that of the model's value head before its target is drawn. Advantages, returns and the values of
    the model that drew the answers are in the batch. The penalty `reward_k1` is in them too.

    Metrics: those of `PolicyLearning`, where `loss_nats` is the minimized mean; `policy_loss` and
    `value_loss` are its parts before c. `value_mean` and `return_mean` are means over sampled
    tokens, and `value_clipped_share` is the share without a gradient by the clip of the value.
    """

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch of rollouts, see the class; `teacher` is the reference."""
        settings, rollout = self.settings, batch.rollout
        assert rollout is not None
        assert rollout.values is not None
        assert rollout.returns is not None
        is_in_rewards = settings.kl == "reward_k1"
        scores, losses = self.score(model, batch, key)
        assert scores.value is not None
        mean, metrics = self.policy_loss(scores, batch, None if is_in_rewards else teacher)
        is_drawn = batch.weights > 0
        value = jnp.where(is_drawn, scores.value, 0.0)
        old, returns = rollout.values, rollout.returns
        error = policy.value_error(value, old, returns, clip=settings.value_clip)
        part = Mean(jnp.where(is_drawn, batch.weights * error, 0.0).sum(), mean.weight)
        is_clipped = error > 0.5 * jnp.square(value - returns)
        objective = Mean(mean.total + settings.value_weight * part.total, mean.weight)
        metrics |= {
            "loss_nats": objective,
            "policy_loss": mean,
            "value_loss": part,
            "value_mean": Mean.of(value, is_drawn),
            "return_mean": Mean.of(returns, is_drawn),
            "value_clipped_share": Mean.of(is_clipped, is_drawn),
        }
        return Loss(objective, metrics | losses, auxiliary_loss(losses, batch))
