"""Quantization to llama.cpp's block formats; those of 256 numbers are searched for here.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c (`quantize_row_q4_K_ref`,
`quantize_row_q6_K_ref`), whose results differ only by the order of float32 sums. Free of JAX.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jaxlm.checkpoint.gguf_file import CHUNK, STORAGES, Storage, library

BY_NAME = {each.name: each for each in STORAGES.values()}
TINY = 1e-15  # a group without a larger magnitude is all 0
LARGEST = 1e9  # beyond every format; the squares of larger numbers would overflow
HALF = np.float16
PACKAGE = Path("--scheme")  # which needs it


def quantized(rows: Float[np.ndarray, "R N"], storage: Storage) -> UInt8[np.ndarray, "R B"]:
    """Return the bytes of rows, whose length the block of `storage` divides.

    Blocks of 32 numbers are made by the package gguf, and those of 256 here, as it cannot.

    Raises ValueError, with the reason, if a number is not finite or exceeds the format's range.
    """
    search = {"Q4_K": _q4_k, "Q6_K": _q6_k}.get(storage.name)
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
            made = search(part.reshape(-1, 256)) if search else gguf.quants.quantize(part, kind)
            made = made.reshape(len(part), -1)
            if not np.isfinite(dequantized(made, storage)).all():
                raise ValueError(f"it has numbers beyond the range of {storage.name}")
        out[first : first + step] = made
    return out


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


def _q4_k(blocks: Float[np.ndarray, "B 256"]) -> UInt8[np.ndarray, "B 144"]:
    """Return 8 groups a block: codes of 4 bits; scale and minimum of 6 bits, of the block's two."""
    count = len(blocks)
    groups = blocks.reshape(-1, 32)
    scales, lows = (each.reshape(count, 8) for each in _scale_and_low(groups, 15))
    (scale, short), (low, short_low) = (_shortened(each) for each in (scales, lows))
    step = scale.astype(np.float32) * short
    start = low.astype(np.float32) * short_low
    x = blocks.reshape(count, 8, 32) + start[..., None]
    codes = np.rint(np.divide(x, step[..., None], out=np.zeros_like(x), where=step[..., None] != 0))
    codes = np.clip(codes, 0, 15).astype(np.uint8).reshape(count, 4, 2, 32)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    bits, low_bits = short.astype(np.uint8), short_low.astype(np.uint8)
    fine = (
        bits[:, :4] | bits[:, 4:] >> 4 << 6,
        low_bits[:, :4] | low_bits[:, 4:] >> 4 << 6,
        bits[:, 4:] & 15 | (low_bits[:, 4:] & 15) << 4,
    )
    head = np.concatenate([scale.view(np.uint8), low.view(np.uint8)], 1)
    return np.concatenate([head, *fine, packed.reshape(count, -1)], 1)


def _shortened(values: Float[np.ndarray, "B 8"]) -> tuple[np.ndarray, np.ndarray]:
    """Return a scale in float16 for each block [B, 1], and its values in 6 bits."""
    largest = np.maximum(values.max(1, keepdims=True), np.float32(0))
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    return (largest / np.float32(63)).astype(HALF), np.minimum(np.rint(inverse * values), 63)


def _scale_and_low(
    x: Float[np.ndarray, "G 32"], top: int
) -> tuple[Float[np.ndarray, "G"], Float[np.ndarray, "G"]]:
    """Return scale and minimum of groups, negated, that give the smallest weighted square error.

    Codes 0 to `top` of 21 scales are tried, each with its best scale and minimum, at most 0.
    """
    weights = np.sqrt((x * x).mean(1, keepdims=True)) + np.abs(x)
    low, most = np.minimum(x.min(1), 0), x.max(1)
    is_flat = most == low
    sums, sums_x = weights.sum(1), (weights * x).sum(1)
    scale = (most - low) / np.float32(top)
    error = np.full(len(x), np.inf, np.float32)
    for nudge in (None, *range(21)):
        # From the best minimum so far, as llama.cpp does.
        tried = np.float32(top if nudge is None else -1 + 0.1 * nudge + top) / (most - low)
        codes = np.clip(np.rint(tried[:, None] * (x - low[:, None])), 0, top)
        weighted = weights * codes
        first, second, mixed = weighted.sum(1), (weighted * codes).sum(1), (weighted * x).sum(1)
        if nudge is None:
            new, start = scale, low
            is_better = np.ones(len(x), bool)
        else:
            spread = sums * second - first * first
            new = (sums * mixed - sums_x * first) / spread
            start = (second * sums_x - first * mixed) / spread
            new = np.where(start > 0, mixed / second, new)
            start = np.minimum(start, 0)
            is_better = spread > 0
        total = (weights * (new[:, None] * codes + start[:, None] - x) ** 2).sum(1)
        is_better &= total < error
        is_better &= ~is_flat
        scale, low = np.where(is_better, new, scale), np.where(is_better, start, low)
        error = np.where(is_better, total, error)
    return np.where(is_flat, 0, scale), -low


def _q6_k(blocks: Float[np.ndarray, "B 256"]) -> UInt8[np.ndarray, "B 210"]:
    """Return 16 groups a block: codes of 6 bits, and a scale of 8 bits, of the block's one."""
    count = len(blocks)
    scales = _scale(blocks.reshape(-1, 16), 32).reshape(count, 16)
    place = np.abs(scales).argmax(1)[:, None]
    largest = np.take_along_axis(scales, place, 1)
    is_zero = np.abs(largest) < TINY
    inverse = np.where(is_zero, 0, np.float32(-128) / largest)
    scale = np.where(is_zero, 0, 1 / inverse).astype(HALF)
    short = np.minimum(np.rint(inverse * scales), 127)
    step = (scale.astype(np.float32) * short)[..., None]
    x = blocks.reshape(count, 16, 16)
    codes = np.rint(np.divide(x, step, out=np.zeros_like(x), where=step != 0))
    codes = (np.clip(codes, -32, 31) + 32).astype(np.uint8).reshape(count, 2, 4, 32)
    codes[is_zero[:, 0]] = 0
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(codes >> 4 << shifts, 2)
    parts = [low, high, short.astype(np.int8).view(np.uint8), scale.view(np.uint8)]
    return np.concatenate([part.reshape(count, -1) for part in parts], 1)


def _scale(x: Float[np.ndarray, "G 16"], half: int) -> Float[np.ndarray, "G"]:
    """Return the scale of groups with the smallest square error, weighted by the squares.

    Codes -`half` to `half` - 1 of 19 scales are tried, each with its best scale.
    """
    place = np.abs(x).argmax(1)[:, None]
    largest = np.take_along_axis(x, place, 1)
    weights = x * x
    scale, best = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for nudge in (0, *range(-9, 0), *range(1, 10)):
        codes = np.clip(np.rint(-np.float32(half + 0.1 * nudge) / largest * x), -half, half - 1)
        weighted = weights * codes
        mixed, second = (weighted * x).sum(1), (weighted * codes).sum(1)
        is_better = (second > 0) & (mixed * mixed > best * second)
        scale = np.where(is_better, mixed / second, scale)
        best = np.where(is_better, scale * mixed, best)
    return np.where(np.abs(largest[:, 0]) < TINY, 0, scale)
