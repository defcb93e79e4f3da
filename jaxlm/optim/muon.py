"""Muon: momentum, orthogonalized by Newton-Schulz iterations for the matrices of the blocks."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxlm.core import backend, tree
from jaxlm.optim.config import Muon
from jaxlm.optim.moments import inputs
from jaxlm.optim.work_split import WorkSplit, work_split
from jaxlm.parallel.logical import STACKED, LogicalAxes

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


def orthogonal(x: Array, axes: LogicalAxes, steps: int, dtype: str) -> Array:
    """Return NS of each layer's matrix, scaled by sqrt(max(1, outs / ins)).

    On a mesh `fsdp` and `tensor` divide the work: each takes whole matrices where it divides the
    stack, else columns of every matrix. So most matrices cross the mesh twice, not in each step.

    Args:
      x: the parameter of a stack or of one layer, with inputs and outputs in any number of
        dimensions.
      axes: its logical axes.
      steps: iterations.
      dtype: of the matrix products.
    """
    depth = sum(axis in STACKED for axis in axes)
    ins = math.prod(x.shape[dim] for dim in inputs(axes))
    matrix = x.reshape(*x.shape[:depth], ins, -1)
    outs = matrix.shape[-1]
    if is_tall := ins > outs:
        matrix = jnp.swapaxes(matrix, -1, -2)
    y = newton_schulz(matrix, steps, dtype, work_split(matrix.shape, axes[:depth]))
    if is_tall:
        y = jnp.swapaxes(y, -1, -2)
    return (y * math.sqrt(max(1.0, outs / ins))).reshape(x.shape)


def newton_schulz(x: Array, steps: int, dtype: str, split: WorkSplit | None = None) -> Array:
    """Return approximately the nearest orthogonal matrix of each matrix in x, [..., M, N], M <= N.

    Its singular values are near 1. The matrix products are computed in `dtype`, on the devices of
    `split`.
    """
    a, b, c = QUINTIC
    stack = tuple(range(x.ndim - 2))

    def product(left: Array, right: Array, side: int) -> Array:
        dims = (((x.ndim - 1,), (x.ndim - side,)), (stack, stack))
        return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32).astype(dtype)

    def place(y: Array, **dims: bool) -> Array:
        return split.constrain(y, **dims) if split else y

    x = place(x, columns=True)
    size = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    y = (x / (size + 1e-7)).astype(dtype)
    if backend.name() == "cpu":
        # XLA may fold the transposition of a tall matrix into the first product, and then has no
        # kernel for bfloat16 there.
        y = lax.optimization_barrier(y)
    for _ in range(steps):
        gram = place(product(y, y, 1))
        rows = place(gram, rows=True)
        polynomial = place(place(b * rows + c * product(rows, gram, 2), rows=True))
        y = place(a * y + product(polynomial, y, 2), columns=True)
    return y.astype(x.dtype)
