"""The negative log-likelihood of target tokens."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.parallel import context
from jaxlm.parallel.rules import constrain

Scores = TypeVar("Scores")


class TokenScores(NamedTuple):
    """What one pass over the logits says of each token. Only the first two carry gradients."""

    nll: Float[Array, "*N"]  # -log p(target), nats
    log_normalizer: Float[Array, "*N"]  # log sum exp of the logits
    confidence: Float[Array, "*N"]  # probability of the likeliest id
    correct: Float[Array, "*N"]  # 1 where no id is likelier than the target


@jax.custom_vjp
def token_scores(logits: Float[Array, "*N V"], targets: Int[Array, "*N"]) -> TokenScores:
    """nll = log sum_v exp(l_v) - l_target, in float32 around the largest logit.

    The gradient is softmax - onehot by comparison with an iota, so nothing is scattered, and it reuses the forward
    pass's exponentials. A vocabulary split over a mesh axis costs sums over the tokens only.
    Correctness is read off the maximum, so there is no argmax.
    """
    return _forward(logits, targets)[0]


def _forward(logits: Array, targets: Array) -> tuple[TokenScores, tuple[Array, Array, Array]]:
    wide = logits.astype(jnp.float32)
    peak = wide.max(-1, keepdims=True)
    exponentials = jnp.exp(wide - peak)
    total = exponentials.sum(-1)
    picked = (jnp.take_along_axis(wide, targets[..., None], -1) - peak)[..., 0]
    log_sum = jnp.log(total)
    scores = TokenScores(
        log_sum - picked, peak[..., 0] + log_sum, 1 / total, (picked >= 0).astype(jnp.float32)
    )
    return scores, (exponentials.astype(logits.dtype), total, targets)


def _backward(kept: tuple[Array, Array, Array], grad: TokenScores) -> tuple[Array, None]:
    exponentials, total, targets = kept
    out = exponentials * ((grad.nll + grad.log_normalizer) / total)[..., None]
    out = out - jnp.where(_is_target(exponentials, targets), grad.nll[..., None], 0.0)
    return out.astype(exponentials.dtype), None


token_scores.defvjp(_forward, _backward)


def _is_target(logits: Array, targets: Array) -> Array:
    return (
        jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    )


def in_chunks(
    function: Callable[[Array, Array], Scores],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    tokens: int | None,
) -> Scores:
    """`function(hidden, targets)`, a tree of [B, T], over about `tokens` tokens at a time; None takes all at once.

    The logits of one chunk are live at a time: the backward pass makes them again, at the cost of one more unembedding.
    Rows stay whole and time is cut, so each row stays on its device; where rows are split over devices, a chunk takes
    the same number of tokens from each.
    """
    rows, length = targets.shape
    chunks = 1 if tokens is None else min(length, math.ceil(rows * length / tokens))
    if chunks == 1:
        return function(hidden, targets)
    parts = context.ways()
    own = length // parts
    size = math.ceil(own / chunks)
    chunks = math.ceil(own / size)

    def cut(x: Array) -> Array:
        rest = x.shape[2:]
        x = x.reshape(rows, parts, own, *rest)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * size - own), *[(0, 0) for _ in rest]])
        x = jnp.moveaxis(x.reshape(rows, parts, chunks, size, *rest), 2, 0)
        return constrain(
            x.reshape(chunks, rows, parts * size, *rest),
            None,
            "batch",
            "length",
            *[None for _ in rest],
        )

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(chunks, rows, parts, size), 0, 2)
        return x.reshape(rows, parts, -1)[:, :, :own].reshape(rows, length)

    again = jax.checkpoint(function, prevent_cse=False)
    scores = jax.lax.map(lambda part: again(*part), (cut(hidden), cut(targets)))
    return jax.tree.map(joined, scores)
