"""Rotary position embedding."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Pairs = Literal["halves", "neighbours"]


def angles(
    positions: Int[Array, "B T"],
    dims: int,
    theta: float,
    *,
    factors: tuple[float, ...] | None = None,
    amplitude: float = 1.0,
    beyond: tuple[int, tuple[float, ...]] | None = None,
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """amplitude x cosine and sine of position x factors[i] x theta**(-2i / dims), for i below h = dims / 2, in float32.

    With `beyond` = (p, others), a document that has a position from p on has those factors.
    """
    plain = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    frequencies = plain if factors is None else plain * jnp.asarray(factors, jnp.float32)
    frequencies = frequencies[None, None]
    if beyond is not None:
        first, others = beyond
        longer = (plain * jnp.asarray(others, jnp.float32))[None, None]
        is_beyond = (_farthest(positions) >= first)[..., None]
        frequencies = jnp.where(is_beyond, longer, frequencies)
    turns = positions[..., None].astype(jnp.float32) * frequencies
    cosine, sine = jnp.cos(turns), jnp.sin(turns)
    return (cosine, sine) if amplitude == 1 else (amplitude * cosine, amplitude * sine)


def _farthest(positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The last position of the document that each slot is in: documents of a row are where positions do not fall."""
    slots = jnp.arange(positions.shape[1], dtype=jnp.int32)
    is_last = jnp.pad(positions[:, 1:] < positions[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    ends = jax.lax.cummin(jnp.where(is_last, slots[None], slots.size), axis=1, reverse=True)
    return jnp.take_along_axis(positions, ends, axis=1)


def rotate(
    x: Float[Array, "B T N H"],
    cosine: Float[Array, "B T h"],
    sine: Float[Array, "B T h"],
    *,
    pairs: Pairs = "halves",
) -> Float[Array, "B T N H"]:
    """Turns each pair by its angle, in float32; dimensions from 2h on stay as they are.

    Pairs are (x[i], x[i + h]), halves, as in GPT-NeoX and most of Hugging Face, or (x[2i], x[2i + 1]), neighbours, as in
    the paper and DeepSeek. The two differ by a permutation of channels, which scores do not feel: neighbours come back
    as halves too, first the first of each.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    dims = 2 * cosine.shape[-1]
    wide = x[..., :dims].astype(jnp.float32)
    first, second = (
        jnp.split(wide, 2, axis=-1) if pairs == "halves" else (wide[..., 0::2], wide[..., 1::2])
    )
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    kept = (x[..., dims:],) if dims < x.shape[-1] else ()
    return jnp.concatenate((*(part.astype(x.dtype) for part in turned), *kept), axis=-1)
