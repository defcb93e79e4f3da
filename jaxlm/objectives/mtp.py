"""The tokens beyond the next one: which they are, and how well each is predicted."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.data.batch import Tokens


class ShiftedTargets(NamedTuple):
    """Of each slot, the token so many ahead and the one after it, which is to be predicted."""

    tokens: Int[Array, "B T"]
    is_there: Bool[Array, "B T"]  # whether the token lies in the slot's document
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]  # 0 where the target lies beyond its document or its row


def shifted_targets(batch: Tokens, count: int) -> list[ShiftedTargets]:
    """For k from 1 to `count`, what lies k slots on. No document sees a token of another."""
    counted = (
        batch.weights if batch.predicts_ahead is None else batch.weights * batch.predicts_ahead
    )
    found = []
    for k in range(1, count + 1):
        tokens, targets, weights, segments = (
            jnp.pad(each[:, k:], [(0, 0), (0, k)])
            for each in (batch.tokens, batch.targets, counted, batch.segments)
        )
        is_there = (segments == batch.segments) & (batch.segments > 0)
        found.append(ShiftedTargets(tokens, is_there, targets, jnp.where(is_there, weights, 0.0)))
    return found


def predicted(batch: Tokens, count: int) -> list[Tokens]:
    """For each further token, the batch with weights where its head predicts: of each target in the slot that it lies in."""
    return [
        batch._replace(weights=jnp.pad(each.weights[:, :-k], [(0, 0), (k, 0)]))
        for k, each in enumerate(shifted_targets(batch, count), 1)
    ]
