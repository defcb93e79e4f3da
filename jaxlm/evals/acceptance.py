"""Acceptance of a draft: how often the guesses of a smaller model stand on a validation set."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.generate.config import GUESSES
from jaxlm.models.build import Model
from jaxlm.objectives.loss import logits_function, read_sharded
from jaxlm.ops.cross_entropy import in_chunks
from jaxlm.parallel import context

Merge = Callable[[Any], Model]


class Agreement(NamedTuple):
    """Agreement of two distributions on each token of a text, [B, T]."""

    greedy: Array  # 1 if both have the same likeliest id
    sampled: Array  # sum over ids of the smaller probability: no sampling of both agrees more often


def build(
    draft: Merge, target: Merge, *, chunk: int | None = None
) -> Callable[[Any, Any, Tokens], dict[str, Mean]]:
    """Return the function (draft's parameters, target's, batch) -> means, to be jitted.

    `draft_greedy` and `draft_sampled` are the shares of guesses that stand at temperature 0, and at
    most at temperature 1. `draft_greedy_tokens` and `draft_sampled_tokens` are the tokens of a pass
    that verifies GUESSES guesses, on the text of the set: 1 + a1 + a1 a2 + ..., with the acceptance
    of each of the next tokens. Tokens whose GUESSES end outside their document are left out there.

    Args:
      draft, target: functions of the parameters that build the models.
      chunk: tokens whose logits are in memory at a time; None for all.
    """

    def step(small: Any, large: Any, batch: Tokens) -> dict[str, Mean]:
        models = draft(small), target(large)
        read = [read_sharded(model, batch, None) for model in models]
        sharded, _, parts = read[0]
        logits = [logits_function(model) for model in models]

        def compared(hidden: tuple[Array, Array], targets: Array) -> Agreement:
            del targets
            ours, theirs = (
                function(values).astype(jnp.float32)
                for function, values in zip(logits, hidden, strict=True)
            )
            is_same = ours.argmax(-1) == theirs.argmax(-1)
            smaller = jnp.minimum(_probabilities(ours), _probabilities(theirs))
            return Agreement(is_same.astype(jnp.float32), smaller.sum(-1))

        hidden = tuple(values.values for _, values, _ in read)
        agreement = in_chunks(compared, hidden, sharded.targets, tokens=chunk)
        agreement = context.zigzag_unshard(agreement, parts)
        counted = (batch.weights > 0).astype(jnp.float32)
        means = {}
        for name, stands in agreement._asdict().items():
            tokens, is_whole = _pass_tokens(stands, counted, batch.segments)
            means[f"draft_{name}"] = Mean.of(stands, counted)
            means[f"draft_{name}_tokens"] = Mean.of(tokens, is_whole)
        return means

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
