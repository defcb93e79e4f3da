"""Rotary position embedding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.core import backend


def angles(
    positions: Int[Array, "B T"],
    dims: int,
    theta: float,
    *,
    factors: tuple[float, ...] | None = None,
    amplitude: float = 1.0,
    beyond: tuple[int, tuple[float, ...]] | None = None,
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Return amplitude x cosine and sine of position x factors[i] x theta**(-2i / dims), float32.

    Args:
      positions: of the tokens in their documents.
      dims: rotated features; i is below h = dims / 2.
      theta: base of the frequencies.
      factors: multipliers of the frequencies; all 1 by default.
      amplitude: multiplier of cosine and sine.
      beyond: (p, factors of a document that has a position from p on).
    """
    plain = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    frequencies = plain if factors is None else plain * jnp.asarray(factors, jnp.float32)
    frequencies = frequencies[None, None]
    if beyond is not None:
        first, others = beyond
        longer = (plain * jnp.asarray(others, jnp.float32))[None, None]
        is_beyond = (_last_position(positions) >= first)[..., None]
        frequencies = jnp.where(is_beyond, longer, frequencies)
    turns = positions[..., None].astype(jnp.float32) * frequencies
    cosine, sine = jnp.cos(turns), jnp.sin(turns)
    if backend.name() == "cpu":
        # XLA would compute both in each of the four products of `rotate`, for every head.
        cosine, sine = jax.lax.optimization_barrier((cosine, sine))
    return (cosine, sine) if amplitude == 1 else (amplitude * cosine, amplitude * sine)


def _last_position(positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the last position of each slot's document; a document ends before positions fall."""
    slots = jnp.arange(positions.shape[1], dtype=jnp.int32)
    is_last = jnp.pad(positions[:, 1:] < positions[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    ends = jax.lax.cummin(jnp.where(is_last, slots[None], slots.size), axis=1, reverse=True)
    return jnp.take_along_axis(positions, ends, axis=1)


def rotate(
    x: Float[Array, "B T N H"],
    cosine: Float[Array, "B T h"],
    sine: Float[Array, "B T h"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotate each pair by its angle, in float32; dimensions from 2h on are unchanged.

    Pairs are (x[i], x[i + h]), as in GPT-NeoX and most of Hugging Face, or if interleaved
    (x[2i], x[2i + 1]), as in the paper and DeepSeek. Interleaved pairs are returned in the order
    of the others, a permutation of channels that does not change scores.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    dims = 2 * cosine.shape[-1]
    wide = x[..., :dims].astype(jnp.float32)
    first, second = (
        (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    )
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    rest = (x[..., dims:],) if dims < x.shape[-1] else ()
    return jnp.concatenate((*(part.astype(x.dtype) for part in rotated), *rest), axis=-1)
