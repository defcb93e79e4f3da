"""One update: loss, gradient, optimizer, new state."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import faults, random, tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.optim import rounding
from jaxlm.training import curvature as curvatures
from jaxlm.training import gradient as gradients
from jaxlm.training import guard as guards
from jaxlm.training.config import GuardConfig
from jaxlm.training.curvature import Curvature
from jaxlm.training.gradient import LossOfParams
from jaxlm.training.state import TrainState

Metrics = dict[str, Any]
# Of the state, the batch and, if it is not 1, the rate.
Step = Callable[..., tuple[TrainState, Metrics]]


def build_step(
    loss: LossOfParams,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Array], Array],
    *,
    key: Array,
    precision: Precision,
    guard: GuardConfig,
    axes: Any = None,
    shardings: Any = None,
    microbatches: int = 1,
    is_measured: Callable[[Array], Array] | None = None,
    gradient_point: Callable[[Any, Any], Any] | None = None,
    average: Callable[[Any, Any, Array], Any] | None = None,
    curvature: Curvature | None = None,
    frozen: frozenset[str] = frozenset(),
    capture: Collection[Kind] = (),
    post_update: Callable[[Any, Intermediates], tuple[Any, dict[str, Array]]] | None = None,
) -> Step:
    """The function (state, batch, rate) -> (state, metrics), to be jitted once with its state donated.

    The learning rate is the schedule's times `rate`, by default 1.

    `loss`, `axes`, `shardings`, `microbatches` and `frozen` are those of `gradient.build`. `key` is the root of the step's random
    numbers. The gradient is taken at the parameters, or where `ahead(params, opt_state)` says.
    Updates are added in float32, and rounded stochastically where parameters or the optimizer's
    state have fewer bits: by `key`, the step, a leaf's path and a number's position alone.
    `average(average, params, updates)` is the average of the parameters after so many applied updates. With a `curvature`
    the optimizer is given estimates of it. `after(params, notes)` has the last word on updated parameters, knowing what
    layers noted of `kinds`, and gives metrics of its own.

    The guard decides whether the update is applied; where not, parameters, optimizer and average stay as they are, bit
    for bit, and only the step's number and the guard's counters move. The learning rate follows the applied updates.

    Metrics are scalars on the device: those of the objective, `learning_rate`, `grad_norm` (before clipping),
    `param_norm`, `update_ratio` (norm of the update over norm of the parameters), `tokens` (weight of the batch, 0 where
    it was skipped), `verdict` (bits of the guard), `skipped_total` and `skipped_in_a_row`; in float16 `loss_scale`, as
    this step leaves it, and `overflows_total`, the steps not applied because of it; and `layers`, the gradient's norm by
    parameter, and by layer where `axes` says that the first axis is one of layers: all 0 in a good step.
    `is_measured(completed)` says in which steps the norms of parameters and update are taken, each a pass over all
    parameters; in others they are NaN. None takes them in all.
    """
    is_scaled = precision.is_scaled
    parts: dict[str, Any] = dict(
        precision=precision,
        axes=axes,
        shardings=shardings,
        microbatches=microbatches,
        frozen=frozen,
    )
    gradient = gradients.build_gradient(loss, **parts, capture=capture)
    estimate = curvatures.build(curvature, **parts)
    extended = optax.with_extra_args_support(optimizer)

    def step(
        state: TrainState, batch: Tokens, rate: Array | float = 1.0
    ) -> tuple[TrainState, Metrics]:
        scale = state.guard.scale
        at = (
            state.params
            if gradient_point is None
            else gradient_point(state.params, state.opt_state)
        )
        own_key = jax.random.fold_in(key, state.step)
        grads, part, notes = gradient(at, batch, own_key, scale.factor)
        grads = inject_faults("grads", grads, state.step)
        means = {name: mean.figure for name, mean in part.metrics.items()}
        means["loss_nats"] = inject_faults("loss", part.metrics["loss_nats"].value, state.step)
        grad_norm = tree.norm(grads)
        applied = state.applied
        given = estimate(state.params, grads, batch, own_key, scale.factor, applied)
        if "curvature" in given:
            # The guard judges it with the gradient: it would stay in the optimizer's mean for good.
            is_known = _is_finite(given["curvature"].diagonal)
            grad_norm = jnp.where(is_known, grad_norm, jnp.nan)
        is_good, verdict, guarded = guards.judge(
            state.guard, means["loss_nats"], grad_norm, guard, is_scaled=is_scaled
        )

        def update(with_norms: bool) -> tuple[Any, dict[str, Array]]:
            updates, opt_state = extended.update(
                grads, state.opt_state, state.params, rate=rate, **given
            )
            params = rounding.add(state.params, updates)
            figures: dict[str, Array] = {}
            if post_update is not None:
                params, figures = post_update(params, notes)
            # Both may be kept in fewer bits than an update is computed in.
            params, opt_state = (
                rounding.rounded(values, old, random.stream(own_key, name))
                for name, values, old in (
                    ("rounding/params", params, state.params),
                    ("rounding/opt_state", opt_state, state.opt_state),
                )
            )
            averaged = None if average is None else average(state.average, params, applied + 1)
            moved = guards.select(
                is_good,
                (params, opt_state, averaged),
                (state.params, state.opt_state, state.average),
            )
            param_norm = update_ratio = jnp.full((), jnp.nan, jnp.float32)
            if with_norms:
                param_norm = tree.norm(moved[0])
                update_ratio = tree.norm(updates) / jnp.maximum(param_norm, 1e-30)
            return moved, figures | {"param_norm": param_norm, "update_ratio": update_ratio}

        if is_measured is None:
            moved, figures = update(True)
        else:
            # Of the whole update: were only the norms taken or not, it would be written out in every step to be measured in few.
            moved, figures = jax.lax.cond(
                is_measured(state.step + 1), lambda: update(True), lambda: update(False)
            )
        params, opt_state, averaged = moved
        metrics = means | figures
        metrics |= {
            "tokens": jnp.where(is_good, part.objective.weight, 0.0),
            "learning_rate": jnp.asarray(schedule(applied) * rate, jnp.float32),
            "grad_norm": grad_norm,
            "verdict": verdict,
            "skipped_total": guarded.skipped,
            "skipped_in_a_row": guarded.in_a_row,
            "layers": _layer_norms(~is_good, grads, axes),
        }
        if is_scaled:
            metrics |= {
                "loss_scale": guarded.scale.factor,
                "overflows_total": guarded.scale.overflows,
            }
        return TrainState(state.step + 1, params, opt_state, guarded, averaged), metrics

    return step


def _is_finite(values: Any) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(values)]).all()


def _layer_norms(is_wanted: Array, grads: Any, axes: Any) -> Any:
    """The norm of each gradient by layer; zeros, at no cost, where they are not wanted."""

    def norms() -> dict[str, Array]:
        return gradients.norms_by_layer(grads, axes)

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(norms))
    return jax.lax.cond(is_wanted, norms, lambda: zeros)


def inject_faults(point: str, values: Any, step: Array) -> Any:
    """Values with the faults that a test asked for at this point, in one element of the first leaf; untouched without any."""
    for fault in faults.planned(point):
        high = jnp.iinfo(jnp.int32).max if fault.high is None else fault.high
        is_now = (step + 1 >= fault.low) & (step + 1 <= high)
        wrong = {"nan": jnp.nan, "inf": jnp.inf, "neginf": -jnp.inf, "spike": fault.value}
        leaves, structure = jax.tree.flatten(values)
        first = leaves[0].ravel()
        first = first.at[0].set(
            jnp.where(is_now, wrong[fault.action], first[0]).astype(first.dtype)
        )
        values = jax.tree.unflatten(structure, [first.reshape(leaves[0].shape), *leaves[1:]])
    return values
