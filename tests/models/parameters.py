"""Parameters of tests, drawn by NumPy: JAX would compile a program for them, for a second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.build import Blueprint


def draw_params(blueprint: Blueprint, seed: int = 0, std: float = 0.05) -> Any:
    """Return parameters of a model: weights of deviation `std`, scales near 1, biases near 0.

    No leaf is all ones or zeros, so that each scale and each bias matters.
    """
    shapes = jax.eval_shape(blueprint.init, jax.random.key(0))

    def leaf(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        draw = np.random.default_rng([seed, *name.encode()])
        is_scale = "scale" in name
        deviation = 0.1 if is_scale or "bias" in name else std
        return jnp.asarray(is_scale + deviation * draw.standard_normal(like.shape), like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)
