"""Acceptance of a draft: how often the guesses of a smaller model stand on a validation set."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.evals.loss import Sums
from jaxlm.generate.config import GUESSES
from jaxlm.models.build import Model
from jaxlm.objectives.loss import logits_function, read_sharded
from jaxlm.ops.cross_entropy import TokenScores, in_chunks, token_scores
from jaxlm.parallel import context, pipeline

Merge = Callable[[Any], Model]


class Agreement(NamedTuple):
    """Agreement of two distributions on each token of a text, [B, T]."""

    greedy: Array  # 1 if both have the same likeliest id
    sampled: Array  # sum over ids of the smaller probability: no sampling of both agrees more often


def build(
    draft: Merge,
    target: Merge,
    summed: Callable[[TokenScores, Tokens], Sums],
    *,
    chunk: int | None = None,
    microbatches: int = 1,
) -> Callable[[Any, Any, Tokens], tuple[Sums, dict[str, Mean]]]:
    """Return the function (draft's parameters, target's, batch) -> (sums, means), to be jitted.

    The sums are those of an evaluation of the draft, from the same pass.

    `draft_greedy` and `draft_sampled` are the shares of guesses that stand at temperature 0, and at
    most at temperature 1. `draft_greedy_tokens` and `draft_sampled_tokens` are the tokens of a pass
    that verifies GUESSES guesses, on the text of the set: 1 + a1 + a1 a2 + ..., with the acceptance
    of each of the next tokens. Tokens whose GUESSES end outside their document are left out there.

    Args:
      draft, target: functions of the parameters that build the models.
      summed: function of the draft's scores of all targets, see `loss.sums_function`.
      chunk: tokens whose logits are in memory at a time; None for all.
      microbatches: parts of the batch, computed one after the other.
    """

    def step(small: Any, large: Any, batch: Tokens) -> tuple[Sums, dict[str, Mean]]:
        def read(part: Tokens) -> tuple[TokenScores, Agreement]:
            models = draft(small), target(large)
            outputs = [read_sharded(model, part, None) for model in models]
            sharded, _, parts = outputs[0]
            logits = [logits_function(model) for model in models]

            def compared(
                hidden: tuple[Array, Array], targets: Array
            ) -> tuple[TokenScores, Agreement]:
                ours, theirs = (
                    function(values).astype(jnp.float32)
                    for function, values in zip(logits, hidden, strict=True)
                )
                is_same = ours.argmax(-1) == theirs.argmax(-1)
                smaller = jnp.minimum(_probabilities(ours), _probabilities(theirs))
                agreement = Agreement(is_same.astype(jnp.float32), smaller.sum(-1))
                return token_scores(ours, targets), agreement

            hidden = tuple(values.values for _, values, _ in outputs)
            both = in_chunks(compared, hidden, sharded.targets, tokens=chunk)
            return context.zigzag_unshard(both, parts)

        scores, agreement = pipeline.map_microbatches(read, batch, microbatches)
        counted = (batch.weights > 0).astype(jnp.float32)
        means = {}
        for name, stands in agreement._asdict().items():
            tokens, is_whole = _pass_tokens(stands, counted, batch.segments)
            means[f"draft_{name}"] = Mean.of(stands, counted)
            means[f"draft_{name}_tokens"] = Mean.of(tokens, is_whole)
        return summed(scores, batch), means

    return step


def _probabilities(logits: Array) -> Array:
    exponentials = jnp.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _pass_tokens(
    stands: Float[Array, "B T"], counted: Float[Array, "B T"], segments: Array
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return the expected tokens of a pass at each token, and 1 where its guesses are in a text."""
    tokens, product, is_whole = jnp.ones_like(stands), jnp.ones_like(stands), counted
    for later in range(GUESSES):
        product = product * _ahead(stands, later)
        tokens = tokens + product
        is_same = _ahead(segments, later) == segments
        is_whole = is_whole * _ahead(counted, later) * is_same
    return tokens, is_whole


def _ahead(rows: Array, count: int) -> Array:
    """Return each row `count` slots later, with 0 at its end."""
    return jnp.pad(rows[:, count:], [(0, 0), (0, count)])
