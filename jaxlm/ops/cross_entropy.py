"""The negative log-likelihood of target tokens."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.parallel import context
from jaxlm.parallel.rules import constrain

Scores = TypeVar("Scores")


class TokenScores(NamedTuple):
    """What one pass over the logits says of each token. Confidence and correctness carry no gradients."""

    nll: Float[Array, "*N"]  # -log p(target), nats
    log_normalizer: Float[Array, "*N"]  # log sum exp of the logits
    confidence: Float[Array, "*N"]  # probability of the likeliest id
    correct: Float[Array, "*N"]  # 1 where no id is likelier than the target
    smoothed: Float[Array, "*N"] | None  # the nll of smoothed labels; None where they are not


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_scores(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"], smoothing: float = 0.0
) -> TokenScores:
    """nll = log sum_v exp(l_v) - l_target, in float32 around the largest logit.

    With e = `smoothing` above 0, smoothed = (1 - e) nll + e mean_v(-log p_v), over all V ids.

    The gradient is softmax - onehot by comparison with an iota, so nothing is scattered, and it reuses the forward
    pass's exponentials. A vocabulary split over a mesh axis costs sums over the tokens only.
    Correctness is read off the maximum, so there is no argmax.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7 (label smoothing).
    """
    return _forward(logits, targets, smoothing)[0]


def _forward(
    logits: Array, targets: Array, smoothing: float
) -> tuple[TokenScores, tuple[Array, Array, Array]]:
    wide = logits.astype(jnp.float32)
    peak = wide.max(-1, keepdims=True)
    exponentials = jnp.exp(wide - peak)
    total = exponentials.sum(-1)
    picked = (jnp.take_along_axis(wide, targets[..., None], -1) - peak)[..., 0]
    log_sum = jnp.log(total)
    smoothed = None
    if smoothing:
        smoothed = log_sum - (1 - smoothing) * picked - smoothing * (wide - peak).mean(-1)
    scores = TokenScores(
        nll=log_sum - picked,
        log_normalizer=peak[..., 0] + log_sum,
        confidence=1 / total,
        correct=(picked >= 0).astype(jnp.float32),
        smoothed=smoothed,
    )
    return scores, (exponentials.astype(logits.dtype), total, targets)


def _backward(
    smoothing: float, kept: tuple[Array, Array, Array], grad: TokenScores
) -> tuple[Array, None]:
    exponentials, total, targets = kept
    softmax, onehot, every = grad.nll + grad.log_normalizer, grad.nll, None
    if grad.smoothed is not None:
        softmax = softmax + grad.smoothed
        onehot = onehot + (1 - smoothing) * grad.smoothed
        every = smoothing / exponentials.shape[-1] * grad.smoothed
    out = exponentials * (softmax / total)[..., None]
    out = out - jnp.where(_is_target(exponentials, targets), onehot[..., None], 0.0)
    if every is not None:
        out = out - every[..., None]
    return out.astype(exponentials.dtype), None


token_scores.defvjp(_forward, _backward)


def _is_target(logits: Array, targets: Array) -> Array:
    return (
        jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    )


def in_chunks(
    function: Callable[[Any, Array], Scores],
    hidden: Any,
    targets: Int[Array, "B T"],
    *,
    tokens: int | None,
) -> Scores:
    """`function(hidden, targets)`, a tree of [B, T] of a tree of hidden states [B, T, D], over about `tokens` tokens at a time; None takes all at once.

    The logits of one chunk are live at a time: the backward pass makes them again, at the cost of one more unembedding. So
    memory is flat in B T, and grows with `tokens` V: the vocabulary is not cut, a larger one takes fewer tokens at a time.
    Rows stay whole and time is cut, so each row stays on its device; where rows are split over devices, a chunk takes
    the same number of tokens from each.
    """
    rows, length = targets.shape
    chunks = 1 if tokens is None else min(length, math.ceil(rows * length / tokens))
    if chunks == 1:
        return function(hidden, targets)
    parts = context.context_size()
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
    scores = jax.lax.map(lambda part: again(*part), jax.tree.map(cut, (hidden, targets)))
    return jax.tree.map(joined, scores)
