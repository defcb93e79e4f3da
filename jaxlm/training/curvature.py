"""Estimates of the diagonal of the loss's curvature, for optimizers that use one."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core import random
from jaxlm.data.batch import Tokens
from jaxlm.optim.sophia import CurvatureEstimate
from jaxlm.training.gradient import GradientSpec, LossOfParams, build_gradient, constrain_grads


class Curvature(NamedTuple):
    """The loss of sampled labels, and the number of updates between two estimates."""

    loss: LossOfParams
    every: int


Estimator = Callable[[Any, Any, Tokens, Array, Array, Array], dict[str, CurvatureEstimate]]


def build_estimator(curvature: Curvature | None, spec: GradientSpec) -> Estimator:
    """Return the function (params, grads, batch, key, scale, updates) -> {"curvature": estimate}.

    The optimizer gets it with the gradient. Without a `curvature` the dictionary is empty. Every
    `every` updates the estimate is B g^2, with the mean gradient g of labels that the model samples
    and their number B.

    Source: Liu et al. 2023, arXiv:2305.14342, algorithm 2 (Gauss-Newton-Bartlett).
    """
    if curvature is None:
        return lambda *_: {}
    every = curvature.every
    gradient = build_gradient(dataclasses.replace(spec, loss=curvature.loss))
    constrained = constrain_grads(spec.shardings, spec.frozen)

    def estimator(
        params: Any, grads: Any, batch: Tokens, key: Array, scale: Array, updates: Array
    ) -> dict[str, CurvatureEstimate]:
        # After the gradient: else XLA starts before it is done and holds the activations of both.
        params, _ = jax.lax.optimization_barrier((params, grads))
        is_due = updates % every == 0

        def estimate() -> Any:
            draws = jax.random.bits(random.stream(key, "curvature"), batch.targets.shape) >> 1
            sampled = batch._replace(targets=draws.astype(jnp.int32))
            grads, part, _ = gradient(params, sampled, key, scale)
            weight = part.objective.weight
            return jax.tree.map(lambda g: weight.astype(g.dtype) * jnp.square(g), grads)

        shapes = jax.eval_shape(estimate)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        diagonal = jax.lax.cond(is_due, estimate, lambda: constrained(zeros))
        return {"curvature": CurvatureEstimate(is_due, constrained(diagonal))}

    return estimator
