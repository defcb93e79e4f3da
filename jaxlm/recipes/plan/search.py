"""Search for the fastest plan that fits, or for the smallest change that makes a run fit."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import divisors
from jaxlm.monitor.chips import CHIPS, SLICES, Machine
from jaxlm.parallel.config import AXES, factorizations
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import device_memory, divisibility
from jaxlm.recipes.plan.predict import Forecast, forecast

REMATS = ("none", "dots", "save:attention_out", "full")
CHUNKS = (None, 8192, 1024)
LEAST_MEMORY = ("full", 1024)  # the remat and chunk of those that need least memory
MAX_SHARE = 0.85  # of the memory; the rest covers the error of a plan
MAX_TENSOR = 8  # devices that sum activations in every layer need the fastest interconnect
MAX_DEVICES = 4096
# Settings that make a run smaller, and the shares of them that are tried.
SMALLER = (("model.depth",), ("data.sequence",), ("model.width",), ("model.depth", "model.width"))
SHARES = (*(n / 8 for n in range(7, 0, -1)), *(0.5**n for n in range(4, 13)))


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The fastest plan, the settings that lead to it, and the number of plans tried."""

    best: Forecast | None
    settings: dict[str, str]
    flags: str  # the settings, to paste
    tried: int
    fitting: int
    smallest: Forecast  # in memory, for runs that do not fit


def search(run: Run, machine: Machine, assumed: list[str]) -> SearchResult:
    """Try every combination of mesh, micro-batches, remat and loss chunk.

    The batch, the model, and the axes of stages, experts and tokens stay as they are. Raises
    ConfigError if the run divides over the devices in none of them.
    """
    changes = _candidates(run, machine.devices, REMATS, CHUNKS)
    plans = [forecast(changed, machine, assumed) for changed in changes]
    if not plans:
        divisibility.check(run, machine.devices)
        raise AssertionError("a run that fits its mesh has a candidate")
    fitting = [plan for plan in plans if _has_room(plan)]
    smallest = min(plans, key=lambda plan: plan.bytes_per_device["total"])
    best = min(fitting, key=lambda plan: sum(plan.seconds), default=None)
    settings = _settings(run, (best or smallest).run)
    flags = divisibility.config_flags(settings)
    return SearchResult(best, settings, flags, len(plans), len(fitting), smallest)


def _has_room(plan: Forecast) -> bool:
    return plan.bytes_per_device["total"] <= MAX_SHARE * plan.memory_bytes


class Nearest(NamedTuple):
    """A plan that fits, and the flags that lead to it."""

    forecast: Forecast
    flags: str


def nearest(run: Run, machine: Machine) -> Nearest | None:
    """Return the first that fits: other settings, a larger machine, a smaller model; else None."""
    if fitting := _fitting(run, machine):
        return fitting
    for larger in _larger(machine):
        if fitting := _fitting(run, larger):
            return fitting._replace(flags=f"--on={larger.name} {fitting.flags}".strip())
    return smaller(run, machine)


def smaller(run: Run, machine: Machine) -> Nearest | None:
    """Shrink one or two sizes of the run by as little as fits the machine; None if nothing fits."""
    known = config.flatten(run)
    for paths in SMALLER:
        whole = {path: known.get(path) for path in paths}
        for share in SHARES:
            sizes = {path: int(share * n) for path, n in whole.items() if isinstance(n, int)}
            if len(sizes) < len(paths) or not all(sizes.values()):
                continue
            try:
                fitting = _fitting(run.changed(sizes), machine)
            except ConfigError:
                continue
            if fitting:
                flags = f"{divisibility.config_flags(sizes)} {fitting.flags}"
                return fitting._replace(flags=flags.strip())
    return None


def _fitting(run: Run, machine: Machine) -> Nearest | None:
    """Return the fastest plan that fits; no search if the plan of least memory does not fit."""
    remat, chunk = LEAST_MEMORY
    for changed in _candidates(run, machine.devices, (remat,), (chunk,)):
        plan = forecast(changed, machine)
        held = device_memory.held_bytes(changed, plan.decoder, dict.fromkeys(AXES, 1))
        weights = held["parameters"] + held.get("base", 0)
        if weights > machine.devices * plan.memory_bytes:
            return None  # no other layout fits either
        if _has_room(plan):
            best = search(run, machine, [])
            return Nearest(best.best, best.flags) if best.best else None
    return None


def _larger(machine: Machine) -> Iterator[Machine]:
    """Yield machines with more chips of the same kind; for a CPU, GPUs."""
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
    requested = {axis: getattr(run.mesh, axis) for axis in ("pipe", "expert", "context")}
    fixed = {axis: 1 if size == "auto" else size for axis, size in requested.items()}
    for sizes in factorizations(devices):
        if sizes["tensor"] > MAX_TENSOR or any(sizes[axis] != fixed[axis] for axis in fixed):
            continue
        mesh = dataclasses.replace(run.mesh, **sizes)  # type: ignore[arg-type]
        per_device, left = divmod(run.train.batch, sizes["data"] * sizes["fsdp"] * sizes["expert"])
        if left:
            continue
        for number in [run.train.microbatches] if sizes["pipe"] > 1 else divisors(per_device):
            train = dataclasses.replace(run.train, microbatches=number)
            laid_out = dataclasses.replace(run, mesh=mesh, train=train)
            if any(divisibility.find_indivisible(laid_out, sizes)):
                continue
            for remat, chunk in itertools.product(remats, chunks):
                changed = dataclasses.replace(train, remat=remat)
                loss = dataclasses.replace(run.loss, chunk=chunk)
                yield dataclasses.replace(laid_out, train=changed, loss=loss)


def _settings(old: Run, new: Run) -> dict[str, str]:
    """Return the changed settings by path."""
    pairs = [(f"mesh.{axis}", getattr(old.mesh, axis), getattr(new.mesh, axis)) for axis in AXES]
    pairs += [
        ("train.microbatches", old.train.microbatches, new.train.microbatches),
        ("train.remat", old.train.remat, new.train.remat),
        ("loss.chunk", old.loss.chunk, new.loss.chunk),
    ]
    return {path: str(after) for path, before, after in pairs if before != after}
