"""Knowledge distillation: learn the next-token distribution of a frozen run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.objectives import config
from jaxlm.objectives.loss import Loss, auxiliary_loss, logits_function, read_sharded, weighted
from jaxlm.objectives.objective import Objective
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores
from jaxlm.parallel import context


class DistillScores(NamedTuple):
    """Figures of each slot from one pass over the logits of both models."""

    student: TokenScores
    divergence: Array  # KL(teacher || student) at the temperature, nats, [B, T]
    teacher_nll: Array  # nats, [B, T], without gradients


class Distillation(Objective[config.Distill]):
    """Minimize (1 - a) nll_t + a T^2 KL(teacher_t || student_t) over the trained tokens.

    a is `objective.weight`. Both distributions of the divergence are softmax(logits / T). T^2
    keeps its gradient at the scale of the labels' gradient. z-loss and label smoothing apply to
    the labels' part. Logits of `loss.chunk` tokens are in memory at a time, of both models.

    Metrics: those of next-token prediction, `teacher_kl_nats` and `teacher_nats`, the teacher's
    own loss on the same tokens.

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2.
    """

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch, see the class."""
        assert teacher is not None  # the run opens it before the first step
        settings, loss = self.settings, self.loss_settings
        sharded, hidden, parts = read_sharded(model, batch, key)
        taught = teacher.read(sharded, key=None, parts=parts)
        student_logits, teacher_logits = logits_function(model), logits_function(teacher)

        def scored(values: tuple[Array, Array], targets: Array) -> DistillScores:
            with jax.named_scope("unembed"):
                logits = student_logits(values[0])
                fixed = jax.lax.stop_gradient(teacher_logits(values[1]))
                return DistillScores(
                    token_scores(logits, targets, loss.label_smoothing),
                    divergence(fixed, logits, settings.temperature),
                    token_scores(fixed, targets).nll,
                )

        both = (hidden.values, jax.lax.stop_gradient(taught.values))
        scores = in_chunks(scored, both, sharded.targets, tokens=loss.chunk)
        scores = context.zigzag_unshard(scores, parts)
        labels, metrics = weighted(scores.student, batch.weights, loss)
        metrics["teacher_kl_nats"] = Mean.of(scores.divergence, batch.weights)
        metrics["teacher_nats"] = Mean.of(scores.teacher_nll, batch.weights)
        teacher_part = settings.temperature**2 * metrics["teacher_kl_nats"].total
        total = (1 - settings.weight) * labels + settings.weight * teacher_part
        return Loss(
            Mean(total, metrics["loss_nats"].weight),
            metrics | hidden.losses,
            auxiliary_loss(hidden.losses, batch),
        )


def divergence(teacher: Array, student: Array, temperature: float) -> Array:
    """Return KL(softmax(teacher / T) || softmax(student / T)) over the last axis, float32 nats."""
    log_p = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature)
    log_q = jax.nn.log_softmax(student.astype(jnp.float32) / temperature)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
