"""One training step: loss, gradient, optimizer, guard, new state."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import faults, random, tree
from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.optim import rounding
from jaxlm.training import gradient as gradients
from jaxlm.training import guard as guards
from jaxlm.training.config import GuardConfig
from jaxlm.training.gradient import Curvature, GradientSpec, build_estimator
from jaxlm.training.state import TrainState

Metrics = dict[str, Any]
Step = Callable[..., tuple[TrainState, Metrics]]  # of the state, the batch, and the rate (1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec(GradientSpec):
    """Everything that determines a training step. The observer of layers reads the same spec."""

    # Transformation from the mean gradient to the update of the parameters.
    optimizer: optax.GradientTransformation
    schedule: Callable[[Array], Array]  # learning rate by the number of applied updates
    key: Array  # root of the step's random numbers
    guard: GuardConfig  # limits beyond which a step is not applied
    is_clipped: bool = False  # the optimizer limits the norm of the whole gradient
    is_sampled: bool = False  # rows are samples of the model: some batches have no gradient
    # The function (params, opt_state) -> parameters at which the gradient is taken; None takes
    # it at the parameters.
    gradient_point: Callable[[Any, Any], Any] | None = None
    # Loss of sampled labels, for optimizers that use an estimate of the curvature.
    curvature: Curvature | None = None
    # The function (average, params, updates) -> average after that many applied updates.
    average: Callable[[Any, Any, Array], Any] | None = None
    capture: Collection[Kind] = ()  # kinds of intermediates that layers record for `post_update`
    # The function (params, intermediates) -> (params, metrics) after each update.
    post_update: Callable[[Any, Intermediates], tuple[Any, dict[str, Array]]] | None = None
    # The function (completed steps) -> whether the norms of parameters and update are
    # computed, each a pass over all parameters; NaN in other steps. None computes them in all.
    is_measured: Callable[[Array], Array] | None = None

    def point(self, state: TrainState) -> Any:
        """Return the parameters at which the gradient of a step from `state` is taken."""
        if self.gradient_point is None:
            return state.params
        return self.gradient_point(state.params, state.opt_state)


def build_step(spec: StepSpec) -> Step:
    """Return the function (state, batch, rate) -> (state, metrics). Jit it with its state donated.

    The learning rate is `schedule(applied updates) * rate`. Updates are added in float32 and
    rounded stochastically if parameters or optimizer state have fewer bits, by the key, the step,
    a leaf's path and a number's position alone.

    The guard decides whether the update is applied. If not, parameters, optimizer state and average
    stay the same, bit for bit; only the step number and the guard's counters change.

    Metrics are scalars on the device: those of the objective, `learning_rate`, `grad_norm` (before
    clipping), `param_norm`, `update_ratio` (norm of the update over norm of the parameters),
    `tokens` (weight of the batch; 0 if it was skipped), `tokens_read` (without padding, also if it
    was skipped), `trained_share` (of them), `verdict` (bits of the guard), `skipped_total` and
    `skipped_in_a_row`. In float16 also `loss_scale` after this step and
    `overflows_total`, the steps not applied because of it. `layers` has the norm of the gradient by
    parameter, and by layer for stacked layers; it is 0 in a good step.
    """
    is_scaled = spec.precision.is_scaled
    gradient = gradients.build_gradient(spec, capture=spec.capture)
    estimate = build_estimator(spec.curvature, spec)
    optimizer = optax.with_extra_args_support(spec.optimizer)

    def step(
        state: TrainState, batch: Tokens, rate: Array | float = 1.0
    ) -> tuple[TrainState, Metrics]:
        scale = state.guard.scale
        key = jax.random.fold_in(spec.key, state.step)
        grads, part, captured = gradient(spec.point(state), batch, key, scale.factor)
        grads = inject_faults("grads", grads, state.step)
        means = {name: mean.figure for name, mean in part.metrics.items()}
        means["loss_nats"] = inject_faults("loss", part.metrics["loss_nats"].value, state.step)
        grad_norm = tree.norm(grads)
        applied = state.applied
        estimated = estimate(state.params, grads, batch, key, scale.factor, applied)
        if "curvature" in estimated:
            # A bad estimate would stay in the optimizer's mean: the guard judges it too.
            is_known = tree.is_finite(estimated["curvature"].diagonal)
            grad_norm = jnp.where(is_known, grad_norm, jnp.nan)
        is_good, verdict, guarded = guards.judge(
            state.guard,
            means["loss_nats"],
            grad_norm,
            spec.guard,
            step=None if spec.is_sampled else state.step,
            is_clipped=spec.is_clipped,
            is_empty=part.objective.weight == 0,
            is_scaled=is_scaled,
        )

        def update(with_norms: bool) -> tuple[Any, dict[str, Array]]:
            updates, opt_state = optimizer.update(
                grads, state.opt_state, state.params, rate=rate, applied=applied, **estimated
            )
            params = rounding.add(state.params, updates)
            figures: dict[str, Array] = {}
            if spec.post_update is not None:
                params, figures = spec.post_update(params, captured)
            # Both may be stored in fewer bits than an update is computed in.
            params, opt_state = (
                rounding.rounded(values, old, random.stream(key, name))
                for name, values, old in (
                    ("rounding/params", params, state.params),
                    ("rounding/opt_state", opt_state, state.opt_state),
                )
            )
            averaged = None
            if spec.average is not None:
                averaged = spec.average(state.average, params, applied + 1)
            new = guards.select(
                is_good,
                (params, opt_state, averaged),
                (state.params, state.opt_state, state.average),
            )
            param_norm = update_ratio = jnp.full((), jnp.nan, jnp.float32)
            if with_norms:
                param_norm = tree.norm(new[0])
                update_ratio = tree.norm(updates) / jnp.maximum(param_norm, 1e-30)
            return new, figures | {"param_norm": param_norm, "update_ratio": update_ratio}

        if spec.is_measured is None:
            new, figures = update(True)
        else:
            # The branches are whole updates: with only the norms inside of a branch, XLA would
            # write the update to memory in every step.
            new, figures = jax.lax.cond(
                spec.is_measured(state.step + 1), lambda: update(True), lambda: update(False)
            )
        params, opt_state, averaged = new
        metrics = means | figures
        metrics |= {
            "tokens": jnp.where(is_good, _trained_tokens(batch, part.objective), 0.0),
            "tokens_read": batch.read_count,
            "trained_share": batch.trained_share,
            "learning_rate": jnp.asarray(spec.schedule(applied) * rate, jnp.float32),
            "grad_norm": grad_norm,
            "verdict": verdict,
            "skipped_total": guarded.skipped,
            "skipped_in_a_row": guarded.in_a_row,
            "layers": _layer_norms(~is_good, grads, spec.axes),
        }
        if is_scaled:
            metrics |= {
                "loss_scale": guarded.scale.factor,
                "overflows_total": guarded.scale.overflows,
            }
        return TrainState(state.step + 1, params, opt_state, guarded, averaged), metrics

    return step


def _trained_tokens(batch: Tokens, objective: Mean) -> Array:
    """Return the weight of the batch's tokens; a loss of whole answers has another weight."""
    if batch.rollout is not None:
        return (batch.weights > 0).sum(dtype=jnp.float32)
    return objective.weight if batch.answers is None else batch.weights.sum()


def _layer_norms(is_needed: Array, grads: Any, axes: Any) -> Any:
    """Return the norm of each gradient by layer; zeros, at no cost, if they are not needed."""

    def norms() -> dict[str, Array]:
        return gradients.norms_by_layer(grads, axes)

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(norms))
    return jax.lax.cond(is_needed, norms, lambda: zeros)


def inject_faults(point: str, values: Any, step: Array) -> Any:
    """Return values with the faults that a test injects at a point, in one element of one leaf."""
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
