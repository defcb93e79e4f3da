"""Quantization to llama.cpp's block formats: those of 256 numbers, and all by importance, are here.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c (`quantize_row_q4_K_ref`,
`quantize_row_q6_K_ref`), whose results differ only by the order of float32 sums. Free of JAX.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jaxlm.checkpoint.gguf_file import CHUNK, STORAGES, Storage, library
from jaxlm.checkpoint.gguf_search import COARSE, FINE, TINY, scale, scale_and_low

BY_NAME = {each.name: each for each in STORAGES.values()}
LARGEST = 1e9  # beyond every format; the squares of larger numbers would overflow
HALF = np.float16
PACKAGE = Path("--scheme")  # which needs it


def quantized(
    rows: Float[np.ndarray, "R N"],
    storage: Storage,
    importance: Float[np.ndarray, "N"] | None = None,
) -> UInt8[np.ndarray, "R B"]:
    """Return the bytes of rows, whose length the block of `storage` divides.

    With the importance of each number of a row, scales are searched here for the smallest sum of
    importance times square error. Without it, blocks of 32 numbers are made by the package gguf.

    Args:
      rows: the numbers.
      storage: the format; Q8_0 has no search, and ignores the importance.
      importance: above 0, with a mean of 1, the same for all rows; None if all are equal.

    Raises ValueError, with the reason, if a number is not finite or exceeds the format's range.
    """
    gguf = library("quantizing", PACKAGE)
    kind = gguf.GGMLQuantizationType[storage.name]
    out = np.empty((len(rows), rows.shape[1] // storage.numbers * storage.bytes), np.uint8)
    step = max(1, CHUNK // rows.shape[1])
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step], np.float32)
        if not np.isfinite(part).all():
            raise ValueError("it has numbers that are not finite")
        if np.abs(part).max() > LARGEST:
            raise ValueError(f"it has numbers beyond the range of {storage.name}")
        # The reciprocal of a tiny scale is infinite; the scale itself is then rounded to 0.
        with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
            if storage.numbers == 256 or (importance is not None and is_searched(storage)):
                made = _searched(part, storage, importance)
            else:
                made = gguf.quants.quantize(part, kind)
            made = made.reshape(len(part), -1)
            if not np.isfinite(dequantized(made, storage)).all():
                raise ValueError(f"it has numbers beyond the range of {storage.name}")
        out[first : first + step] = made
    return out


def is_searched(storage: Storage) -> bool:
    """Return True if scales of the blocks depend on the importance of numbers."""
    return storage.numbers == 256 or storage.name in FOUR_OR_FIVE


def _searched(
    rows: Float[np.ndarray, "R N"], storage: Storage, importance: Float[np.ndarray, "N"] | None
) -> UInt8[np.ndarray, "B bytes"]:
    """Return the bytes of the blocks of rows, with scales of the smallest weighted error."""
    blocks = rows.reshape(-1, storage.numbers)
    weights = None
    if importance is not None:
        all_weights = np.broadcast_to(importance.astype(np.float32), rows.shape)
        weights = all_weights.reshape(blocks.shape)
    if storage.name == "Q4_K":
        return _q4_k(blocks, weights)
    if storage.name == "Q6_K":
        return _q6_k(blocks, weights)
    assert weights is not None
    return _of_32(blocks, weights, FOUR_OR_FIVE[storage.name])


class CodeSteps(NamedTuple):
    """The steps of rows of known codes: number = scale (code - zero), in float32.

    Attributes:
      scales: of the blocks of a row, [R, G]; a block has the same count of numbers in each row.
      zeros: the codes of 0, [R, G]; None if all are 0.
    """

    scales: np.ndarray
    zeros: np.ndarray | None


def with_codes(
    rows: Float[np.ndarray, "R N"], steps: CodeSteps, storage: Storage
) -> UInt8[np.ndarray, "R B"]:
    """Return the bytes of rows in Q8_0, Q4_0 or Q4_1 that keep their codes; 32 divides a block.

    Scales, and of Q4_1 the numbers of code 0, are rounded to float16.

    Raises ValueError, with the reason, if one exceeds the range of float16.
    """
    wide = rows.shape[1] // 32 // steps.scales.shape[1]
    scales = np.repeat(steps.scales, wide, 1)[..., None].astype(np.float32)
    numbers = rows.reshape(len(rows), -1, 32).astype(np.float32)
    codes = np.rint(np.divide(numbers, scales, out=np.zeros_like(numbers), where=scales != 0))
    head = [scales]
    if storage.name == "Q4_1":
        assert steps.zeros is not None
        zeros = np.repeat(steps.zeros, wide, 1)[..., None].astype(np.float32)
        codes, head = codes + zeros, [scales, -scales * zeros]
    with np.errstate(over="ignore"):
        halves = np.concatenate(head, -1).astype(HALF)
    if not np.isfinite(halves).all():
        raise ValueError(f"it has scales beyond the range of {storage.name}")
    if storage.name == "Q8_0":
        packed = codes.astype(np.int8).view(np.uint8)
    else:
        codes = (codes + (8 if storage.name == "Q4_0" else 0)).astype(np.uint8)
        packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([halves.view(np.uint8), packed], -1).reshape(len(rows), -1)


def dequantized(rows: UInt8[np.ndarray, "R B"], storage: Storage) -> Float[np.ndarray, "R N"]:
    """Return the float32 numbers of rows of bytes."""
    gguf = library("quantizing", PACKAGE)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[storage.name])


class BlocksOf32(NamedTuple):
    """The bits of a code, and whether a block has a minimum as well as a scale."""

    bits: int
    has_low: bool


FOUR_OR_FIVE = {
    "Q4_0": BlocksOf32(4, has_low=False),
    "Q4_1": BlocksOf32(4, has_low=True),
    "Q5_0": BlocksOf32(5, has_low=False),
    "Q5_1": BlocksOf32(5, has_low=True),
}


def _of_32(
    x: Float[np.ndarray, "B 32"], weights: Float[np.ndarray, "B 32"], form: BlocksOf32
) -> UInt8[np.ndarray, "B bytes"]:
    """Return the scale of a block, its minimum if it has one, fifth bits, and the lower four."""
    bits = form.bits
    if form.has_low:
        step, low = scale_and_low(x, weights, 2**bits - 1, FINE)
        halves = np.stack([step, -low], 1).astype(HALF)
        start = halves[:, 1:].astype(np.float32)
    else:
        half = 2 ** (bits - 1)
        halves = scale(x, weights, half)[:, None].astype(HALF)
        start = -half * halves.astype(np.float32)
    codes = _codes(x - start, halves[:, :1].astype(np.float32), 2**bits - 1)
    packed = codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4
    fifth = [np.packbits(codes >> 4, axis=1, bitorder="little")] if bits == 5 else []
    return np.concatenate([halves.view(np.uint8), *fifth, packed], 1)


def _codes(x: np.ndarray, steps: np.ndarray, top: int) -> np.ndarray:
    """Return the nearest of 0 to `top` steps, in bytes; 0 where the step is 0."""
    codes = np.rint(np.divide(x, steps, out=np.zeros_like(x), where=steps != 0))
    return np.clip(codes, 0, top).astype(np.uint8)


def _q4_k(
    blocks: Float[np.ndarray, "B 256"], weights: Float[np.ndarray, "B 256"] | None
) -> UInt8[np.ndarray, "B 144"]:
    """Return 8 groups a block: codes of 4 bits; scale and minimum of 6 bits, of the block's two."""
    count = len(blocks)
    groups = blocks.reshape(-1, 32)
    if weights is None:
        sizes = np.sqrt((groups * groups).mean(1, keepdims=True)) + np.abs(groups)
        pairs = scale_and_low(groups, sizes, 15, COARSE)
    else:
        pairs = scale_and_low(groups, weights.reshape(-1, 32), 15, FINE)
    scales, lows = (each.reshape(count, 8) for each in pairs)
    (step, short), (low, short_low) = (_shortened(each) for each in (scales, lows))
    steps = step.astype(np.float32) * short
    start = low.astype(np.float32) * short_low
    codes = _codes(blocks.reshape(count, 8, 32) + start[..., None], steps[..., None], 15)
    codes = codes.reshape(count, 4, 2, 32)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    bits, low_bits = short.astype(np.uint8), short_low.astype(np.uint8)
    fine = (
        bits[:, :4] | bits[:, 4:] >> 4 << 6,
        low_bits[:, :4] | low_bits[:, 4:] >> 4 << 6,
        bits[:, 4:] & 15 | (low_bits[:, 4:] & 15) << 4,
    )
    head = np.concatenate([step.view(np.uint8), low.view(np.uint8)], 1)
    return np.concatenate([head, *fine, packed.reshape(count, -1)], 1)


