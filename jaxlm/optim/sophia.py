"""Sophia: momentum over a diagonal of the curvature, each step clipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.config import Sophia


class Estimate(NamedTuple):
    """Whether the diagonal was estimated at this step, and what came out; without a meaning where not."""

    is_due: Array
    diagonal: Any


class Moments(NamedTuple):
    """Each leaf's running means: of gradients, and of the estimated diagonal."""

    first: Any
    second: Any


def scale_by_sophia(config: Sophia) -> optax.GradientTransformationExtraArgs:
    """From the gradient g, and at times an estimate e of the curvature's diagonal, to the direction u.

        m <- b1 m + (1 - b1) g,  h <- b2 h + (1 - b2) e  where there is an e
        u = clip(m / max(gamma h, eps), -1, 1)

    e is what `update` is given as `curvature`; `train.step` says how it is found. 8 bytes of state for a number, in float32;
    an estimate takes about a step's time, and the gradient's memory.

    Source: Liu et al. 2023, arXiv:2305.14342, algorithm 3. Optax's takes the diagonal of the step before, and divides m by
    1 - b1^t, which the paper does not.
    """

    def init(params: Any) -> Moments:
        return Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: Any, state: Moments, params: Any = None, *, curvature: Estimate, **others: Any
    ) -> tuple[Any, Moments]:
        del params, others

        def next_second(h: Array, e: Array) -> Array:
            return jnp.where(curvature.is_due, config.b2 * h + (1 - config.b2) * e, h)

        def direction(m: Array, h: Array) -> Array:
            return jnp.clip(m / jnp.maximum(config.gamma * h, config.eps), -1, 1)

        first = jax.tree.map(lambda g, m: config.b1 * m + (1 - config.b1) * g, grads, state.first)
        second = jax.tree.map(next_second, state.second, curvature.diagonal)
        return jax.tree.map(direction, first, second), Moments(first, second)

    return optax.GradientTransformationExtraArgs(init, update)
