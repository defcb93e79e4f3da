"""Initial weights, by the schemes of the papers."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Initializer:
    """How a model's weights are drawn.

    - `normal`: N(0, std). Llama's papers do not say; this is what its public training codes use.
    - `gpt2`: the same, and projections that end on the residual stream divided by sqrt(2 depth)
      (Radford et al. 2019, section 2.3, read as in nanoGPT: two of them a layer).
    - `xavier`: variance 2 / (ins + outs) (Glorot & Bengio 2010, equation 16, as a normal).
    - `he`: variance 2 / ins (He et al. 2015, arXiv:1502.01852, equation 10).

    Embeddings are N(0, std) in all of them. Weights are drawn for a width that is `width_ratio` times one at which std is
    right: in `normal` and `gpt2` their variance is divided by it (Yang et al. 2022, arXiv:2203.03466, table 8). What has
    the width on its input alone, as a router has, is drawn `ends_outside` and its deviation divided by the ratio.
    """

    scheme: Literal["gpt2", "normal", "xavier", "he"]
    std: float
    depth: int
    dtype: jnp.dtype
    width_ratio: float = 1.0

    def weight(
        self,
        key: Array,
        shape: tuple[int, int],
        *,
        ends_on_residual: bool = False,
        ends_outside: bool = False,
    ) -> Array:
        """A [ins, outs] matrix."""
        ins, outs = shape
        own = self.std / self.width_ratio ** (1.0 if ends_outside else 0.5)
        std = {
            "normal": own,
            "gpt2": own / (math.sqrt(2 * self.depth) if ends_on_residual else 1.0),
            "xavier": math.sqrt(2 / (ins + outs)),
            "he": math.sqrt(2 / ins),
        }[self.scheme]
        return self._normal(key, shape, std)

    def table(self, key: Array, shape: tuple[int, int]) -> Array:
        """An embedding table."""
        return self._normal(key, shape, self.std)

    def _normal(self, key: Array, shape: tuple[int, ...], std: float) -> Array:
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(self.dtype)
