"""Which kernel computes attention, and why. Free of JAX, so that a config can be judged without it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jaxlm.core.divisors import divisors
from jaxlm.core.precision_config import ITEM_BYTES, Float
from jaxlm.monitor import formatting

Kernel = Literal["reference", "blockwise", "ring", "splash", "cudnn"]
Wanted = Literal["auto", "reference", "blockwise", "splash", "cudnn"]

BLOCK = 256  # queries, and keys, that meet at a time; the best of 128, 256, 512 and 1024 on a CPU, see scripts/LOG.md
BLOCKWISE_FROM = 2 * BLOCK
LANES = 128  # of a TPU's vector unit: splash attention cuts rows into multiples of it
PLATFORMS: dict[Kernel, str] = {"splash": "tpu", "cudnn": "gpu"}  # of the kernels that have one
MASK_BYTES = (
    256 * 2**20
)  # of the mask of one call of cuDNN: above it fewer rows are taken at a time
AMPERE, HOPPER = (
    8.0,
    9.0,
)  # compute capabilities from which cuDNN has flash attention, and wider heads


class Target(NamedTuple):
    """What a program is compiled for."""

    platform: str  # cpu, gpu or tpu
    capability: float | None = None  # the compute capability of an NVIDIA GPU; None for all else


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a layer's attention has to compute on one device: whole rows."""

    rows: int
    length: int
    head_dim: int  # the larger one where keys and values are of two sizes
    compute: Float  # dtype of the products' operands
    cap: float | None = None
    dropout: float = 0.0  # of the attention weights
    stages: int = 1  # of a pipeline, over which the layers are mapped
    has_bias: bool = False  # something is added to the scores
    both_ways: bool = False  # queries see keys after their own, as far as a number of each says


class Choice(NamedTuple):
    """A kernel, and the reason in words."""

    kernel: Kernel
    reason: str


class Misfit(NamedTuple):
    """Why a kernel cannot compute something, and the setting that would mend it, if one does."""

    why: str
    fix: str | None = None


def choose(wanted: Wanted, target: Target, work: Work) -> Choice:
    """The kernel for whole rows: the one that is asked for, whether or not it can, or the platform's own where it can."""
    if wanted != "auto":
        return Choice(wanted, f"as train.attention says{_price(wanted, work)}")
    fast: tuple[Kernel, ...] = tuple(
        kernel for kernel, platform in PLATFORMS.items() if platform == target.platform
    )
    told = ""
    for kernel in fast:
        why = [misfit.why for misfit in misfits(kernel, target, work)]
        if kernel == "cudnn" and not why and mask_bytes(work) > MASK_BYTES:
            held, most = formatting.size(mask_bytes(work)), formatting.size(MASK_BYTES)
            why = [f"the mask of segments of one row would be {held}, above {most}"]
        if not why:
            return Choice(kernel, f"a kernel made for a {target.platform}{_price(kernel, work)}")
        told += f"; {kernel} not: {', '.join(why)}"
    if work.dropout:
        return Choice("reference", f"the others have no attention dropout{told}")
    if work.has_bias:
        return Choice("reference", f"the others add no bias to scores{told}")
    if work.length < BLOCKWISE_FROM:
        says = f"rows of {work.length} tokens are not two blocks of {BLOCK}"
        return Choice("reference", f"{says}{told}")
    says = f"rows of {work.length} tokens, {BLOCK} queries and keys at a time"
    return Choice("blockwise", f"{says}{told}")


def misfits(kernel: Kernel, target: Target, work: Work) -> Iterator[Misfit]:
    """Why a kernel cannot compute this there; none where it can."""
    platform = PLATFORMS.get(kernel)
    if platform is not None and platform != target.platform:
        yield Misfit(f"it is for a {platform}, and this is a {target.platform}")
    if kernel != "reference" and work.dropout:
        yield Misfit(
            f"it drops no attention weights, and a share of {work.dropout:g} is to be dropped",
            "regularisation.attention_dropout=0",
        )
    if kernel != "reference" and work.has_bias:
        yield Misfit("it adds nothing to scores, and this model does, by the distance of keys")
    if kernel == "splash":
        yield from _of_splash(work)
    if kernel == "cudnn" and platform == target.platform:
        yield from _of_cudnn(target, work)


def rows_at_a_time(rows: int, length: int, item_bytes: int) -> int:
    """Return the rows of one call of cuDNN: the largest divisor of a device's rows whose mask fits `MASK_BYTES`.

    Args:
      rows: of a micro-batch on the device.
      length: tokens of a row.
      item_bytes: of a number of the mask, which has the dtype of the products' operands.
    """
    most = max(MASK_BYTES // (item_bytes * length**2), 1)
    return max(each for each in divisors(rows) if each <= most)


def mask_bytes(work: Work) -> int:
    """Return the bytes of the mask of segments of one call of cuDNN, which adds it to the scores of all heads."""
    item_bytes = ITEM_BYTES[work.compute]
    return item_bytes * rows_at_a_time(work.rows, work.length, item_bytes) * work.length**2


def _price(kernel: Kernel, work: Work) -> str:
    if kernel != "cudnn":
        return ""
    rows = rows_at_a_time(work.rows, work.length, ITEM_BYTES[work.compute])
    part = f", {rows} of {work.rows} rows at a time" if rows < work.rows else ""
    return f"; segments as a mask of {formatting.size(mask_bytes(work))} a device{part}"


def _of_splash(work: Work) -> Iterator[Misfit]:
    if work.both_ways:
        yield Misfit("its masks are the same for all rows, and parts of these are read both ways")
    if work.length % LANES:
        near = max(round(work.length / LANES), 1) * LANES
        yield Misfit(
            f"rows of {work.length} tokens are no multiple of {LANES}", f"data.sequence={near}"
        )
    if work.compute == "float16":
        yield Misfit("a TPU has no unit for float16", "precision.compute=bfloat16")


def _of_cudnn(target: Target, work: Work) -> Iterator[Misfit]:
    if target.capability is None:
        yield Misfit("it is NVIDIA's, and this GPU is not known as one")
        return
    if target.capability < AMPERE:
        yield Misfit(f"compute capability {target.capability} is below {AMPERE}")
    if work.compute == "float32":
        yield Misfit("it computes no float32", "precision.compute=bfloat16")
    most = 256 if target.capability >= HOPPER else 128
    if work.head_dim % 8 or work.head_dim > most:
        yield Misfit(f"heads of {work.head_dim} are no multiple of 8 up to {most}")
    if work.cap is not None:
        yield Misfit(f"it caps no scores, and this model does at {work.cap:g}")
    if work.stages > 1:
        yield Misfit(
            f"JAX 0.12 cannot map its mask over stages of a pipeline, and mesh.pipe = {work.stages}"
        )
    if work.length % 2:
        yield Misfit(
            f"rows of {work.length} tokens are odd, which its mask cannot be",
            f"data.sequence={work.length + 1}",
        )
