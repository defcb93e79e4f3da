"""Norms over the last axis, in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.nn.config import NormConfig
from jaxlm.nn.parameter import parameter
from jaxlm.nn.remat import recomputed


class Norm(nnx.Module):
    """RMS norm: x / sqrt(mean(x**2) + eps) x scale. Layer norm: (x - mean) / sqrt(var + eps) x scale + bias."""

    def __init__(self, size: int, config: NormConfig, *, axis: str, dtype: jnp.dtype):
        self.config = config
        self.scale = parameter(jnp.ones((size,), dtype), axis)
        self.bias = parameter(jnp.zeros((size,), dtype), axis) if config.bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalised over the last axis; the dtype of `x` comes back. The backward pass keeps `x` alone."""
        return recomputed(self._normed)(x)

    def _normed(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = x.astype(jnp.float32)
        if self.config.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.config.eps)
        lift = (1,) * (x.ndim - 1) + (-1,)
        y = y * self.scale[...].astype(jnp.float32).reshape(lift)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32).reshape(lift)
        return y.astype(x.dtype)
