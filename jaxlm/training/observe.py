"""Statistics of the layers in a step, without applying the step."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.data.batch import Tokens
from jaxlm.monitor.config import Watched
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.training import gradient as gradients
from jaxlm.training.curvature import build_estimator
from jaxlm.training.state import TrainState
from jaxlm.training.step import StepSpec

KINDS: dict[Watched, tuple[Kind, ...]] = {
    "norms": (),
    "activations": ("activations",),
    "attention": ("entropy",),
    "noise": (),
}


class Observed(NamedTuple):
    """Statistics of one step.

    Args:
      norms: norms by kind and by the path of a leaf, [L] for stacked layers.
      notes: intermediates of the layers.
      square: squared norm of the gradient.
      weight: weight of the batch.
    """

    norms: dict[str, dict[str, Array]]
    notes: Intermediates
    square: Array
    weight: Array


Observe = Callable[..., Observed]  # of the state, the batch, and the rate (1)


def build_observer(spec: StepSpec, watched: Collection[Watched]) -> Observe:
    """Return the function (state, batch, rate) -> statistics of the step from that state.

    It is a program of its own and returns no state: a run that is observed computes the same bits
    as one that is not, by the same step program. It costs one more step whenever it is called.

    Args:
      spec: the step. If its micro-batches differ from the step's, dropout draws other numbers.
      watched: kinds of statistics.
    """
    estimate = build_estimator(spec.curvature, spec)
    optimizer = optax.with_extra_args_support(spec.optimizer)
    gradient = gradients.build_gradient(
        spec,
        capture=[kind for name in watched for kind in KINDS[name]],
        squares="noise" in watched,
    )

    def observe(state: TrainState, batch: Tokens, rate: Array | float = 1.0) -> Observed:
        key, scale = jax.random.fold_in(spec.key, state.step), state.guard.scale.factor
        grads, part, captured = gradient(spec.point(state), batch, key, scale)
        norms: dict[str, dict[str, Array]] = {}
        if "norms" in watched:
            applied = state.applied
            estimated = estimate(state.params, grads, batch, key, scale, applied)
            updates, _ = optimizer.update(
                grads, state.opt_state, state.params, rate=rate, applied=applied, **estimated
            )
            trees = {"grad_norm": grads, "param_norm": state.params, "update_norm": updates}
            norms = {
                name: gradients.norms_by_layer(values, spec.axes) for name, values in trees.items()
            }
        return Observed(norms, captured, tree.norm(grads) ** 2, part.objective.weight)

    return observe
