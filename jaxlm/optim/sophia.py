"""Sophia: momentum divided by the diagonal of the curvature, clipped element by element."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.config import Sophia


class CurvatureEstimate(NamedTuple):
    """Estimate of the curvature's diagonal at this step; meaningless unless `is_due`."""

    is_due: Array
    diagonal: Any


class SophiaState(NamedTuple):
    """Running means of each leaf's gradient, and of the estimated diagonal."""

    first: Any
    second: Any


def scale_by_sophia(config: Sophia) -> optax.GradientTransformationExtraArgs:
    """Return the direction u of the gradient g and an estimate e of the curvature's diagonal.

        m <- b1 m + (1 - b1) g
        h <- b2 h + (1 - b2) e    if this step has an estimate
        u = clip(m / max(gamma h, eps), -1, 1)

    `update` takes e as its argument `curvature`; `training.curvature` computes it, in about the
    time of a step and the memory of the gradient. State: 8 bytes for each number, in float32.

    Source: Liu et al. 2023, arXiv:2305.14342, algorithm 3. Optax uses the diagonal of the previous
    step, and divides m by 1 - b1^t; the paper does not.
    """

    def init(params: Any) -> SophiaState:
        return SophiaState(*(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def update(
        grads: Any,
        state: SophiaState,
        params: Any = None,
        *,
        curvature: CurvatureEstimate,
        **extra_args: Any,
    ) -> tuple[Any, SophiaState]:
        del params, extra_args

        def next_second(h: Array, e: Array) -> Array:
            return jnp.where(curvature.is_due, config.b2 * h + (1 - config.b2) * e, h)

        def direction(m: Array, h: Array) -> Array:
            return jnp.clip(m / jnp.maximum(config.gamma * h, config.eps), -1, 1)

        first = jax.tree.map(lambda g, m: config.b1 * m + (1 - config.b1) * g, grads, state.first)
        second = jax.tree.map(next_second, state.second, curvature.diagonal)
        return jax.tree.map(direction, first, second), SophiaState(first, second)

    return optax.GradientTransformationExtraArgs(init, update)
