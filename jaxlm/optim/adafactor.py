"""Adafactor's scaling of each layer of a stack as a tensor of its own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.optim.config import Adafactor
from jaxlm.optim.moments import factored_dims
from jaxlm.parallel.logical import STACKED


class Factored(NamedTuple):
    """Factored second moment: means of the squared gradient over one of the two dimensions.

    `row` is the mean over the last of the two factored dimensions, `col` over the first.
    """

    row: Array
    col: Array


class AdafactorState(NamedTuple):
    """Number of updates, and the second moment of each leaf: `Factored`, or of the leaf's shape."""

    updates: Array
    second: Any


def scale_by_adafactor(config: Adafactor, axes: Any) -> optax.GradientTransformation:
    """Return Adafactor's direction: u = g / sqrt(v), clipped, times the parameter's RMS.

        b_t = 1 - t^-exponent
        v_t = b_t v + (1 - b_t) (g^2 + eps)

    v is stored as row and column means R and C, with v = R C / mean(R). u is clipped to a root mean
    square (RMS) of `clip_update`; the RMS of the parameter is at least `smallest_scale`.

    Optax treats a stack of layers as one tensor: the layer dimension may be one of the two largest,
    and both RMS include all layers. Here each layer is a tensor of its own, as in the paper.

    State for each number of a matrix, with float32 moments: 4 / rows + 4 / columns bytes, rows and
    columns being its two largest dimensions; 4 bytes if the smaller one is below `factor_from`, and
    for vectors.

    Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5, without momentum.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def dims(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        return factored_dims(shape, names[path], config.factor_from)

    def empty(path: str, param: Array) -> Factored | Array:
        pair = dims(path, param.shape)
        if pair is None:
            return jnp.zeros(param.shape, param.dtype)
        row, col = (
            tuple(size for d, size in enumerate(param.shape) if d != reduced)
            for reduced in reversed(pair)
        )
        return Factored(jnp.zeros(row, param.dtype), jnp.zeros(col, param.dtype))

    def init(params: Any) -> AdafactorState:
        return AdafactorState(jnp.zeros((), jnp.int32), tree.map_with_path(empty, params))

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        count = state.updates + 1
        beta = 1 - count.astype(jnp.float32) ** -config.exponent

        def next_moment(path: str, grad: Array, old: Factored | Array) -> Factored | Array:
            square = jnp.square(grad.astype(jnp.float32)) + config.eps
            pair = dims(path, grad.shape)
            if pair is None or not isinstance(old, Factored):
                assert not isinstance(old, Factored)
                return (beta * old + (1 - beta) * square).astype(old.dtype)
            row, col = (
                (beta * part + (1 - beta) * square.mean(reduced)).astype(part.dtype)
                for part, reduced in zip(old, reversed(pair), strict=True)
            )
            return Factored(row, col)

        def direction(path: str, grad: Array, param: Array, second: Factored | Array) -> Array:
            unstacked = tuple(d for d, axis in enumerate(names[path]) if axis not in STACKED)
            pair = dims(path, grad.shape)
            if pair is None or not isinstance(second, Factored):
                assert not isinstance(second, Factored)
                step = grad * jax.lax.rsqrt(second)
            else:
                first, last = pair
                row = second.row / second.row.mean(first, keepdims=True)
                step = grad * jnp.expand_dims(jax.lax.rsqrt(row), last)
                step = step * jnp.expand_dims(jax.lax.rsqrt(second.col), first)
            if config.clip_update is not None:
                step = step / jnp.maximum(1.0, _rms(step, unstacked) / config.clip_update)
            return step * jnp.maximum(_rms(param, unstacked), config.smallest_scale)

        second = tree.map_with_path(next_moment, grads, state.second)
        return tree.map_with_path(direction, grads, params, second), AdafactorState(count, second)

    return optax.GradientTransformation(init, update)


def _rms(x: Array, dims: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), dims, keepdims=True))
