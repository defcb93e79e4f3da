"""One update: loss, gradient, optimizer, new state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.objectives.loss import Loss
from jaxlm.parallel import rules
from jaxlm.train.state import TrainState

LossOfParams = Callable[[Any, Tokens, Array], Loss]
Metrics = dict[str, Array]
Step = Callable[[TrainState, Tokens], tuple[TrainState, Metrics]]


def build(
    loss: LossOfParams,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Array], Array],
    *,
    key: Array,
    precision: Precision,
    microbatches: int = 1,
    is_measured: Callable[[Array], Array] | None = None,
) -> Step:
    """The function (state, batch) -> (state, metrics), to be jitted once with its state donated.

    `loss(params, batch, key)` is a sum and a weight. Sums and their gradients are added over the micro-batches and
    divided once by the weight of the whole batch, so k micro-batches give the gradient of one batch however
    unevenly their tokens weigh. `key` is the root of the step's random numbers.

    Metrics are float32 scalars on the device: those of the objective, `learning_rate`, `grad_norm` (before clipping),
    `param_norm`, `update_ratio` (norm of the update over norm of the parameters), and `tokens` (weight of the batch).
    `is_measured(completed)` says in which steps the norms of parameters and update are taken, each a pass over all
    parameters; in others they are NaN. None takes them in all.
    """

    def gradient(params: Any, batch: Tokens, key: Array) -> tuple[Any, Loss]:
        def total(params: Any) -> tuple[Array, Loss]:
            part = loss(params, batch, key)
            return part.objective.total, part

        (_, part), grads = jax.value_and_grad(total, has_aux=True)(params)
        return precision.reduced(grads), part

    def summed(params: Any, batch: Tokens, key: Array) -> tuple[Any, Loss]:
        if microbatches == 1:
            return gradient(params, batch, key)
        parts = jax.tree.map(lambda x: _deal(x, microbatches), batch)
        keys = jax.random.split(key, microbatches)

        def add(carry: Any, part: tuple[Tokens, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(params, *part)), None

        shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts), key)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, zeros, (parts, keys))[0]

    def step(state: TrainState, batch: Tokens) -> tuple[TrainState, Metrics]:
        grads, part = summed(state.params, batch, jax.random.fold_in(key, state.step))
        inverse = 1.0 / jnp.maximum(part.objective.weight, 1.0)
        grads = jax.tree.map(lambda g: g * inverse.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def norms() -> tuple[Array, Array]:
            param_norm = optax.tree.norm(params)
            return param_norm, optax.tree.norm(updates) / jnp.maximum(param_norm, 1e-30)

        if is_measured is None:
            param_norm, update_ratio = norms()
        else:
            unknown = jnp.full((), jnp.nan, jnp.float32)
            param_norm, update_ratio = jax.lax.cond(
                is_measured(state.step + 1), norms, lambda: (unknown, unknown)
            )
        metrics = {name: mean.value for name, mean in part.metrics.items()} | {
            "tokens": part.objective.weight,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "grad_norm": optax.tree.norm(grads),
            "param_norm": param_norm,
            "update_ratio": update_ratio,
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def _deal(x: Array, parts: int) -> Array:
    """[B, ...] as [parts, B / parts, ...], part i being rows i, i + parts, ...: each row stays on its device."""
    dealt = jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
    return rules.constrain(dealt, None, "batch", *("length",) * (x.ndim - 1))
