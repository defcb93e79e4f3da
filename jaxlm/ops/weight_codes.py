"""Weights stored in four or eight bits: blocks of codes, each with a scale."""

import dataclasses
import itertools
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxlm.ops import quantize
from jaxlm.ops.kernels import SCALES_BLOCK

Base = Literal["nf4", "nf4_double", "int8", "int4", "int4_zero", "fp8", "w8a8", "w4a8"]
Block = int | Literal["all"]
Leaves = dict[str, Array]  # by name: codes, scales and, by format, `zeros` or two more of scales
BYTE_CODES = (
    "int8",
    "fp8",
    "w8a8",
)  # formats with a byte for each code; others have two codes in it
E4M3 = quantize.E4M3._replace(has_scales=True)  # for the blocks of a weight

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
    4.127 bits with blocks of 64 (arXiv:2305.14314, section 3; the 8 bits are floats there). fp8 is
    e4m3. int4 is symmetric, from -7 to 7; int4_zero has 16 codes between the least and the largest
    number of a block, 0 among them, and the code of 0 in a byte of its own. w8a8 and w4a8 are int8
    and int4 with one block, whose products `ops.integer_product` has of integers.

    Attributes:
      base: the format of codes and scales.
      block: inputs of one output that share a scale, or all; the last block may be shorter.
    """

    base: Base
    block: Block

    def quantize(self, weight: Float[Array, "I ..."]) -> Leaves:
        """Return codes and scales of a weight whose first axis is its inputs.

        Returns:
          `codes`: uint8 [ceil(I / 2), ...], two codes a byte, the first in the lower four bits; of
          int8 and fp8, one of its dtype for each input. `scales`: float32 or int8 [blocks, ...].
          With double quantization also `scale_scales`: float32 [ceil(scales / 256)], and
          `scale_mean`: float32 []; with int4_zero `zeros`: uint8 [blocks, ...].
        """
        inputs, outs = weight.shape[0], weight.shape[1:]
        size = self._block(inputs)
        count = -(-inputs // size)
        filling = [(0, count * size - inputs)] + [(0, 0)] * len(outs)
        blocks = jnp.pad(weight.astype(jnp.float32), filling)
        blocks = blocks.reshape(count, size, *outs)
        if self.base in BYTE_CODES:
            format = E4M3 if self.base == "fp8" else quantize.INT8
            low, scale = quantize.rounded(blocks, format, (1,))
            return {"codes": low.reshape(-1, *outs)[:inputs], "scales": scale[:, 0]}
        if self.base in ("int4", "int4_zero", "w4a8"):
            return self._in_four_bits(blocks, inputs)
        largest = jnp.max(jnp.abs(blocks), 1)
        # XLA multiplies by the reciprocal, which is no normal number if the divisor is above 2^126.
        shrink = jnp.where(largest > 2.0**120, 2.0**-20, 1.0)
        divisor = jnp.where(largest == 0, 1.0, largest * shrink)
        unit = (blocks * shrink[:, None] / divisor[:, None]).reshape(-1, *outs)
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

    def _block(self, inputs: int) -> int:
        return inputs if self.block == "all" else self.block

    def _in_four_bits(self, blocks: Float[Array, "G B ..."], inputs: int) -> Leaves:
        """Return the leaves of integers of 4 bits; codes are from 0 to 15."""
        outs = blocks.shape[2:]
        if self.base != "int4_zero":
            largest = jnp.max(jnp.abs(blocks), 1)
            scale, zero = largest / 7, jnp.full(largest.shape, 8.0)
        else:
            least = jnp.minimum(jnp.min(blocks, 1), 0.0)
            scale = (jnp.maximum(jnp.max(blocks, 1), 0.0) - least) / 15
            zero = jnp.round(-least / jnp.where(scale == 0, 1.0, scale))
        unit = blocks / jnp.where(scale == 0, 1.0, scale)[:, None]
        codes = jnp.clip(jnp.round(unit) + zero[:, None], 0, 15).astype(jnp.uint8)
        leaves = {"codes": _pack(codes.reshape(-1, *outs)[:inputs]), "scales": scale}
        return leaves | ({"zeros": zero.astype(jnp.uint8)} if self.base == "int4_zero" else {})

    def dequantize(self, leaves: Leaves, inputs: int) -> Float[Array, "I ..."]:
        """Return the weight of `inputs` inputs in float32."""
        leaves = self.with_float_scales(leaves)
        codes, scales = leaves["codes"], leaves["scales"]
        size = self._block(inputs)
        if self.base in BYTE_CODES:
            values = codes.astype(jnp.float32)
        elif self.base in ("nf4", "nf4_double"):
            values = _level(_unpack(codes))[:inputs]
        else:
            values = _unpack(codes)[:inputs].astype(jnp.float32)
            zeros = leaves.get("zeros")
            values -= 8.0 if zeros is None else _repeated(zeros.astype(jnp.float32), size, inputs)
        return values * _repeated(scales, size, inputs)

    def with_float_scales(self, leaves: Leaves) -> Leaves:
        """Return the leaves with float32 scales; only those of nf4_double have others."""
        if "scale_scales" not in leaves:
            return leaves
        scales = leaves["scales"]
        scale = _repeated(leaves["scale_scales"], SCALES_BLOCK, scales.size)
        # The product is rounded before the sum, as in any other program: no fused multiply-add.
        scales = lax.optimization_barrier(scales.astype(jnp.float32) * scale.reshape(scales.shape))
        # A rounded scale near 0 must not change the sign of its block.
        return {"codes": leaves["codes"], "scales": jnp.maximum(scales + leaves["scale_mean"], 0.0)}


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
