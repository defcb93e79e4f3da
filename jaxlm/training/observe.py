"""What a step finds and would do, layer by layer, without doing it."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.monitor.config import Watched
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.training import curvature as curvatures
from jaxlm.training import gradient as gradients
from jaxlm.training.curvature import Curvature
from jaxlm.training.gradient import LossOfParams
from jaxlm.training.state import TrainState

KINDS: dict[Watched, tuple[Kind, ...]] = {
    "norms": (),
    "activations": ("activations",),
    "attention": ("entropy",),
    "noise": (),
}


class Observed(NamedTuple):
    """Norms by kind and by the path of a leaf, [L] in stacks; what layers noted; the gradient's squared norm and weight."""

    norms: dict[str, dict[str, Array]]
    notes: Intermediates
    square: Array
    weight: Array


Observe = Callable[..., Observed]  # of TrainState, Tokens and, where it is not 1, the rate


def build(
    loss: LossOfParams,
    optimizer: optax.GradientTransformation,
    *,
    key: Array,
    precision: Precision,
    axes: Any,
    capture: Collection[Watched],
    shardings: Any = None,
    microbatches: int = 1,
    gradient_point: Callable[[Any, Any], Any] | None = None,
    curvature: Curvature | None = None,
    frozen: frozenset[str] = frozenset(),
) -> Observe:
    """The function (state, batch, rate) -> what the step from there on that batch finds, to be jitted beside the step.

    It is a program of its own, and gives no state back: so a run that is watched has the numbers of one that is not, in
    every bit, and its steps are the same program. What it costs is one more step, whenever it is called.

    Arguments are those of `step.build`. Where `microbatches` is not the step's, dropout draws other numbers than there.
    """
    parts: dict[str, Any] = dict(
        precision=precision,
        axes=axes,
        shardings=shardings,
        microbatches=microbatches,
        frozen=frozen,
    )
    estimate = curvatures.build(curvature, **parts)
    extended = optax.with_extra_args_support(optimizer)
    gradient = gradients.build_gradient(
        loss,
        **parts,
        capture=[kind for name in capture for kind in KINDS[name]],
        squares="noise" in capture,
    )

    def observe(state: TrainState, batch: Tokens, rate: Array | float = 1.0) -> Observed:
        at = (
            state.params
            if gradient_point is None
            else gradient_point(state.params, state.opt_state)
        )
        key_now = jax.random.fold_in(key, state.step)
        grads, part, notes = gradient(at, batch, key_now, state.guard.scale.factor)
        norms: dict[str, dict[str, Array]] = {}
        if "norms" in capture:
            scale = state.guard.scale.factor
            given = estimate(state.params, grads, batch, key_now, scale, state.applied)
            updates, _ = extended.update(grads, state.opt_state, state.params, rate=rate, **given)
            trees = {"grad_norm": grads, "param_norm": state.params, "update_norm": updates}
            norms = {name: gradients.norms_by_layer(values, axes) for name, values in trees.items()}
        return Observed(norms, notes, tree.norm(grads) ** 2, part.objective.weight)

    return observe
