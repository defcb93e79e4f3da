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

# Layers that `stack=auto` unrolls on a CPU: the time to compile grows with them.
MAX_UNROLLED = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, batch, and execution of the layers."""

    steps: int = setting(1000, "updates in the whole run", unit="steps", low=1)
    batch: int = setting(
        32, "rows of the global batch, over all devices and micro-batches", unit="rows", low=1
    )
    epochs: float | None = setting(
        None,
        "most passes over the training set: a set with fewer rows gets a smaller batch, then fewer "
        "steps, unless the command line sets them; None keeps train.steps and train.batch",
        above=0,
    )
    microbatches: int = setting(
        1,
        "micro-batches of a batch for gradient accumulation: gradients are summed over them, then "
        "applied once; with mesh.pipe the micro-batches of the pipeline",
        low=1,
    )
    batch_warmup: tuple[str, ...] = setting(
        (),
        "ROWS@SPAN: rows of the batch until SPAN, after the last one train.batch. Each phase "
        "compiles the step once",
    )
    pipeline: Literal["gpipe", "circular"] = setting(
        "gpipe",
        "schedule of micro-batches in the stages of mesh.pipe: gpipe passes each stage once; "
        "circular passes them several times, with a smaller bubble and more communication",
    )
    pipeline_repeats: int = setting(
        2,
        "passes of a micro-batch through the stages of a circular pipeline, each through other "
        "layers",
        low=2,
    )
    stack: Literal["auto", "scan", "unroll"] = setting(
        "scan",
        "execution of the layers: one compiled loop (scan), unrolled, or auto: unrolled on CPUs "
        f"and on one GPU, where it is faster, up to {MAX_UNROLLED} layers; same parameters, same "
        "result",
    )
    attention: KernelSetting = setting(
        "auto",
        "attention kernel: reference (all scores at once), blockwise (online softmax, memory "
        "linear in the row), splash (kernel for TPUs), cudnn (kernel for NVIDIA GPUs), or auto; "
        "all compute the same function",
    )
    remat: str = setting(
        "none",
        "rematerialization in the backward pass: none, dots (keep matrix products), full, "
        "save:NAME,NAME, or offload:NAME,NAME (keep in the memory of the host); full/none "
        "alternates between the layers",
    )
    offload: tuple[Literal["optimizer"], ...] = setting(
        (),
        "state in the memory of the host between steps: optimizer moves the optimizer state there "
        "and back in each step",
    )
    memory_gib: float | None = setting(
        None,
        "limit for the memory of a step on a device; None uses the memory that the device reports, "
        "for a CPU that of the machine",
        unit="GiB",
        above=0,
    )
    control: Span = setting(
        Span.parse("5s"),
        "interval between reads of control.json in the run directory, which can change the "
        "learning rate of the running run",
    )
    patience: int | None = setting(
        None,
        "stop after this many evaluations in a row without a better loss; None never stops early",
        unit="evaluations",
        low=1,
    )

    @property
    def turns(self) -> int:
        """Number of passes of a micro-batch through the stages of mesh.pipe."""
        return self.pipeline_repeats if self.pipeline == "circular" else 1

    def stack_on(self, platform: str, devices: int, layers: int) -> Literal["scan", "unroll"]:
        """Return `stack` for a platform, devices of the mesh, and layers: not `auto`.

        A loop copies what the backward pass needs of each layer into arrays of all layers: 9% of a
        step of GPT-2 124M on an H200. Several GPUs, and TPUs, were not measured.
        """
        if self.stack != "auto":
            return self.stack
        pays = platform == "cpu" or (platform == "gpu" and devices == 1)
        return "unroll" if pays and layers <= MAX_UNROLLED else "scan"

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that micro-batches are equal parts of a batch, and that the remat policy exists."""
        if self.batch % self.microbatches:
            fits = adjacent_divisors(self.batch, self.microbatches)
            yield (
                "microbatches",
                f"batch = {self.batch} rows does not divide by {self.microbatches}, by "
                f"{' or '.join(map(str, fits))} it does",
                "\n".join(f"--config.train.microbatches={fit}" for fit in fits),
            )
        yield from self._uneven()
        for policy in self.remat.split("/"):
            if not is_remat(policy):
                known = ",".join(REMAT_NAMES)
                yield (
                    "remat",
                    f"{policy!r} is not one of: none, dots, full, save:{known}, offload:{known}",
                    "jaxlm config explain train.remat",
                )

    def _uneven(self) -> Iterator[tuple[str, str, str]]:
        """Check that a batch warm-up grows to train.batch, in multiples of the micro-batches."""
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
    """Conditions for skipped steps, rewinds and the end of a diverged run."""

    window: int = setting(128, "accepted steps that a spike is compared with", unit="steps", low=8)
    sigmas: float | None = setting(
        6.0,
        "robust standard deviations above the median at which a loss or gradient norm is a spike, "
        "ten times as many for the norm with optim.clip_norm, and more if spikes recur; None skips "
        "only values that are not finite",
        above=0.0,
    )
    budget: int = setting(10, "bad steps in a row after which the run rewinds", unit="steps", low=1)
    divergence: Literal["warn", "stop"] = setting(
        "warn",
        "action if the loss is worse than the uniform coder, ln V nats, after 10% of the steps and "
        "above the first loss, or after half of the steps: a warning, or the end of the run, with "
        "exit code 79; a loss worse than the unigram coder is always a warning",
    )
    rewinds: int = setting(3, "rewinds after which the run ends, with exit code 79", low=0)
    loss_scale: float = setting(
        2.0**15,
        "initial factor on the mean loss with float16; halved when a gradient overflows",
        low=1.0,
        high=2.0**24,
    )
    loss_scale_growth: int = setting(
        2000, "steps without an overflow after which the loss scale doubles", unit="steps", low=1
    )
    rewind_steps: int = setting(
        100,
        "minimal distance of a rewind, which restores a healthy checkpoint",
        unit="steps",
        low=0,
        formerly="reach",
    )
    compare_every: int | None = setting(
        100,
        "steps between comparisons of replicated parameters on several devices; None disables them",
        unit="steps",
        low=1,
    )
    repeat_every: int | None = setting(
        None,
        "interval of steps that are computed twice and compared bit for bit; None disables it",
        unit="steps",
        low=1,
    )
    skip: int = setting(
        200,
        "batches around the first bad one that are skipped after a rewind",
        unit="batches",
        low=0,
    )
