"""Cross-entropy: the negative log-likelihood of target tokens.

Example:
    >>> scores = token_scores(jnp.array([[0.0, math.log(3)]]), jnp.array([1]))
    >>> round(float(scores.nll[0]), 4), float(scores.correct[0])
    (0.2877, 1.0)
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.parallel import context, rules

Scores = TypeVar("Scores")


class TokenScores(NamedTuple):
    """Scores of each token from one pass over the logits; `confidence` has no gradient."""

    nll: Float[Array, "*N"]  # -log p(target), nats
    log_normalizer: Float[Array, "*N"]  # log sum exp of the logits
    confidence: Float[Array, "*N"]  # probability of the likeliest id
    correct: Float[Array, "*N"]  # 1 if no id is likelier than the target; no gradient
    smoothed: Float[Array, "*N"] | None  # nll of smoothed labels; None without smoothing


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_scores(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"], smoothing: float = 0.0
) -> TokenScores:
    """Return nll = log sum_v exp(l_v) - l_target, in float32 around the largest logit.

    With e = `smoothing` above 0, smoothed = (1 - e) nll + e mean_v(-log p_v), over all V ids.

    The gradient, softmax - onehot, compares with an iota, so nothing is scattered, and reuses the
    forward pass's exponentials. A vocabulary split over a mesh axis costs sums over tokens only.
    `correct` compares with the maximum, so there is no argmax.

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
    smoothing: float, residuals: tuple[Array, Array, Array], grad: TokenScores
) -> tuple[Array, None]:
    exponentials, total, targets = residuals
    softmax, onehot = grad.nll + grad.log_normalizer, grad.nll
    if grad.smoothed is not None:
        softmax = softmax + grad.smoothed
        onehot = onehot + (1 - smoothing) * grad.smoothed
    shape, dtype = exponentials.shape, exponentials.dtype
    out = exponentials * (softmax / total)[..., None]
    ids = jax.lax.broadcasted_iota(targets.dtype, shape, len(shape) - 1)
    out = out - jnp.where(ids == targets[..., None], onehot[..., None], 0.0)
    if grad.smoothed is not None:
        out = out - (smoothing / shape[-1] * grad.smoothed)[..., None]
    return out.astype(dtype), None


token_scores.defvjp(_forward, _backward)


def in_chunks(
    function: Callable[[Any, Array], Scores],
    hidden: Any,
    targets: Int[Array, "B T"],
    *,
    tokens: int | None,
) -> Scores:
    """Map `function(hidden, targets)`, a tree of [B, T, ...], over chunks.

    `hidden` is an array [B, T, D] or a tree of such arrays. A chunk has about `tokens` tokens of
    each device.

    None takes all tokens at once. The logits of one chunk are live at a time, and the backward
    pass computes them again at the cost of one more unembedding. So memory does not depend on B T
    and grows with `tokens` V: a larger vocabulary needs smaller chunks. A chunk is a part of the
    length, so each row stays on its device; if context splits rows, a chunk takes the same number
    of tokens from each device.
    """
    rows, length = targets.shape
    parts = context.context_size()
    local = length // parts
    device_rows = rows / rules.split(jax.sharding.get_abstract_mesh(), "batch")
    chunks = 1 if tokens is None else min(local, math.ceil(device_rows * local / tokens))
    if chunks == 1:
        return function(hidden, targets)
    size = math.ceil(local / chunks)
    chunks = math.ceil(local / size)

    def split(x: Array) -> Array:
        rest = x.shape[2:]
        none = (None,) * len(rest)
        x = x.reshape(rows, parts, local, *rest)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * size - local), *[(0, 0) for _ in rest]])
        x = jnp.moveaxis(x.reshape(rows, parts, chunks, size, *rest), 2, 0)
        x = x.reshape(chunks, rows, parts * size, *rest)
        return rules.constrain(x, None, "batch", "length", *none)

    def join(x: Array) -> Array:
        rest = x.shape[3:]
        x = jnp.moveaxis(x.reshape(chunks, rows, parts, size, *rest), 0, 2)
        x = x.reshape(rows, parts, chunks * size, *rest)[:, :, :local]
        return x.reshape(rows, length, *rest)

    recomputed = jax.checkpoint(function, prevent_cse=False)
    scores = jax.lax.map(lambda part: recomputed(*part), jax.tree.map(split, (hidden, targets)))
    return jax.tree.map(join, scores)
