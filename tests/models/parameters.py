"""Parameters of tests, drawn by NumPy: JAX would compile a program for them, for a second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.build import Blueprint


def draw_params(blueprint: Blueprint, seed: int = 0, std: float = 0.05) -> Any:
    """Return parameters of a model, see `draw_like`."""
    return draw_like(jax.eval_shape(blueprint.init, jax.random.key(0)), seed, std)


def draw_like(shapes: Any, seed: int = 0, std: float = 0.05, spread: float = 0.1) -> Any:
    """Return arrays of given shapes: weights of deviation `std`, scales near 1, biases near 0.

    `spread` is the deviation of scales and biases. No leaf is all ones or zeros, so that each
    scale and each bias matters. A leaf depends on the seed and its path alone.
    """

    def leaf(path: Any, like: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        draw = np.random.default_rng([seed, *name.encode()])
        is_scale = "scale" in name
        deviation = spread if is_scale or "bias" in name else std
        return jnp.asarray(is_scale + deviation * draw.standard_normal(like.shape), like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)
