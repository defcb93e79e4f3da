"""Settings of the training loop."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from jaxlm.core import batch_schedule
from jaxlm.core.config import Span, setting
from jaxlm.core.nearest import adjacent_divisors
from jaxlm.nn.config import REMAT_NAMES, is_remat
from jaxlm.ops.kernels import KernelSetting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how many rows a step, and how the layers are run."""

    steps: int = setting(1000, "updates in the whole run", unit="steps", low=1)
    batch: int = setting(
        32, "rows of the global batch, over all devices and micro-batches", unit="rows", low=1
    )
    microbatches: int = setting(
        1,
        "parts that a batch is cut into; gradients are summed over them, then applied once; with mesh.pipe the parts follow each other through the stages",
        low=1,
    )
    batch_warmup: tuple[str, ...] = setting(
        (),
        "ROWS@SPAN: the batch has so many rows until then; behind the last train.batch. Each stage compiles the step once",
    )
    pipeline: Literal["gpipe", "circular"] = setting(
        "gpipe",
        "how micro-batches go through the stages of mesh.pipe: once, or around several times, which idles less and moves more",
    )
    pipeline_repeats: int = setting(
        2,
        "times a micro-batch goes around the stages of a circular pipeline, each time through other layers",
        low=2,
    )
    stack: Literal["scan", "unroll"] = setting(
        "scan",
        "run the layers as one compiled loop, or one after the other: same parameters, same result",
    )
    attention: KernelSetting = setting(
        "auto",
        "what computes attention: reference (all scores at once), blockwise (memory grows with the row, not its square), splash (a kernel of TPUs), cudnn (one of NVIDIA GPUs), or auto; the same function",
    )
    remat: str = setting(
        "none",
        "what the backward pass computes again: none, dots (keep matrix products), full, save:NAME,NAME, or offload:NAME,NAME (keep in the memory of the host); full/none: the layers take turns",
    )
    offload: tuple[Literal["optimizer"], ...] = setting(
        (),
        "what waits in the memory of the host from step to step: optimizer, its state, which then travels there and back each step",
    )
    memory_gib: float | None = setting(
        None,
        "what a step may take of a device's memory; None is all that the device, or for a CPU the machine, says it has",
        unit="GiB",
        above=0,
    )
    control: Span = setting(
        Span.parse("5s"),
        "how often control.json in the run directory is read, which may change the learning rate of a run that runs",
    )
    patience: int | None = setting(
        None,
        "stop after this many evaluations in a row without a better loss; None never stops early",
        unit="evaluations",
        low=1,
    )

    @property
    def turns(self) -> int:
        """Times that a micro-batch goes through the stages of mesh.pipe."""
        return self.pipeline_repeats if self.pipeline == "circular" else 1

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Micro-batches are equal parts of a batch, and the remat policy is one of those there are."""
        if self.batch % self.microbatches:
            fits = adjacent_divisors(self.batch, self.microbatches)
            yield (
                "microbatches",
                f"batch = {self.batch} rows does not divide by {self.microbatches}, by {' or '.join(map(str, fits))} it does",
                "\n".join(f"--config.train.microbatches={fit}" for fit in fits),
            )
        yield from self._uneven()
        for policy in self.remat.split("/"):
            if not is_remat(policy):
                known = ",".join(REMAT_NAMES)
                yield (
                    "remat",
                    f"{policy!r} is none of: none, dots, full, save:{known}, offload:{known}",
                    "jaxlm config explain train.remat",
                )

    def _uneven(self) -> Iterator[tuple[str, str, str]]:
        """Batches of a warm-up grow to that of the run, and each divides over the micro-batches."""
        try:
            sizes = [batch_schedule.parse(entry)[0] for entry in self.batch_warmup]
        except ValueError as error:
            yield "batch_warmup", str(error), "'--config.train.batch_warmup=()'"
            return
        if any(b <= a for a, b in itertools.pairwise([0, *sizes, self.batch])):
            yield (
                "batch_warmup",
                f"{', '.join(map(str, sizes))} rows do not grow to train.batch = {self.batch}",
                f"--config.train.batch={2 * max(sizes)}",
            )
        elif uneven := [size for size in sizes if size % self.microbatches]:
            yield (
                "batch_warmup",
                f"{uneven[0]} rows do not divide by {self.microbatches} micro-batches",
                f"--config.train.microbatches={math.gcd(self.batch, *sizes)}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Which steps are not applied, and what happens when that does not help."""

    window: int = setting(128, "accepted steps that a spike is compared with", unit="steps", low=8)
    sigmas: float | None = setting(
        6.0,
        "robust standard deviations above the median at which a loss or gradient norm is a spike; None skips only what is not finite",
        above=0.0,
    )
    budget: int = setting(10, "bad steps in a row after which the run rewinds", unit="steps", low=1)
    divergence: Literal["warn", "stop"] = setting(
        "warn",
        "what follows a loss worse than the uniform coder, ln V nats, after 10% of the steps and above the first loss, or after "
        "half of the steps: a warning, or the end of the run, with 79; worse than the unigram coder is always a warning",
    )
    rewinds: int = setting(3, "rewinds after which the run ends instead, with 79", low=0)
    loss_scale: float = setting(
        2.0**15,
        "what the mean loss is multiplied by at first where anything is float16; it halves where a gradient overflows",
        low=1.0,
        high=2.0**24,
    )
    loss_scale_growth: int = setting(
        2000,
        "steps without such an overflow after which the loss scale doubles",
        unit="steps",
        low=1,
    )
    reach: int = setting(
        100, "a rewind goes back at least this far, to a healthy checkpoint", unit="steps", low=0
    )
    compare_every: int | None = setting(
        100,
        "steps between comparisons of the parameters' copies on several devices; None compares none",
        unit="steps",
        low=1,
    )
    repeat_every: int | None = setting(
        None,
        "steps between those that are computed twice and compared bit for bit; None repeats none",
        unit="steps",
        low=1,
    )
    skip: int = setting(
        200,
        "batches around the first bad one that are left out after a rewind",
        unit="batches",
        low=0,
    )
