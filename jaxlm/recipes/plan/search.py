"""The fastest way that fits: meshes, micro-batches, remat and chunks of the loss, tried by arithmetic; and where none does, what would."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlm.core import config, divisors
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models.cost import model_cost
from jaxlm.monitor.chips import CHIPS, SLICES, Machine
from jaxlm.parallel.config import AXES, factorisations
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.recipes.plan.predict import Forecast, forecast

REMATS = ("none", "dots", "save:attention_out", "full")
CHUNKS = (None, 8192, 1024)
SMALLEST = ("full", 1024)  # of these, the ones that leave least in memory
FULLEST = 0.85  # of the memory, as a plan may be so much wrong
WIDEST_TENSOR = 8  # devices that sum activations in every layer need the fastest wires
MAX_DEVICES = 4096
# What a run is made smaller by, and the shares of it that are tried.
SMALLER = (("model.depth",), ("data.sequence",), ("model.width",), ("model.depth", "model.width"))
SHARES = (*(n / 8 for n in range(7, 0, -1)), *(0.5**n for n in range(4, 13)))


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best plan, what was changed for it, and how many were weighed."""

    best: Forecast | None
    settings: dict[str, str]
    tried: int
    fitting: int
    smallest: Forecast  # of memory, where nothing fits

    @property
    def flags(self) -> str:
        """What to paste."""
        return _pasted(self.settings)


def search(run: Run, machine: Machine, assumed: list[str]) -> SearchResult:
    """Tries every combination; the batch, the model and the axes of stages, experts and tokens stay as they are.

    Raises:
      ConfigError: where the run cannot be laid out on so many devices in any of them.
    """
    best: tuple[float, Forecast] | None = None
    smallest: Forecast | None = None
    tried = fitting = 0
    for changed in _candidates(run, machine.devices, REMATS, CHUNKS):
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
        divisibility.check(run, machine.devices)
        raise AssertionError("a run that fits its mesh has a candidate")
    chosen = best[1] if best else smallest
    return SearchResult(
        best[1] if best else None, _settings(run, chosen.run), tried, fitting, smallest
    )


class Nearest(NamedTuple):
    """A plan that fits, and what to paste for it."""

    forecast: Forecast
    flags: str


def nearest(run: Run, machine: Machine) -> Nearest | None:
    """The first of these that fits: other settings on this machine, a larger one, a smaller model on this one; None where none does."""
    if found := _fitting(run, machine):
        return found
    for larger in _larger(machine):
        if found := _fitting(run, larger):
            return found._replace(flags=f"--on={larger.name} {found.flags}".strip())
    return smaller(run, machine)


def smaller(run: Run, machine: Machine) -> Nearest | None:
    """The run with less of one size, or of two, by as little as fits the machine, and the settings that it then needs."""
    known = config.flatten(run)
    for paths in SMALLER:
        whole = {path: known.get(path) for path in paths}
        for share in SHARES:
            sizes = {path: int(share * n) for path, n in whole.items() if isinstance(n, int)}
            if len(sizes) < len(paths) or not all(sizes.values()):
                continue
            try:
                found = _fitting(run.changed(sizes), machine)
            except ConfigError:
                continue
            if found:
                return found._replace(flags=f"{_pasted(sizes)} {found.flags}".strip())
    return None


def _fitting(run: Run, machine: Machine) -> Nearest | None:
    """The fastest that fits; no search where that which takes least memory does not."""
    remat, chunk = SMALLEST
    for changed in _candidates(run, machine.devices, (remat,), (chunk,)):
        found = forecast(changed, machine)
        weights = model_cost.parameters(found.decoder) * ITEM_BYTES[run.precision.params]
        if weights > machine.devices * found.memory_bytes:
            return None  # in no other layout either
        if found.bytes_per_device["total"] <= FULLEST * found.memory_bytes:
            best = search(run, machine, [])
            return Nearest(best.best, best.flags) if best.best else None
    return None


def _larger(machine: Machine) -> Iterator[Machine]:
    """More chips of a kind; of a CPU, GPUs."""
    chip = CHIPS["h100"] if machine.chip.name == "cpu" else machine.chip
    if chip.is_tpu:
        of_kind = [each for each in SLICES.values() if each.chip is chip]
        of_kind = of_kind or [each for each in SLICES.values() if each.chip is CHIPS["v5p"]]
        yield from (each for each in of_kind if each.devices > machine.devices)
        return
    devices = 1 if machine.chip.name == "cpu" else 2 * machine.devices
    while devices <= MAX_DEVICES:
        yield Machine(name=f"{chip.name}x{devices}", chip=chip, devices=devices)
        devices *= 2


def _candidates(
    run: Run, devices: int, remats: Sequence[str], chunks: Sequence[int | None]
) -> Iterator[Run]:
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
            if any(
                divisibility.find_indivisible(dataclasses.replace(laid_out, train=train), sizes)
            ):
                continue
            for remat, chunk in itertools.product(remats, chunks):
                yield dataclasses.replace(
                    laid_out,
                    train=dataclasses.replace(train, remat=remat),
                    loss=dataclasses.replace(run.loss, chunk=chunk),
                )


def _pasted(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--config.{path}={value}" for path, value in settings.items())


def _settings(old: Run, new: Run) -> dict[str, str]:
    """What differs, by the path of each setting."""
    pairs = [(f"mesh.{axis}", getattr(old.mesh, axis), getattr(new.mesh, axis)) for axis in AXES]
    pairs += [
        ("train.microbatches", old.train.microbatches, new.train.microbatches),
        ("train.remat", old.train.remat, new.train.remat),
        ("loss.chunk", old.loss.chunk, new.loss.chunk),
    ]
    return {path: str(after) for path, before, after in pairs if before != after}
