"""Weights stored in four or eight bits: blocks of codes, each with a scale."""

import dataclasses
import itertools
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxlm.ops import quantize
from jaxlm.ops.kernels import SCALES_BLOCK

Base = Literal["nf4", "nf4_double", "int8"]
Leaves = dict[str, Array]  # by name: codes, scales and, of doubly quantized scales, two more

# Quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, arXiv:2305.14314,
# appendix E).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A format of weights: nf4 has 4 + 32 / block bits each, int8 has 8 + 32 / block.

    nf4_double stores the scales, less their mean, as int8 with a float32 scale for 256 of them:
    4.127 bits with blocks of 64 (arXiv:2305.14314, section 3; the 8 bits are floats there).

    Attributes:
      base: the format of codes and scales.
      block: inputs of one output that share a scale; the last block may be shorter.
    """

    base: Base
    block: int

    def quantize(self, weight: Float[Array, "I ..."]) -> Leaves:
        """Return codes and scales of a weight whose first axis is its inputs.

        Returns:
          `codes`: uint8 [ceil(I / 2), ...], two codes a byte, the first in the lower four bits; of
          int8, int8 [I, ...]. `scales`: float32 or int8 [blocks, ...]. With double quantization
          also `scale_scales`: float32 [ceil(scales / 256)], and `scale_mean`: float32 [].
        """
        inputs, outs = weight.shape[0], weight.shape[1:]
        count = -(-inputs // self.block)
        filling = [(0, count * self.block - inputs)] + [(0, 0)] * len(outs)
        blocks = jnp.pad(weight.astype(jnp.float32), filling)
        blocks = blocks.reshape(count, self.block, *outs)
        if self.base == "int8":
            low, scale = quantize.rounded(blocks, quantize.INT8, (1,))
            return {"codes": low.reshape(-1, *outs)[:inputs], "scales": scale[:, 0]}
        largest = jnp.max(jnp.abs(blocks), 1)
        unit = (blocks / jnp.where(largest == 0, 1.0, largest)[:, None]).reshape(-1, *outs)
        codes = _pack(_nearest_level(unit[:inputs]))
        if self.base == "nf4":
            return {"codes": codes, "scales": largest}
        mean = jnp.mean(largest)
        rows = -(-largest.size // SCALES_BLOCK)
        flat = jnp.pad((largest - mean).reshape(-1), (0, rows * SCALES_BLOCK - largest.size))
        low, scale = quantize.rounded(flat.reshape(rows, SCALES_BLOCK), quantize.INT8, (1,))
        return {
            "codes": codes,
            "scales": low.reshape(-1)[: largest.size].reshape(largest.shape),
            "scale_scales": scale[:, 0],
            "scale_mean": mean,
        }

    def dequantize(self, leaves: Leaves, inputs: int) -> Float[Array, "I ..."]:
        """Return the weight of `inputs` inputs in float32."""
        codes, scales = leaves["codes"], leaves["scales"]
        if self.base == "nf4_double":
            scale = _repeated(leaves["scale_scales"], SCALES_BLOCK, scales.size)
            scales = scales.astype(jnp.float32) * scale.reshape(scales.shape)
            # A rounded scale near 0 must not change the sign of its block.
            scales = jnp.maximum(scales + leaves["scale_mean"], 0.0)
        values = codes.astype(jnp.float32) if self.base == "int8" else _level(_unpack(codes))
        return values[:inputs] * _repeated(scales, self.block, inputs)


def _repeated(rows: Array, times: int, count: int) -> Array:
    """Return each row `times` times, `count` rows in all."""
    if count % times == 0:
        return jnp.repeat(rows, times, 0)
    # A mesh would split the rows past the last one too, and then move others.
    return jnp.take(rows, jnp.arange(count) // times, axis=0, mode="clip")


def _nearest_level(unit: Array) -> Array:
    """Return the number of the level nearest to each element of [-1, 1], as uint8."""
    codes = jnp.zeros(unit.shape, jnp.uint8)
    for low, high in itertools.pairwise(LEVELS):
        codes += (unit > (low + high) / 2).astype(jnp.uint8)
    return codes


def _level(codes: Array) -> Array:
    """Return the level of each code."""
    # A selection of constants would be moved out of a scan over layers, as arrays of their size.
    return jnp.take(jnp.array(LEVELS, jnp.float32), codes, axis=0, mode="clip")


def _pack(codes: Array) -> Array:
    rows, outs = codes.shape[0], codes.shape[1:]
    pairs = jnp.pad(codes, [(0, rows % 2)] + [(0, 0)] * len(outs)).reshape(-1, 2, *outs)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _unpack(packed: Array) -> Array:
    pairs = jnp.stack([packed & 15, packed >> 4], 1)
    return pairs.reshape(2 * packed.shape[0], *packed.shape[1:])
