"""Norms over the last dimensions, in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.nn.config import NormConfig
from jaxlm.nn.linear import parameter
from jaxlm.nn.remat import recomputed


class Norm(nnx.Module):
    """RMS norm: x / sqrt(mean(x**2) + eps) x scale. Layer norm: (x - mean) / sqrt(var + eps) x scale + bias.

    `dims` are the (logical axis, size) pairs of the last dimensions, over which together it is taken.
    """

    def __init__(self, dims: dict[str, int], config: NormConfig, *, dtype: jnp.dtype):
        self.config, shape = config, tuple(dims.values())
        self.scale = parameter(jnp.full(shape, 1 - config.offset, dtype), *dims)
        self.bias = parameter(jnp.zeros(shape, dtype), *dims) if config.bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalised over the last dimensions; the dtype of `x` comes back. The backward pass keeps `x` alone."""
        return recomputed(self._normed)(x)

    def _normed(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32)
        over = tuple(range(-scale.ndim, 0))
        if self.config.kind == "layer":
            y = y - jnp.mean(y, axis=over, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=over, keepdims=True) + self.config.eps)
        lift = (1,) * (x.ndim - scale.ndim) + scale.shape
        if self.config.offset:
            scale = scale + self.config.offset
        y = y * scale.reshape(lift)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32).reshape(lift)
        return y.astype(x.dtype)
