"""Initial weights, by the schemes of the papers."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.precision import Precision


@dataclasses.dataclass(frozen=True)
class Initializer:
    """Distribution of a model's initial weights, and the precision of its layers.

    - `normal`: N(0, std), as in public training codes for Llama; its papers do not state it.
    - `gpt2`: the same, divided by sqrt(2 depth) in projections that end on the residual stream
      (Radford et al. 2019, section 2.3, read as in nanoGPT: two of them a layer).
    - `xavier`: variance 2 / (ins + outs) (Glorot & Bengio 2010, equation 16, as a normal).
    - `he`: variance 2 / ins (He et al. 2015, arXiv:1502.01852, equation 10).

    Embeddings are N(0, std) in all schemes. `width_ratio` is the width over the one that std was
    tuned at: `normal` and `gpt2` divide the variance by it (muP; Yang et al. 2022,
    arXiv:2203.03466, table 8). Layers compute with the `precision`. `ends` is the place
    where the outputs of a layer end: inside of a block, on the residual stream, or outside of both,
    as a router's; there only the input has the width, and the deviation is divided by the ratio.
    """

    scheme: Literal["gpt2", "normal", "xavier", "he"]
    std: float
    depth: int
    precision: Precision
    width_ratio: float = 1.0
    ends: Literal["inside", "residual", "outside"] = "inside"

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights."""
        return self.precision.params

    @property
    def exact(self) -> "Initializer":
        """The initializer of a layer without rounded products."""
        return dataclasses.replace(self, precision=self.precision.exact)

    @property
    def residual(self) -> "Initializer":
        """The initializer of a layer whose outputs are added to the residual stream."""
        return dataclasses.replace(self, ends="residual")

    def weight(self, key: Array, shape: tuple[int, int]) -> Array:
        """Return an [ins, outs] matrix."""
        ins, outs = shape
        scaled = self.std / self.width_ratio ** (1.0 if self.ends == "outside" else 0.5)
        std = {
            "normal": scaled,
            "gpt2": scaled / (math.sqrt(2 * self.depth) if self.ends == "residual" else 1.0),
            "xavier": math.sqrt(2 / (ins + outs)),
            "he": math.sqrt(2 / ins),
        }[self.scheme]
        return self._normal(key, shape, std)

    def table(self, key: Array, shape: tuple[int, int]) -> Array:
        """Return an embedding table."""
        return self._normal(key, shape, self.std)

    def _normal(self, key: Array, shape: tuple[int, ...], std: float) -> Array:
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(self.dtype)
