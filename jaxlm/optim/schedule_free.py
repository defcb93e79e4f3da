"""Schedule-free AdamW: the parameters are an average of iterates; the learning rate is constant."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.optim.config import ScheduleFree
from jaxlm.optim.groups import ParamGroup
from jaxlm.optim.schedules import LearningRate


class ScheduleFreeState(NamedTuple):
    """Number of updates, sum of squared rates, and each leaf's last iterate and second moment."""

    updates: Array
    weight: Array
    last: Any
    second: Any


def descend(
    config: ScheduleFree, schedule: LearningRate, plan: Mapping[str, ParamGroup]
) -> optax.GradientTransformation:
    """Return the update of the parameters x, which are the average of the iterates z.

        y = x + (1 - b1) (z - x)
        v <- b2 v + (1 - b2) g^2,  r = lr(t) sqrt(1 - b2^t)
        z <- z - r s (g / (sqrt(v) + eps) + d weight_decay y)
        x <- x + c (z - x),  with c = r^2 / (sum of r^2 so far)

    with g the gradient at y (`gradient_point`), s the leaf's learning-rate scale and d the scale of
    its decay, 0 if its group does not decay. Evaluation, generation, checkpoints and exports use x;
    only the training step computes y, as one more copy of the parameters. State: 8 bytes for each
    number, in float32. `plan` is the group of each leaf by its path, from `groups.assign`.

    Source: Defazio et al. 2024, arXiv:2405.15682, algorithm 1. Its authors' code stores y as the
    parameters and computes x when a model is evaluated.
    """

    def init(params: Any) -> ScheduleFreeState:
        last, second = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, params)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), last, second)

    def update(
        grads: Any,
        state: ScheduleFreeState,
        params: Any = None,
        *,
        rate: Array | float = 1.0,
        applied: Array | None = None,
        **extra_args: Any,
    ) -> tuple[Any, ScheduleFreeState]:
        del extra_args
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
            return z - size * group.lr_scale_for(x.ndim) * direction

        second = jax.tree.map(next_second, grads, state.second)
        last = tree.map_with_path(next_last, grads, second, params, state.last)
        updates = jax.tree.map(lambda x, z: (share * (z - x)).astype(x.dtype), params, last)
        return updates, ScheduleFreeState(count, weight, last, second)

    return optax.GradientTransformationExtraArgs(init, update)


def gradient_point(config: ScheduleFree, params: Any, state: ScheduleFreeState, axes: Any) -> Any:
    """Return y, at which the gradient is taken; routers' biases have no iterate and stay at x."""
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def point(path: str, x: Array, z: Array) -> Array:
        return x if "balance" in names[path] else _between(config, x, z).astype(x.dtype)

    return tree.map_with_path(point, params, state.last)


def _between(config: ScheduleFree, x: Array, z: Array) -> Array:
    return x + (1 - config.b1) * (z - x)
