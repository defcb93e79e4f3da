"""Norms over the last dimensions, in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.nn.config import NormConfig
from jaxlm.nn.linear import parameter
from jaxlm.nn.remat import recomputed


class Norm(nnx.Module):
    """RMS norm, x / sqrt(mean(x**2) + eps) x scale, or layer norm.

    Layer norm is (x - mean) / sqrt(var + eps) x scale + bias. The mean is over all of the last
    dimensions in `dims`, which maps logical axes to sizes.
    """

    def __init__(self, dims: dict[str, int], config: NormConfig, *, dtype: jnp.dtype):
        self.config, shape = config, tuple(dims.values())
        self.scale = parameter(jnp.full(shape, 1 - config.offset, dtype), *dims)
        self.bias = parameter(jnp.zeros(shape, dtype), *dims) if config.bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize, in the dtype of `x`. Only `x` is stored for the backward pass."""
        return recomputed(self._normalize)(x)

    def _normalize(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32)
        axes = tuple(range(-scale.ndim, 0))
        if self.config.kind == "layer":
            y = y - jnp.mean(y, axis=axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axes, keepdims=True) + self.config.eps)
        shape = (1,) * (x.ndim - scale.ndim) + scale.shape
        if self.config.offset:
            scale = scale + self.config.offset
        y = y * scale.reshape(shape)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32).reshape(shape)
        return y.astype(x.dtype)
