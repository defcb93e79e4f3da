"""SOAP: Adam in the eigenbasis of Shampoo's two matrices."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxlm.core import tree
from jaxlm.optim.config import Soap
from jaxlm.optim.moments import sides
from jaxlm.optim.work_split import WorkSplit, work_split


class Bases(NamedTuple):
    """Running means of G G^T and G^T G of each matrix, and an eigenbasis of each mean.

    None for leaves that are no matrix, and for sides longer than `max_dim`.
    """

    left: Array | None
    left_basis: Array | None
    right: Array | None
    right_basis: Array | None


class SoapState(NamedTuple):
    """Number of updates, and moments and bases of each leaf.

    `first` is the running mean of the gradient, `second` that of its square in the eigenbasis.
    """

    updates: Array
    first: Any
    second: Any
    bases: Any


def scale_by_soap(config: Soap, axes: Any) -> optax.GradientTransformation:
    """Return Adam's direction, in Shampoo's eigenbasis for the matrices of the blocks.

        L <- b2 L + (1 - b2) G G^T,  R <- b2 R + (1 - b2) G^T G,  with bases P of L and Q of R
        M <- b1 M + (1 - b1) G,  V <- b2 V + (1 - b2) (P^T G Q)^2
        U = P (P^T M' Q / (sqrt(V') + eps)) Q^T

    The first update leaves the matrices unchanged: it computes the first bases, the eigenvectors of
    L and R by descending eigenvalue. After every `every` more updates P <- qr(L P), and Q likewise.
    The basis of a side longer than `max_dim` is the identity. Each layer of a stack is a matrix of
    its own, and the heads of attention are columns of one matrix.

    State: 8 + 8 (ins / outs + outs / ins) bytes for each number of a matrix, 8 for the others.
    Compute: about 8 (ins + outs) FLOPs for each number of a matrix in each update, in float32, and
    the decompositions.

    Source: Vyas et al. 2024, arXiv:2409.11321, algorithms 3 and 4. Its authors' code sorts the
    basis at each refresh; here the first basis is sorted, and the iteration keeps the order.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def init(params: Any) -> SoapState:
        def square(layers: tuple[int, ...], size: int) -> Array | None:
            return None if size > config.max_dim else jnp.zeros((*layers, size, size))

        def empty(path: str, param: Array) -> Bases:
            matrix = sides(param.shape, names[path])
            if matrix is None:
                return Bases(None, None, None, None)
            layers, ins, outs = matrix
            return Bases(*(square(layers, size) for size in (ins, ins, outs, outs)))

        first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        bases = tree.map_with_path(empty, params)
        return SoapState(jnp.zeros((), jnp.int32), first, second, bases)

    def update(grads: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        del params
        count = state.updates + 1

        # The direction of a leaf, and its next moments and bases.
        def step(path: str, grad: Array, m: Array, v: Array, bases: Bases) -> tuple[Any, ...]:
            matrix = sides(grad.shape, names[path])
            if matrix is None:
                m = config.b1 * m + (1 - config.b1) * grad
                v = config.b2 * v + (1 - config.b2) * jnp.square(grad)
                return adam(m, v, count), m, v, bases
            layers, ins, outs = matrix
            leaf_shape, shape = grad.shape, (*layers, ins, outs)
            split = work_split(shape, names[path][: len(layers)])
            bases = _placed(bases, split)
            grad, m, v = (_placed(x.reshape(shape), split) for x in (grad, m, v))
            g = grad.astype(jnp.float32)
            # The first gradient only initializes the bases.
            b1, b2 = (jnp.where(count == 1, 1.0, decay) for decay in (config.b1, config.b2))
            m = b1 * m + (1 - b1) * grad
            v = b2 * v + (1 - b2) * jnp.square(_rotated(bases, g, is_inverse=False))
            u = adam(_rotated(bases, m, is_inverse=False), v, jnp.maximum(count - 1, 1))
            u = _placed(_rotated(bases, u, is_inverse=True), split)
            bases = _placed(_accumulated(bases, g, config.b2), split)
            return *(x.reshape(leaf_shape) for x in (u, m, v)), bases

        def adam(m: Array, v: Array, updates: Array) -> Array:
            t = updates.astype(jnp.float32)
            return m / (1 - config.b1**t) / (jnp.sqrt(v / (1 - config.b2**t)) + config.eps)

        leaves = tree.map_with_path(step, grads, state.first, state.second, state.bases)
        structure: Any = jax.tree.structure(grads)
        directions, first, second, bases = map(
            structure.unflatten, zip(*structure.flatten_up_to(leaves), strict=True)
        )
        is_due = (count > 1) & ((count - 1) % config.every == 0)
        case = jnp.where(count == 1, 1, jnp.where(is_due, 2, 0))
        bases = lax.switch(case, [lambda same: same, _initial, _refreshed], bases)
        return directions, SoapState(count, first, second, bases)

    return optax.GradientTransformation(init, update)


def _placed(arrays: Any, split: WorkSplit | None) -> Any:
    """Constrain whole matrices to the devices that compute with them."""
    return jax.tree.map(split.constrain, arrays) if split else arrays


def _rotated(bases: Bases, x: Array, *, is_inverse: bool) -> Array:
    """Return P^T x Q of each matrix, or the inverse P x Q^T; a side without a basis is skipped."""
    left, right = bases.left_basis, bases.right_basis
    if left is not None:
        x = _matmul("...ik,...kj->...ij" if is_inverse else "...ki,...kj->...ij", left, x)
    if right is not None:
        x = _matmul("...ik,...jk->...ij" if is_inverse else "...ik,...kj->...ij", x, right)
    return x


def _accumulated(bases: Bases, g: Array, decay: float) -> Bases:
    """Return the bases with the running means of G G^T and G^T G updated."""
    left, right = bases.left, bases.right
    if left is not None:
        left = decay * left + (1 - decay) * _matmul("...ik,...jk->...ij", g, g)
    if right is not None:
        right = decay * right + (1 - decay) * _matmul("...ki,...kj->...ij", g, g)
    return bases._replace(left=left, right=right)


def _initial(bases: Any) -> Any:
    """Return the bases as eigenvectors by descending eigenvalue; `_refreshed` keeps the order."""
    return _with_bases(bases, lambda square, basis: jnp.linalg.eigh(square)[1][..., ::-1])


def _refreshed(bases: Any) -> Any:
    """Return the bases after a step of orthogonal iteration."""
    product = functools.partial(_matmul, "...ik,...kj->...ij")
    return _with_bases(bases, lambda square, basis: jnp.linalg.qr(product(square, basis))[0])


def _with_bases(bases: Any, basis_of: Any) -> Any:
    def renew(leaf: Bases) -> Bases:
        left, right = leaf.left_basis, leaf.right_basis
        return leaf._replace(
            left_basis=None if left is None else basis_of(leaf.left, left),
            right_basis=None if right is None else basis_of(leaf.right, right),
        )

    return jax.tree.map(renew, bases, is_leaf=lambda node: isinstance(node, Bases))


def _matmul(dims: str, a: Array, b: Array) -> Array:
    return jnp.einsum(dims, a, b, precision=lax.Precision.HIGHEST)
