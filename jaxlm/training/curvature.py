"""An estimate of the diagonal of the loss's curvature, for the optimizers that ask for one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core import random
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.optim.sophia import Estimate
from jaxlm.training import gradient as gradients
from jaxlm.training.gradient import LossOfParams


class Curvature(NamedTuple):
    """The loss of drawn targets, and the updates from one estimate to the next."""

    loss: LossOfParams
    every: int


Estimator = Callable[[Any, Any, Tokens, Array, Array, Array], dict[str, Estimate]]


def build(
    curvature: Curvature | None,
    *,
    precision: Precision,
    axes: Any,
    shardings: Any,
    microbatches: int,
    frozen: frozenset[str] = frozenset(),
) -> Estimator:
    """The function (params, grads, batch, key, scale, updates) -> `curvature`, which the optimizer gets with the gradient; nothing for None.

    Every so many updates it is B g^2, where g is the mean gradient of targets that the model draws itself, and B their number.

    Source: Liu et al. 2023, arXiv:2305.14342, algorithm 2 (Gauss-Newton-Bartlett).
    """
    if curvature is None:
        return lambda *_: {}
    every = curvature.every
    gradient = gradients.build_gradient(
        curvature.loss,
        precision=precision,
        axes=axes,
        shardings=shardings,
        microbatches=microbatches,
        frozen=frozen,
    )
    laid_out = gradients.constrain_grads(shardings, frozen)

    def estimator(
        params: Any, grads: Any, batch: Tokens, key: Array, scale: Array, updates: Array
    ) -> dict[str, Estimate]:
        # After the gradient: else XLA begins before it is done, and holds the activations of both.
        params, _ = jax.lax.optimization_barrier((params, grads))
        is_due = updates % every == 0

        def estimate() -> Any:
            draws = jax.random.bits(random.stream(key, "curvature"), batch.targets.shape) >> 1
            drawn = batch._replace(targets=draws.astype(jnp.int32))
            grads, part, _ = gradient(params, drawn, key, scale)
            weight = part.objective.weight
            return jax.tree.map(lambda g: weight.astype(g.dtype) * jnp.square(g), grads)

        shapes = jax.eval_shape(estimate)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        diagonal = jax.lax.cond(is_due, estimate, lambda: laid_out(none))
        return {"curvature": Estimate(is_due, laid_out(diagonal))}

    return estimator
