"""Mixed precision: dtypes of parameters, matrix products and sums."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxlm.core import backend
from jaxlm.core.precision_config import Float, PrecisionConfig, Products, Qat


@dataclasses.dataclass(frozen=True)
class Precision:
    """A mixed-precision policy (Micikevicius et al. 2018, arXiv:1710.03740, section 3).

    Softmax, norms, the loss and the accumulator of every product are float32 under every policy.

    Attributes:
      params: dtype of the master weights.
      moments: dtype of the optimizer's state between updates. Updates are computed in float32 and
        rounded stochastically to `params` and `moments` (`optim.rounding`).
      compute: dtype of matrix operands and of the activations between products.
      reduce: dtype of gradients while they are summed over micro-batches.
      products: rounding beyond `compute` of operands of attention and MLP projections in training.
      qat: the same of the scheme that the model is quantized to later, in evaluations too.
    """

    params: jnp.dtype
    moments: jnp.dtype
    compute: jnp.dtype
    reduce: jnp.dtype
    products: Products = "compute"
    qat: Qat = "none"

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Precision":
        """Return the policy of a config."""
        names = (config.params, config.moments, config.compute, config.reduce)
        params, moments, compute, reduce = map(jnp.dtype, names)
        return cls(params, moments, compute, reduce, config.products, config.qat)

    @classmethod
    def float32(cls) -> "Precision":
        """Return the policy with float32 everywhere."""
        return cls.of(PrecisionConfig())

    @property
    def exact(self) -> "Precision":
        """The policy without rounded products, for routers and logits."""
        return dataclasses.replace(self, products="compute", qat="none")

    @property
    def evaluated(self) -> "Precision":
        """The policy of everything but training."""
        return dataclasses.replace(self, products="compute")

    @property
    def activations(self) -> jnp.dtype:
        """Dtype of activations: `compute`; float32 on CPUs, where fewer bits pay in products."""
        return jnp.dtype(jnp.float32) if backend.name() == "cpu" else self.compute

    @property
    def cached(self) -> jnp.dtype:
        """Dtype of a KV cache, and of the operands of attention over it."""
        compute = cast(Float, self.compute.name)
        return jnp.dtype(backend.cached_dtype(compute, is_cpu=backend.name() == "cpu"))

    @property
    def is_scaled(self) -> bool:
        """True if gradients pass through float16, so that the loss is scaled against underflow."""
        return jnp.dtype(jnp.float16) in (self.compute, self.reduce)


def widened(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a tree with 16-bit leaves as float32, and the function that restores the dtypes.

    For parameters that the body of a loop closes over: JAX sums their gradients over the iterations
    in the dtype in which they enter the loop. Entered in float32 and rounded inside, the parameters
    have the same values and their gradients are summed in float32.
    """

    def wide(leaf: Any) -> Any:
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if is_narrow else leaf

    def narrow(leaf: Any, like: Any) -> Any:
        return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)

    return jax.tree.map(wide, tree), lambda other: jax.tree.map(narrow, other, tree)
