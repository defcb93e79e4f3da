"""AdamW whose parameters are the average of its iterates, instead of a learning rate that falls."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.optim.config import ScheduleFree
from jaxlm.optim.groups import Group
from jaxlm.optim.schedules import LearningRate


class Iterates(NamedTuple):
    """The updates so far, the sum of their squared rates; each leaf's last iterate, and its second moment."""

    updates: Array
    weight: Array
    last: Any
    second: Any


def descend(
    config: ScheduleFree, schedule: LearningRate, plan: Mapping[str, Group]
) -> optax.GradientTransformation:
    """What is added to the parameters x, the average of the iterates z; the gradient g is taken between the two.

        y = x + (1 - b1) (z - x)                              where g is taken: `ahead`
        v <- b2 v + (1 - b2) g^2,  r = lr(t) sqrt(1 - b2^t)
        z <- z - r s (g / (sqrt(v) + eps) + d weight_decay y)
        x <- x + c (z - x),  with c = r^2 / (sum of r^2 so far)

    with the leaf's learning-rate scale s and its decay's scale d, 0 where its group does not decay. What is evaluated, sampled, saved and
    exported is x, so nothing but the step knows y. 8 bytes of state for a number, in float32; a step makes one more copy
    of the parameters, y.

    Source: Defazio et al. 2024, arXiv:2405.15682, algorithm 1. Its implementations keep y as the parameters and compute x
    where a model is evaluated.
    """

    def init(params: Any) -> Iterates:
        return Iterates(
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.float32),
            jax.tree.map(jnp.copy, params),
            jax.tree.map(jnp.zeros_like, params),
        )

    def update(
        grads: Any,
        state: Iterates,
        params: Any = None,
        *,
        rate: Array | float = 1.0,
        applied: Array | None = None,
        **others: Any,
    ) -> tuple[Any, Iterates]:
        del others
        count = state.updates + 1
        t = count.astype(jnp.float32)
        lr = schedule(state.updates if applied is None else applied) * rate
        size = lr * jnp.sqrt(1 - config.b2**t)
        weight = state.weight + jnp.square(size)
        share = jnp.square(size) / jnp.maximum(weight, 1e-30)

        def next_second(grad: Array, v: Array) -> Array:
            return config.b2 * v + (1 - config.b2) * jnp.square(grad)

        def next_last(path: str, grad: Array, v: Array, x: Array, z: Array) -> Array:
            group = plan[path]
            direction = grad / (jnp.sqrt(v) + config.eps)
            if group.decays and config.weight_decay:
                decay = config.weight_decay * group.decay_scale
                direction = direction + decay * _between(config, x, z)
            return z - size * group.rate(x.ndim) * direction

        second = jax.tree.map(next_second, grads, state.second)
        last = tree.map_with_path(next_last, grads, second, params, state.last)
        updates = jax.tree.map(lambda x, z: (share * (z - x)).astype(x.dtype), params, last)
        return updates, Iterates(count, weight, last, second)

    return optax.GradientTransformationExtraArgs(init, update)


def ahead(config: ScheduleFree, params: Any, state: Iterates, axes: Any) -> Any:
    """Where the gradient is taken. A router's bias has no iterate of its own: there it is taken where it is."""
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def point(path: str, x: Array, z: Array) -> Array:
        return x if "balance" in names[path] else _between(config, x, z).astype(x.dtype)

    return tree.map_with_path(point, params, state.last)


def _between(config: ScheduleFree, x: Array, z: Array) -> Array:
    return x + (1 - config.b1) * (z - x)
