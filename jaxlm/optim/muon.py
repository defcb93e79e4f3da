"""Muon: momentum, orthogonalized by Newton-Schulz iterations for the matrices of the blocks."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxlm.core import tree
from jaxlm.optim.config import Muon
from jaxlm.optim.moments import inputs
from jaxlm.parallel.logical import STACKED

# Jordan's coefficients: steep at zero; singular values end in about [0.7, 1.2].
QUINTIC = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """Number of updates, and each leaf's running means of the gradient and of its square.

    `second` is a scalar zero for the matrices of the blocks.
    """

    updates: Array
    first: Any
    second: Any


def scale_by_muon(config: Muon, axes: Any) -> optax.GradientTransformation:
    """Return Muon's direction for the blocks' matrices, and Adam's for the other parameters.

        M <- b M + (1 - b) G,  U = NS(b M + (1 - b) G) sqrt(max(1, outs / ins))

    NS is five Newton-Schulz steps X <- a X + (b A + c A A) X with A = X X^T, from X scaled to
    Frobenius norm 1; they drive every singular value towards one. Each layer of a stack is a matrix
    of its own, and the heads of attention are columns of one matrix. Embeddings, norms and biases
    use Adam with the peak learning rate `adam_lr`, on the same schedule.

    State: 4 bytes for each number of a matrix, 8 for the others. Compute: about 30 D min(ins, outs)
    FLOPs for each number of a matrix, for any batch size.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def init(params: Any) -> MuonState:
        def second(path: str, param: Array) -> Array:
            return jnp.zeros((), param.dtype) if inputs(names[path]) else jnp.zeros_like(param)

        first = jax.tree.map(jnp.zeros_like, params)
        return MuonState(jnp.zeros((), jnp.int32), first, tree.map_with_path(second, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.updates + 1
        t = count.astype(jnp.float32)

        def next_first(path: str, grad: Array, old: Array) -> Array:
            decay = config.momentum if inputs(names[path]) else config.b1
            return decay * old + (1 - decay) * grad

        def next_second(path: str, grad: Array, old: Array) -> Array:
            if inputs(names[path]):
                return old
            return config.b2 * old + (1 - config.b2) * jnp.square(grad)

        def direction(path: str, grad: Array, first: Array, second: Array) -> Array:
            if inputs(names[path]):
                lookahead = config.momentum * first + (1 - config.momentum) * grad
                steps, dtype = config.newton_schulz_steps, config.newton_schulz_dtype
                return orthogonal(lookahead, names[path], steps, dtype)
            mean, square = first / (1 - config.b1**t), second / (1 - config.b2**t)
            return config.adam_lr / config.lr * mean / (jnp.sqrt(square) + config.eps)

        first = tree.map_with_path(next_first, grads, state.first)
        second = tree.map_with_path(next_second, grads, state.second)
        return tree.map_with_path(direction, grads, first, second), MuonState(count, first, second)

    return optax.GradientTransformation(init, update)


def orthogonal(x: Array, axes: tuple[str | None, ...], steps: int, dtype: str) -> Array:
    """Return NS of each layer's matrix, scaled by sqrt(max(1, outs / ins)).

    x is the parameter of a stack or of one layer, with inputs and outputs in any number of
    dimensions with the logical axes `axes`; the matrix products are computed in `dtype`.
    """
    layers = x.shape[: len(axes) - sum(axis not in STACKED for axis in axes)]
    ins = math.prod(x.shape[dim] for dim in inputs(axes))
    matrix = x.reshape(math.prod(layers), ins, -1)
    outs = matrix.shape[2]
    return (newton_schulz(matrix, steps, dtype) * math.sqrt(max(1.0, outs / ins))).reshape(x.shape)


def newton_schulz(x: Array, steps: int, dtype: str) -> Array:
    """Return approximately the nearest orthogonal matrix of each matrix in x, [B, M, N].

    Its singular values are near 1. The matrix products are computed in `dtype`.
    """
    if x.shape[1] > x.shape[2]:
        return jnp.swapaxes(newton_schulz(jnp.swapaxes(x, 1, 2), steps, dtype), 1, 2)
    a, b, c = QUINTIC

    def product(left: Array, right: Array, side: int) -> Array:
        dims = (((2,), (side,)), ((0,), (0,)))
        return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32).astype(dtype)

    size = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    y = (x / (size + 1e-7)).astype(dtype)
    for _ in range(steps):
        gram = product(y, y, 2)
        y = a * y + product(b * gram + c * product(gram, gram, 1), y, 1)
    return y.astype(x.dtype)
