"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def angles(
    positions: Int[Array, "B T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Cosine and sine of position x theta**(-2i / head_dim), for i below h = head_dim / 2, in float32."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    turns = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.cos(turns), jnp.sin(turns)


def rotate(
    x: Float[Array, "B T N H"], cosine: Float[Array, "B T h"], sine: Float[Array, "B T h"]
) -> Float[Array, "B T N H"]:
    """Turns each pair (x[i], x[i + H/2]) by its angle, in float32.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; the halves are paired as in GPT-NeoX and Hugging Face, not
    neighbours as in the paper. The two differ by a permutation of the head's channels.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = jnp.concatenate(
        (first * cosine - second * sine, second * cosine + first * sine), axis=-1
    )
    return turned.astype(x.dtype)
