"""Reward models: a score of a text, learned from pairs of answers, or of each of its steps."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.models.decoder import Decoder
from jaxlm.objectives.loss import Loss, auxiliary_loss, read_sharded
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.preference import is_of_answer, paired
from jaxlm.objectives.preference_config import Process, Reward
from jaxlm.ops import preference
from jaxlm.parallel import context


class RewardLearning(Objective[Reward]):
    """Minimize the mean over pairs of `ops.preference.reward`.

    The score of an answer is r of the last slot of its segment, which has read the conversation up
    to the token before its end. At first the head is 0, and the loss ln 2 for margins of 0.

    Metrics: `loss_nats` is the minimized mean, `margin` the mean difference of the scores of a
    pair, and `preference_accuracy` the share of pairs whose difference is positive; 0 counts half.
    `chosen_score` and `rejected_score` are mean scores, `chosen_tokens` and `rejected_tokens` mean
    numbers of tokens of an answer.

    Source: see `ops.preference.reward`.
    """

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch, see the class. The weight is two for each pair."""
        del teacher
        settings, answers = self.settings, batch.answers
        assert answers is not None  # the config admits no other data
        scores, losses = score_texts(
            model, batch._replace(answers=None), key, answers.sides.shape[1]
        )
        is_chosen, is_rejected = answers.sides > 0, answers.sides < 0
        chosen, rejected = paired(scores, is_chosen), paired(scores, is_rejected)
        ones = jnp.ones_like(scores)
        is_pair = paired(ones, is_chosen) * paired(ones, is_rejected)
        margin = settings.margin * paired(answers.margins, is_chosen)
        each = preference.reward(chosen, rejected, margin=margin, center=settings.center)
        gap, mean = chosen - rejected, Mean.of(each, is_pair)
        metrics = {
            "loss_nats": mean,
            "margin": Mean.of(gap, is_pair),
            "preference_accuracy": Mean.of((gap > 0) + 0.5 * (gap == 0), is_pair),
        }
        is_of = is_of_answer(batch.segments, scores.shape[1])
        tokens = (is_of & (batch.weights > 0)[:, :, None]).sum(1).astype(jnp.float32)
        for name, of in (("chosen", is_chosen), ("rejected", is_rejected)):
            metrics[f"{name}_score"] = Mean.of(scores, of)
            metrics[f"{name}_tokens"] = Mean.of(tokens, of)
        objective = Mean(2 * mean.total, 2 * mean.weight)
        return Loss(objective, metrics | losses, auxiliary_loss(losses, batch))


class ProcessLearning(Objective[Process]):
    """Minimize the mean over steps of `ops.preference.process`.

    The score of a step is r of the slot of its last token, which has read the conversation up to
    it. At first the head is 0, and the loss ln 2.

    Metrics: `loss_nats` is the minimized mean, `step_accuracy` the share of steps whose score has
    the sign of their label; 0 counts half. `right_accuracy` and `wrong_accuracy` are the shares
    among right and wrong steps, `right_score` and `wrong_score` their mean scores.

    Source: see `ops.preference.process`.
    """

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch, see the class. The weight is the number of steps."""
        del teacher
        assert batch.steps is not None  # the config admits no other data
        labels = batch.steps
        scores, losses = score_slots(model, batch._replace(steps=None), key)
        is_right, is_wrong = labels > 0, labels < 0
        mean = Mean.of(preference.process(scores, is_right), labels != 0)
        signed = labels * scores
        correct = (signed > 0) + 0.5 * (signed == 0)
        metrics = {"loss_nats": mean, "step_accuracy": Mean.of(correct, labels != 0)}
        for name, of in (("right", is_right), ("wrong", is_wrong)):
            metrics[f"{name}_accuracy"] = Mean.of(correct, of)
            metrics[f"{name}_score"] = Mean.of(scores, of)
        return Loss(mean, metrics | losses, auxiliary_loss(losses, batch))


def score_texts(
    model: Model, batch: Tokens, key: Array | None, texts: int
) -> tuple[Float[Array, "B S"], dict[str, Mean]]:
    """Return the score of each segment of each row, and the means that layers give.

    A score does not depend on padding, order or packing. Segments that a row lacks have 0.

    Args:
      model: a decoder with a reward head.
      batch: the rows.
      key: turns dropout on.
      texts: largest number of segments of a row.
    """
    scores, losses = score_slots(model, batch, key)
    following = jnp.pad(batch.segments[:, 1:], ((0, 0), (0, 1)))
    is_last = (batch.segments != following)[:, :, None] & is_of_answer(batch.segments, texts)
    return jnp.where(is_last, scores[:, :, None], 0.0).sum(1), losses


def score_slots(
    model: Model, batch: Tokens, key: Array | None
) -> tuple[Float[Array, "B T"], dict[str, Mean]]:
    """Return the score of each slot, of its text so far, and the means that layers give.

    Args as of `score_texts`.
    """
    assert isinstance(model, Decoder)
    assert model.reward is not None
    _, hidden, parts = read_sharded(model, batch, key)
    return context.zigzag_unshard(model.reward(hidden.values), parts), hidden.losses
