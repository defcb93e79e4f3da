"""Knowledge distillation: learn the next-token distribution of a frozen run."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.mean import Mean
from jaxlm.data.batch import TeacherTop, Tokens
from jaxlm.models.build import Model
from jaxlm.objectives import config
from jaxlm.objectives.loss import Loss, auxiliary_loss, logits_function, read_sharded, weighted
from jaxlm.objectives.objective import Objective
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores
from jaxlm.ops.top_parts import top_parts
from jaxlm.parallel import context


class DistillScores(NamedTuple):
    """Figures of each slot from one pass over the logits of both models."""

    student: TokenScores
    divergence: Array  # at the temperature, nats, [B, T]
    kl: Array  # KL(teacher || student) at the temperature, nats, [B, T]
    teacher_nll: Array  # nats, [B, T], without gradients


class Distillation(Objective[config.Distill]):
    """Minimize (1 - a) nll_t + a T^2 D(teacher_t, student_t) over the trained tokens.

    a is `objective.weight`, and D `objective.divergence`, see `divergence`. Both distributions of
    it are softmax(logits / T). T^2 keeps its gradient at the scale of the labels' gradient. z-loss
    and label smoothing apply to the labels' part. Logits of `loss.chunk` tokens are in memory at a
    time, of both models.

    Stored distributions (`objective.stored`) have the likeliest ids of the teacher, and one
    probability of all others together: D is that of the same parts of the student, see `parts_of`.

    Samples of the model (`objective.sampled`) have a = 1, and no gradient by way of being drawn.

    Metrics: those of next-token prediction, `teacher_kl_nats`, which is of KL(teacher || student)
    for every D, `divergence_nats` of another D, and `teacher_nats`, the teacher's own loss on the
    same tokens.

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2; Agarwal et al. 2023,
    arXiv:2306.13649, section 3.1 (reverse, jsd).
    """

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch, see the class."""
        settings, loss = self.settings, self.loss_settings
        read = batch._replace(rollout=None, teacher=None)
        sharded, hidden, parts = read_sharded(model, read, key)
        student_logits = logits_function(model)
        taught: Any
        if batch.teacher is not None:
            taught = context.zigzag_shard(batch.teacher, parts)
        else:
            assert teacher is not None  # the run opens it before the first step
            teacher_logits = logits_function(teacher)
            taught = jax.lax.stop_gradient(teacher.read(sharded, key=None, parts=parts).values)

        def scored(values: tuple[Array, Any], targets: Array) -> DistillScores:
            with jax.named_scope("unembed"):
                logits = student_logits(values[0])
                if isinstance(values[1], TeacherTop):
                    pair = (*parts_of(values[1], logits, settings.temperature), 1.0)
                    teacher_nll = values[1].nll.astype(jnp.float32)
                else:
                    fixed = jax.lax.stop_gradient(teacher_logits(values[1]))
                    pair = fixed, logits, settings.temperature
                    teacher_nll = token_scores(fixed, targets).nll
                kl = divergence(*pair)
                is_forward = settings.divergence == "forward"
                return DistillScores(
                    token_scores(logits, targets, loss.label_smoothing),
                    kl if is_forward else divergence(*pair, settings.divergence, settings.beta),
                    jax.lax.stop_gradient(kl),
                    teacher_nll,
                )

        both = (hidden.values, taught)
        scores = in_chunks(scored, both, sharded.targets, tokens=loss.chunk)
        scores = context.zigzag_unshard(scores, parts)
        labels, metrics = weighted(scores.student, batch.weights, loss)
        metrics["teacher_kl_nats"] = Mean.of(scores.kl, batch.weights)
        compared = Mean.of(scores.divergence, batch.weights)
        if settings.divergence != "forward":
            metrics["divergence_nats"] = compared
        metrics["teacher_nats"] = Mean.of(scores.teacher_nll, batch.weights)
        teacher_part = settings.temperature**2 * compared.total
        total = (1 - settings.weight) * labels + settings.weight * teacher_part
        return Loss(
            Mean(total, metrics["loss_nats"].weight),
            metrics | hidden.losses,
            auxiliary_loss(hidden.losses, batch),
        )


def top_of(logits: Array, targets: Array, top: int, temperature: float) -> TeacherTop:
    """Return the likeliest ids of a teacher, float32.

    Args:
      logits: [B, T, V].
      targets: [B, T], ids whose loss is kept too.
      top: number of ids.
      temperature: divisor of the logits.
    """
    scaled = logits.astype(jnp.float32) / temperature
    _, ids = jax.lax.top_k(scaled, top)
    parts = top_parts(scaled, ids)
    return TeacherTop(ids, parts[..., :-1], parts[..., -1], token_scores(logits, targets).nll)


def parts_of(teacher: TeacherTop, logits: Array, temperature: float) -> tuple[Array, Array]:
    """Return log-probabilities of teacher and student, of each stored id and all others.

    They are [B, T, K + 1]. Those of the teacher were rounded, and do not sum to 1.
    """
    student = top_parts(logits.astype(jnp.float32) / temperature, teacher.ids)
    stored = jnp.concatenate((teacher.log_p, teacher.tail[..., None]), -1)
    return stored.astype(jnp.float32), student


def divergence(
    teacher: Array,
    student: Array,
    temperature: float,
    kind: config.Divergence = "forward",
    beta: float = 0.5,
) -> Array:
    """Return a divergence of P = softmax(teacher / T) and Q = softmax(student / T), float32 nats.

    forward is KL(P || Q), reverse KL(Q || P), and jsd b KL(P || M) + (1 - b) KL(Q || M) with
    M = b P + (1 - b) Q.

    Args:
      teacher, student: logits, over the last axis.
      temperature: T.
      kind: forward, reverse or jsd.
      beta: b of jsd.
    """
    log_p = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature)
    log_q = jax.nn.log_softmax(student.astype(jnp.float32) / temperature)
    if kind == "forward":
        return _kl(log_p, log_q)
    if kind == "reverse":
        return _kl(log_q, log_p)
    log_m = jnp.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: Array, log_q: Array) -> Array:
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
