"""SOAP: Adam in the eigenbasis of Shampoo's two matrices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxlm.core import tree
from jaxlm.optim.config import Soap
from jaxlm.optim.moments import sides


class Bases(NamedTuple):
    """Of each matrix, running means of G G^T and G^T G, and a basis for each; None for other leaves and long sides."""

    left: Array | None
    left_basis: Array | None
    right: Array | None
    right_basis: Array | None


class Moments(NamedTuple):
    """The updates so far; each leaf's running means, of the gradient and of its square in the basis; and the bases."""

    updates: Array
    first: Any
    second: Any
    bases: Any


class Stepped(NamedTuple):
    """What an update makes of a leaf."""

    direction: Array
    first: Array
    second: Array
    bases: Bases


def scale_by_soap(config: Soap, axes: Any) -> optax.GradientTransformation:
    """Adam for the matrices of the blocks in a basis that turns with them, and plain Adam for the rest.

        L <- b2 L + (1 - b2) G G^T,  R <- b2 R + (1 - b2) G^T G,  with bases P of L and Q of R
        M <- b1 M + (1 - b1) G,  V <- b2 V + (1 - b2) (P^T G Q)^2,  U = P (P^T M' Q / (sqrt(V') + eps)) Q^T

    The first gradient moves no matrix: its L and R give the first bases, by eigenvectors, the largest first. After every
    `every` more updates P <- qr(L P), and Q likewise. A side longer than `longest` keeps the identity as its basis. Each
    layer of a stack is a matrix of its own, and attention's heads are columns of one matrix.

    8 + 8 (ins / outs + outs / ins) bytes of state for a number of a matrix, 8 for others; about 8 (ins + outs) FLOPs for
    each number of a matrix and update, in float32, and the decompositions.

    Source: Vyas et al. 2024, arXiv:2409.11321, algorithms 3 and 4. Its authors' code sorts the basis at each refresh; here
    it begins sorted, and the iteration keeps it so.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def init(params: Any) -> Moments:
        def square(layers: tuple[int, ...], size: int) -> Array | None:
            return None if size > config.longest else jnp.zeros((*layers, size, size))

        def empty(path: str, param: Array) -> Bases:
            found = sides(param.shape, names[path])
            if found is None:
                return Bases(None, None, None, None)
            layers, ins, outs = found
            return Bases(*(square(layers, size) for size in (ins, ins, outs, outs)))

        return Moments(
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(jnp.zeros_like, params),
            tree.map_with_path(empty, params),
        )

    def update(grads: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        del params
        count = state.updates + 1

        def step(path: str, grad: Array, m: Array, v: Array, bases: Bases) -> Stepped:
            found = sides(grad.shape, names[path])
            if found is None:
                m = config.b1 * m + (1 - config.b1) * grad
                v = config.b2 * v + (1 - config.b2) * jnp.square(grad)
                return Stepped(adam(m, v, count), m, v, bases)
            layers, ins, outs = found
            shape = (*layers, ins, outs)
            g = grad.astype(jnp.float32).reshape(shape)
            # The first gradient is for the bases alone.
            b1, b2 = (jnp.where(count == 1, 1.0, decay) for decay in (config.b1, config.b2))
            m = b1 * m + (1 - b1) * grad
            turned = jnp.square(_product(bases.left_basis, g, bases.right_basis, is_inverse=False))
            v = b2 * v + (1 - b2) * turned.reshape(grad.shape)
            ahead = _product(
                bases.left_basis, m.reshape(shape), bases.right_basis, is_inverse=False
            )
            u = adam(ahead, v.reshape(shape), jnp.maximum(count - 1, 1))
            u = _product(bases.left_basis, u, bases.right_basis, is_inverse=True)
            return Stepped(u.reshape(grad.shape), m, v, _seen(bases, g, config.b2))

        def adam(m: Array, v: Array, updates: Array) -> Array:
            t = updates.astype(jnp.float32)
            return m / (1 - config.b1**t) / (jnp.sqrt(v / (1 - config.b2**t)) + config.eps)

        stepped = tree.map_with_path(step, grads, state.first, state.second, state.bases)

        def pick(part: int) -> Any:
            return jax.tree.map(lambda leaf: leaf[part], stepped, is_leaf=_is_stepped)

        is_due = (count > 1) & ((count - 1) % config.every == 0)
        case = jnp.where(count == 1, 1, jnp.where(is_due, 2, 0))
        bases = lax.switch(case, [lambda same: same, _born, _turned], pick(3))
        return pick(0), Moments(count, pick(1), pick(2), bases)

    return optax.GradientTransformation(init, update)


def _product(left: Array | None, x: Array, right: Array | None, *, is_inverse: bool) -> Array:
    """P^T x Q of each matrix, or P x Q^T, without the side that has no basis."""
    if left is not None:
        x = _matmul("...ik,...kj->...ij" if is_inverse else "...ki,...kj->...ij", left, x)
    if right is not None:
        x = _matmul("...ik,...jk->...ij" if is_inverse else "...ik,...kj->...ij", x, right)
    return x


def _seen(bases: Bases, g: Array, decay: float) -> Bases:
    left, right = bases.left, bases.right
    if left is not None:
        left = decay * left + (1 - decay) * _matmul("...ik,...jk->...ij", g, g)
    if right is not None:
        right = decay * right + (1 - decay) * _matmul("...ki,...kj->...ij", g, g)
    return bases._replace(left=left, right=right)


def _born(bases: Any) -> Any:
    """Eigenvectors, those of the largest values first, as the iteration keeps them."""
    return _with_bases(bases, lambda square, basis: jnp.linalg.eigh(square)[1][..., ::-1])


def _turned(bases: Any) -> Any:
    """A step of orthogonal iteration."""
    return _with_bases(
        bases,
        lambda square, basis: jnp.linalg.qr(_matmul("...ik,...kj->...ij", square, basis))[0],
    )


def _with_bases(bases: Any, basis_of: Any) -> Any:
    def renew(each: Bases) -> Bases:
        left, right = each.left_basis, each.right_basis
        return each._replace(
            left_basis=None if left is None else basis_of(each.left, left),
            right_basis=None if right is None else basis_of(each.right, right),
        )

    return jax.tree.map(renew, bases, is_leaf=lambda node: isinstance(node, Bases))


def _matmul(dims: str, a: Array, b: Array) -> Array:
    return jnp.einsum(dims, a, b, precision=lax.Precision.HIGHEST)


def _is_stepped(node: Any) -> bool:
    return isinstance(node, Stepped)