def _shortened(values: Float[np.ndarray, "B 8"]) -> tuple[np.ndarray, np.ndarray]:
    """Return a scale in float16 for each block [B, 1], and its values in 6 bits."""
    largest = np.maximum(values.max(1, keepdims=True), np.float32(0))
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    return (largest / np.float32(63)).astype(HALF), np.minimum(np.rint(inverse * values), 63)


def _q6_k(
    blocks: Float[np.ndarray, "B 256"], weights: Float[np.ndarray, "B 256"] | None
) -> UInt8[np.ndarray, "B 210"]:
    """Return 16 groups a block: codes of 6 bits, and a scale of 8 bits, of the block's one."""
    count = len(blocks)
    groups = blocks.reshape(-1, 16)
    sizes = groups * groups if weights is None else weights.reshape(-1, 16)
    scales = scale(groups, sizes, 32).reshape(count, 16)
    place = np.abs(scales).argmax(1)[:, None]
    largest = np.take_along_axis(scales, place, 1)
    is_zero = np.abs(largest) < TINY
    inverse = np.where(is_zero, 0, np.float32(-128) / largest)
    whole = np.where(is_zero, 0, 1 / inverse).astype(HALF)
    short = np.minimum(np.rint(inverse * scales), 127)
    step = (whole.astype(np.float32) * short)[..., None]
    x = blocks.reshape(count, 16, 16)
    codes = np.rint(np.divide(x, step, out=np.zeros_like(x), where=step != 0))
    codes = (np.clip(codes, -32, 31) + 32).astype(np.uint8).reshape(count, 2, 4, 32)
    codes[is_zero[:, 0]] = 0
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(codes >> 4 << shifts, 2)
    parts = [low, high, short.astype(np.int8).view(np.uint8), whole.view(np.uint8)]
    return np.concatenate([part.reshape(count, -1) for part in parts], 1)
