"""The fastest way that fits: meshes, micro-batches, remat and chunks of the loss, tried by arithmetic."""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxlm.core import divisors
from jaxlm.monitor.chips import Machine
from jaxlm.parallel.config import AXES, factorisations
from jaxlm.recipes import fit
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import Forecast, forecast

REMATS = ("none", "dots", "save:attention_out", "full")
CHUNKS = (None, 8192, 1024)
FULLEST = 0.85  # of the memory, as a plan may be so much wrong
WIDEST_TENSOR = 8  # devices that sum activations in every layer need the fastest wires


@dataclasses.dataclass(frozen=True)
class Found:
    """The best plan, what was changed for it, and how many were weighed."""

    best: Forecast | None
    settings: dict[str, str]
    tried: int
    fitting: int
    smallest: Forecast  # of memory, where nothing fits

    @property
    def flags(self) -> str:
        """What to paste."""
        return " ".join(f"--config.{path}={value}" for path, value in self.settings.items())


def search(run: Run, machine: Machine, assumed: list[str]) -> Found:
    """Tries every combination; the batch, the model and the axes of stages, experts and tokens stay as they are.

    Raises:
      ConfigError: where the run cannot be laid out on so many devices in any of them.
    """
    best: tuple[float, Forecast] | None = None
    smallest: Forecast | None = None
    tried = fitting = 0
    for changed in _candidates(run, machine.devices):
        found = forecast(changed, machine, assumed)
        tried += 1
        if smallest is None or found.bytes_per_device["total"] < smallest.bytes_per_device["total"]:
            smallest = found
        if found.bytes_per_device["total"] <= FULLEST * found.memory_bytes:
            fitting += 1
            seconds = sum(found.seconds)
            if best is None or seconds < best[0]:
                best = seconds, found
    if smallest is None:
        fit.check(run, machine.devices)
        raise AssertionError("a run that fits its mesh has a candidate")
    chosen = best[1] if best else smallest
    return Found(best[1] if best else None, _settings(run, chosen.run), tried, fitting, smallest)


def _candidates(run: Run, devices: int) -> Iterator[Run]:
    asked = {axis: getattr(run.mesh, axis) for axis in ("pipe", "expert", "context")}
    fixed = {axis: 1 if size == "auto" else size for axis, size in asked.items()}
    for sizes in factorisations(devices):
        if sizes["tensor"] > WIDEST_TENSOR or any(sizes[axis] != fixed[axis] for axis in fixed):
            continue
        mesh = dataclasses.replace(run.mesh, **sizes)  # type: ignore[arg-type]
        rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
        if run.train.batch % rows:
            continue
        counts = (
            [run.train.microbatches]
            if sizes["pipe"] > 1
            else divisors.divisors(run.train.batch // rows)
        )
        laid_out = dataclasses.replace(run, mesh=mesh)
        for number in counts:
            train = dataclasses.replace(run.train, microbatches=number)
            if any(fit.find(dataclasses.replace(laid_out, train=train), sizes)):
                continue
            for remat, chunk in itertools.product(REMATS, CHUNKS):
                yield dataclasses.replace(
                    laid_out,
                    train=dataclasses.replace(train, remat=remat),
                    loss=dataclasses.replace(run.loss, chunk=chunk),
                )


def _settings(old: Run, new: Run) -> dict[str, str]:
    """What differs, by the path of each setting."""
    pairs = [(f"mesh.{axis}", getattr(old.mesh, axis), getattr(new.mesh, axis)) for axis in AXES]
    pairs += [
        ("train.microbatches", old.train.microbatches, new.train.microbatches),
        ("train.remat", old.train.remat, new.train.remat),
        ("loss.chunk", old.loss.chunk, new.loss.chunk),
    ]
    return {path: str(after) for path, before, after in pairs if before != after}
