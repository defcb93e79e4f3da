"""Learning from preferences: prefer chosen answers to rejected ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.objectives.loss import Loss, auxiliary_loss, score
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.preference_config import Preference
from jaxlm.ops import preference


class ScoredAnswers(NamedTuple):
    """Sums over the scored tokens of each answer of each row."""

    log_p: Float[Array, "B S"]  # log-probability, nats
    tokens: Float[Array, "B S"]  # number, or the sum of the weights


class PreferenceLearning(Objective[Preference]):
    """Minimize the mean over pairs of a loss of `ops.preference`; of kto, the mean over answers.

    With `objective.nll` = a, the loss of a pair has a term a nll_w / |w|, the chosen answer's
    negative log-likelihood over its number of tokens; orpo has 1 + a. z of kto is 0: an estimate
    from answers to other prompts would depend on the micro-batch.

    Metrics: `loss_nats` is the minimized mean: at the reference, for dpo, ln 2 plus the nll term.
    `chosen_nats` and `rejected_nats` are the negative log-likelihood of a token, `kl_nats` the mean
    log-ratio of a token of both. `margin` is beta times the mean gap between the log-ratios of a
    pair (between log-probabilities without a reference), and `preference_accuracy` the share of
    pairs whose gap is positive; a gap of 0 counts half. Of answers with labels, `chosen_reward` and
    `rejected_reward` replace the margin, and the accuracy is that of the sign of the log-ratio.
    `chosen_tokens` and `rejected_tokens` are means of an answer.

    Source: see `ops.preference`; Pang et al. 2024, arXiv:2404.19733, equation 2 (the nll term).
    """

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch, see the class; `teacher` is a reference that is not cached.

        The weight is the number of answers, two for each pair.
        """
        settings, answers, chunk = self.settings, batch.answers, self.loss_settings.chunk
        assert answers is not None  # the config admits no other data
        scored, losses = score_answers(model, batch, key, chunk)
        reference = answers.reference
        if teacher is not None:
            reference = jax.lax.stop_gradient(score_answers(teacher, batch, None, chunk)[0].log_p)
        sides, counts = answers.sides, jnp.maximum(scored.tokens, 1e-30)
        is_judged = (sides != 0) & (scored.tokens > 0)
        ratio = scored.log_p if reference is None else scored.log_p - reference
        value = ratio / counts if settings.is_mean else ratio
        value = jnp.where(is_judged, value, 0.0)
        nll = jnp.where(is_judged, -scored.log_p / counts, 0.0)
        is_chosen, is_rejected = (is_judged & (sides * sign > 0) for sign in (1, -1))
        nats = {"chosen_nats": is_chosen, "rejected_nats": is_rejected}
        metrics = {name: _mean(-scored.log_p, scored.tokens, of) for name, of in nats.items()}
        metrics["chosen_tokens"] = Mean.of(scored.tokens, is_chosen)
        metrics["rejected_tokens"] = Mean.of(scored.tokens, is_rejected)
        if reference is not None:
            metrics["kl_nats"] = _mean(ratio, scored.tokens, is_judged)
        if settings.loss == "kto":
            each = preference.kto(value, is_chosen, beta=settings.beta)
            each = each + settings.nll * jnp.where(is_chosen, nll, 0.0)
            metrics["loss_nats"] = objective = Mean.of(each, is_judged)
            is_right = jnp.where(is_chosen, value > 0, value < 0) + 0.5 * (value == 0)
            metrics["preference_accuracy"] = Mean.of(is_right, is_judged)
            for name, of in (("chosen_reward", is_chosen), ("rejected_reward", is_rejected)):
                metrics[name] = Mean.of(settings.beta * value, of)
        else:
            chosen, rejected = paired(value, is_chosen), paired(value, is_rejected)
            is_pair = paired(jnp.ones_like(value), is_chosen) * paired(
                jnp.ones_like(value), is_rejected
            )
            gap = chosen - rejected
            weight = settings.nll + (settings.loss == "orpo")
            each = self._loss_of_pairs(chosen, rejected) + weight * paired(nll, is_chosen)
            metrics["loss_nats"] = mean = Mean.of(each, is_pair)
            objective = Mean(2 * mean.total, 2 * mean.weight)
            metrics["margin"] = Mean.of(settings.beta * gap, is_pair)
            metrics["preference_accuracy"] = Mean.of((gap > 0) + 0.5 * (gap == 0), is_pair)
        return Loss(objective, metrics | losses, auxiliary_loss(losses, batch))

    def _loss_of_pairs(self, chosen: Array, rejected: Array) -> Array:
        """Return the loss of each pair from the values of its answers."""
        settings, gap = self.settings, chosen - rejected
        beta = settings.beta
        match settings.loss:
            case "ipo":
                return preference.ipo(gap, beta=beta)
            case "hinge":
                return preference.hinge(gap, beta=beta)
            case "orpo":
                return preference.orpo(chosen, rejected, beta=beta)
            case "simpo":
                return preference.simpo(gap, beta=beta, gamma=settings.gamma)
            case _:
                smoothing = {"smoothing": settings.smoothing, "noise": settings.noise}
                return preference.dpo(gap, beta=beta, **smoothing)  # type: ignore[arg-type]


def score_answers(
    model: Model, batch: Tokens, key: Array | None, chunk: int | None
) -> tuple[ScoredAnswers, dict[str, Mean]]:
    """Return log-probability and length of each answer, and the means that layers give.

    The prompt has weight 0. The sums do not depend on the order of answers, padding or packing.
    Args as of `loss.score`.
    """
    assert batch.answers is not None
    scores, losses = score(model, batch._replace(answers=None), key, chunk)
    is_of = is_of_answer(batch.segments, batch.answers.sides.shape[1])

    def total(values: Array) -> Array:
        return jnp.where(is_of, values[:, :, None], 0.0).sum(1)

    counted = jnp.where(batch.weights > 0, batch.weights, 0.0)
    nats = jnp.where(counted > 0, scores.nll * counted, 0.0)
    return ScoredAnswers(-total(nats), total(counted)), losses


def is_of_answer(segments: Int[Array, "B T"], count: int) -> Bool[Array, "B T S"]:
    """Return whether a slot is of each of the first `count` answers of its row."""
    numbers = 1 + jnp.arange(count, dtype=segments.dtype)
    return segments[:, :, None] == numbers[None, None]


def _mean(sums: Array, tokens: Array, is_counted: Array) -> Mean:
    """Return the mean of a token from sums over answers."""
    return Mean(jnp.where(is_counted, sums, 0.0).sum(), jnp.where(is_counted, tokens, 0.0).sum())


def paired(values: Array, is_counted: Array) -> Array:
    """Return the counted one of the two values of each pair: [B, S] to [B, S / 2]."""
    return jnp.where(is_counted, values, 0.0).reshape(len(values), -1, 2).sum(-1)
