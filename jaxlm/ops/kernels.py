"""Choice of the attention kernel, with the reason. Free of JAX, so that configs need no JAX."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jaxlm.core.nearest import divisors
from jaxlm.core.precision_config import ITEM_BYTES, Float
from jaxlm.monitor import formatting

Kernel = Literal["reference", "blockwise", "ring", "splash", "cudnn"]
KernelSetting = Literal["auto", "reference", "blockwise", "splash", "cudnn"]

BLOCK = 256  # queries and keys of a block: the best of 128 to 1024 on a CPU, see scripts/LOG.md
BLOCKWISE_FROM = 2 * BLOCK
SCALES_BLOCK = 256  # scales of a quantized weight that share a scale of their own
INTEGERS = ("w8a8", "w4a8")  # formats of weights whose products have integer operands
LANES = 128  # of a TPU's vector unit: splash attention needs a multiple of it
PLATFORMS: dict[Kernel, str] = {"splash": "tpu", "cudnn": "gpu"}  # of kernels bound to one
MASK_BYTES = 256 * 2**20  # largest mask of one call of cuDNN; above it, fewer rows a call
# Compute capabilities from which cuDNN has flash attention, and wider heads.
AMPERE, HOPPER = 8.0, 9.0


class Target(NamedTuple):
    """The device that a program is compiled for."""

    platform: str  # cpu, gpu or tpu
    capability: float | None = None  # compute capability of an NVIDIA GPU; None for all else


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The attention of a layer on one device, over whole rows."""

    rows: int
    length: int
    head_dim: int  # the larger one if keys and values differ in size
    compute: Float  # dtype of the products' operands
    softcap: float | None = None
    dropout: float = 0.0  # of the attention weights
    stages: int = 1  # of a pipeline, over which the layers are mapped
    has_bias: bool = False  # of the scores
    both_ways: bool = False  # some queries see later keys, by `Mask.visible_until`
    leading: int = 0  # keys of virtual tokens before each row


class KernelChoice(NamedTuple):
    """A kernel, and the reason in words."""

    kernel: Kernel
    reason: str


class Misfit(NamedTuple):
    """A reason why a kernel cannot compute something, and a setting that changes it, if any."""

    why: str
    fix: str | None = None


def choose(setting: KernelSetting, target: Target, work: AttentionWork) -> KernelChoice:
    """Return the kernel that the setting names, capable or not; for auto the best capable one."""
    if setting != "auto":
        return KernelChoice(setting, f"set by train.attention{_mask_cost(setting, work)}")
    excluded = ""
    for kernel, platform in PLATFORMS.items():
        if platform != target.platform:
            continue
        why = [misfit.why for misfit in misfits(kernel, target, work)]
        if kernel == "cudnn" and not why and mask_bytes(work) > MASK_BYTES:
            size, most = formatting.size(mask_bytes(work)), formatting.size(MASK_BYTES)
            why = [f"the mask of segments of one row would be {size}, above {most}"]
        if not why:
            cost = _mask_cost(kernel, work)
            return KernelChoice(kernel, f"the kernel for a {target.platform}{cost}")
        excluded += f"; {kernel} not: {', '.join(why)}"
    if work.dropout:
        return KernelChoice("reference", f"no other kernel has attention dropout{excluded}")
    if work.has_bias:
        return KernelChoice("reference", f"no other kernel adds a bias to scores{excluded}")
    if work.length < BLOCKWISE_FROM:
        reason = f"rows of {work.length} tokens are shorter than two blocks of {BLOCK}"
        return KernelChoice("reference", reason + excluded)
    reason = f"rows of {work.length} tokens, {BLOCK} queries and keys at a time"
    return KernelChoice("blockwise", reason + excluded)


def misfits(kernel: Kernel, target: Target, work: AttentionWork) -> Iterator[Misfit]:
    """Yield the reasons why a kernel cannot compute this; none if it can."""
    platform = PLATFORMS.get(kernel)
    if platform is not None and platform != target.platform:
        yield Misfit(f"it is for a {platform}, and this is a {target.platform}")
    if kernel != "reference" and work.dropout:
        why = f"it has no attention dropout, and the rate is {work.dropout:g}"
        yield Misfit(why, "regularization.attention_dropout=0")
    if kernel != "reference" and work.has_bias:
        yield Misfit("it adds no bias to scores, and this model has relative positions")
    if platform is not None and work.leading:
        yield Misfit(f"it has no {work.leading} keys that all segments of a row see")
    if kernel == "splash":
        yield from _splash_misfits(work)
    if kernel == "cudnn" and platform == target.platform:
        yield from _cudnn_misfits(target, work)


def rows_at_a_time(rows: int, length: int, item_bytes: int) -> int:
    """Return the rows of one cuDNN call: the largest divisor whose mask fits `MASK_BYTES`.

    `rows` are those of a micro-batch on a device; `item_bytes` is the size of a number of the
    mask, which has the dtype of the products' operands.
    """
    most = max(MASK_BYTES // (item_bytes * length**2), 1)
    return max(each for each in divisors(rows) if each <= most)


def mask_bytes(work: AttentionWork) -> int:
    """Return the bytes of one cuDNN call's mask of segments, which all heads share."""
    item_bytes = ITEM_BYTES[work.compute]
    return item_bytes * rows_at_a_time(work.rows, work.length, item_bytes) * work.length**2


def _mask_cost(kernel: Kernel, work: AttentionWork) -> str:
    if kernel != "cudnn":
        return ""
    rows = rows_at_a_time(work.rows, work.length, ITEM_BYTES[work.compute])
    part = f", {rows} of {work.rows} rows at a time" if rows < work.rows else ""
    return f"; segments as a mask of {formatting.size(mask_bytes(work))} a device{part}"


def _splash_misfits(work: AttentionWork) -> Iterator[Misfit]:
    if work.both_ways:
        yield Misfit("its mask is the same for all rows, and these have bidirectional parts")
    if work.length % LANES:
        near = max(round(work.length / LANES), 1) * LANES
        why = f"rows of {work.length} tokens are not a multiple of {LANES}"
        yield Misfit(why, f"data.sequence={near}")
    if work.compute == "float16":
        yield Misfit("a TPU has no unit for float16", "precision.compute=bfloat16")


def _cudnn_misfits(target: Target, work: AttentionWork) -> Iterator[Misfit]:
    if target.capability is None:
        yield Misfit("it needs an NVIDIA GPU, and this GPU reports no compute capability")
        return
    if target.capability < AMPERE:
        yield Misfit(f"compute capability {target.capability} is below {AMPERE}")
    if work.compute == "float32":
        yield Misfit("it does not compute in float32", "precision.compute=bfloat16")
    most = 256 if target.capability >= HOPPER else 128
    if work.head_dim % 8 or work.head_dim > most:
        yield Misfit(f"heads of {work.head_dim} are not a multiple of 8 up to {most}")
    if work.softcap is not None:
        yield Misfit(f"it has no softcap, and this model caps scores at {work.softcap:g}")
    if work.stages > 1:
        why = "JAX 0.12 cannot map its mask over pipeline stages"
        yield Misfit(f"{why}, and mesh.pipe = {work.stages}")
    if work.length % 2:
        why = f"rows of {work.length} tokens are odd, and its mask needs an even length"
        yield Misfit(why, f"data.sequence={work.length + 1}")
