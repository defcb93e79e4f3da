"""Which dtype holds parameters, multiplies, and adds up."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.core import backend
from jaxlm.core.precision_config import PrecisionConfig, Products


@dataclasses.dataclass(frozen=True)
class Precision:
    """A mixed-precision policy (Micikevicius et al. 2018, arXiv:1710.03740, section 3).

    `params` is the dtype of the master weights, `moments` that of the optimizer's state between
    updates; both are rounded to stochastically (`optim.rounding`), and updates are computed in
    float32. `compute` is the dtype of the operands of each matrix product and of the activations
    between them, `reduce` that of gradients as they are summed over micro-batches. Softmax, norms,
    the loss and the accumulator of every product are float32 whatever is chosen.
    `products` says to what the operands of attention's and the MLPs' projections are rounded beyond `compute`, while
    training.
    """

    params: jnp.dtype
    moments: jnp.dtype
    compute: jnp.dtype
    reduce: jnp.dtype
    products: Products = "compute"

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Precision":
        """The policy that a config names."""
        names = (config.params, config.moments, config.compute, config.reduce)
        params, moments, compute, reduce = map(jnp.dtype, names)
        return cls(params, moments, compute, reduce, config.products)

    @classmethod
    def float32(cls) -> "Precision":
        """Everything in float32."""
        return cls.of(PrecisionConfig())

    @property
    def exact(self) -> "Precision":
        """The same without rounded products: of routers, of logits, and of everything but training."""
        return dataclasses.replace(self, products="compute")

    @property
    def activations(self) -> jnp.dtype:
        """The dtype in which activations flow between products: `compute`, but float32 on CPU, where low precision only pays inside a product."""
        return jnp.dtype(jnp.float32) if backend.name() == "cpu" else self.compute

    @property
    def is_scaled(self) -> bool:
        """Whether gradients pass through float16, so that the loss must be scaled up for small ones not to vanish."""
        return jnp.dtype(jnp.float16) in (self.compute, self.reduce)


def widened(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a tree with its 16-bit numbers as float32, and the function that gives such a tree its dtypes back.

    For parameters that the body of a loop closes over: JAX sums their gradients over the turns in the dtype in which they
    enter the loop. Entering in float32 and rounded inside, they are the same numbers, summed in float32.
    """

    def wide(leaf: Any) -> Any:
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if is_narrow else leaf

    def narrowed(other: Any) -> Any:
        return jax.tree.map(
            lambda leaf, like: leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype),
            other,
            tree,
        )

    return jax.tree.map(wide, tree), narrowed
