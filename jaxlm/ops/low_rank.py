"""Factors of the leading part of a matrix."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def leading_factors(
    weight: Float[Array, "I O"], rank: int
) -> tuple[Float[Array, "I r"], Float[Array, "r O"]]:
    """Return A and B whose product is the closest matrix of that rank, in float32.

    Both have the square roots of the singular values as norms: A = U sqrt(S), B = sqrt(S) V^T. The
    singular vectors are eigenvectors of the smaller Gram matrix, which costs less than a
    decomposition of the weight. A B is an orthogonal projection of the weight: its error is of
    second order in that of the vectors.
    """
    weight = weight.astype(jnp.float32)
    if weight.shape[0] > weight.shape[1]:
        b, a = leading_factors(weight.T, rank)  # of the transpose
        return a.T, b.T
    gram = jnp.matmul(weight, weight.T, precision="highest")
    _, vectors = jnp.linalg.eigh(gram)  # in ascending order
    basis = vectors[:, : -rank - 1 : -1]
    projected = jnp.matmul(basis.T, weight, precision="highest")
    roots = jnp.sqrt(jnp.linalg.norm(projected, axis=1))
    return basis * roots[None], projected / jnp.where(roots > 0, roots, 1.0)[:, None]
