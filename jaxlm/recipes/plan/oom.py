"""The plan of a run that is about to start, on the devices at hand: what it says, what then was, and what to do where memory is short."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, OutOfMemory, is_out_of_memory
from jaxlm.models.config import ModelConfig
from jaxlm.monitor import chips, cpu, formatting
from jaxlm.monitor.chips import Machine
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict, search
from jaxlm.recipes.plan.predict import Forecast

GIB = 2**30
# What makes a step smaller with the same result, or nearly; each is tried alone, then in pairs.
REMEDIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss.chunk", ("8192", "1024", "256")),
    ("train.remat", ("dots", "save:attention_out", "full")),
    ("train.attention", ("blockwise",)),
    ("train.microbatches", ("2", "4", "8", "16", "32")),
    ("precision.compute", ("bfloat16",)),
)
MAX_REMEDIES = 3


def forecast_here(run: Run, decoder: ModelConfig) -> Forecast | None:
    """The plan on the devices of this process's mesh; None for a chip that no table knows."""
    assumed: list[str] = []
    on = _machine(assumed)
    settled = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=decoder.vocab))
    return None if on is None else predict.forecast(settled, on, assumed)


def _machine(assumed: list[str]) -> Machine | None:
    count, kind = jax.device_count(), jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return cpu.this_machine(count, assumed)
    chip = chips.of_kind(kind)
    return None if chip is None else Machine(name=f"{chip.name}x{count}", chip=chip, devices=count)


def memory_limit(run: Run) -> float | None:
    """Bytes that a step may take of a device: what the run allows, or what the device or this machine says it has."""
    if run.train.memory_gib is not None:
        return run.train.memory_gib * GIB
    if jax.default_backend() == "cpu":
        return cpu.physical_bytes() / jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def check(run: Run, forecast: Forecast | None, needed: float) -> None:
    """Raises OutOfMemory where the compiled step needs more of a device than there is: with the biggest parts and what would help."""
    there = memory_limit(run)
    if there is not None and needed > there:
        raise oom_error(forecast, needed, there, when="checked before the first step")


@contextlib.contextmanager
def explain_oom(run: Run, forecast: Forecast | None) -> Iterator[None]:
    """In there, that a device has not the memory becomes an OutOfMemory with what would help."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise oom_error(forecast, None, memory_limit(run), when="as the device says") from error


def oom_error(
    forecast: Forecast | None, needed: float | None, there: float | None, *, when: str
) -> OutOfMemory:
    """That the run does not fit, in four parts; each line of the fix can be pasted."""
    if forecast is None:
        return OutOfMemory(
            "the run does not fit the device",
            where=when,
            why=f"it needs {formatting.size(needed)}, and there are {formatting.size(there)}",
            fix="--config.train.microbatches=2\n--config.train.remat=dots",
        )
    planned = forecast.bytes_per_device["total"]
    least = "" if needed is not None else "more than "
    needed = max(planned, there or 0.0) if needed is None else needed
    parts = sorted(
        ((size, name) for name, size in forecast.bytes_per_device.items() if name != "total"),
        reverse=True,
    )
    biggest = " · ".join(f"{name} {formatting.size(size)}" for size, name in parts[:4])
    lines = [
        f"{flags}    # {formatting.size(size)} a device, {slower}"
        for flags, size, slower in _remedies(forecast, needed / planned, there)
    ]
    return OutOfMemory(
        f"this run needs {least}{formatting.size(needed)} a device, there are {formatting.size(there)}",
        where=when,
        why=f"biggest: {biggest}",
        fix="\n".join(lines) or _smaller(forecast),
    )


def _smaller(forecast: Forecast) -> str:
    """The nearest model that fits, where no setting that leaves it as it is saves anything."""
    found = search.smaller(forecast.run, forecast.machine)
    return found.flags if found else "a smaller model\nmore devices"


def _remedies(
    forecast: Forecast, factor: float, there: float | None
) -> Iterator[tuple[str, float, str]]:
    """Settings with the bytes they lead to and what they cost, those that suffice first and of these the fastest.

    `factor` is how much more the step needs than was planned; it is taken to be the same for all.
    """
    tried = []
    now = sum(forecast.seconds)
    for changes in _combinations():
        found = _changed(forecast, changes)
        if found is None:
            continue
        size, seconds = factor * found.bytes_per_device["total"], sum(found.seconds)
        if size < 0.97 * factor * forecast.bytes_per_device["total"]:
            is_enough = there is None or size <= there
            order = (len(changes), seconds) if is_enough else (0, size)
            flags = " ".join(f"--config.{path}={value}" for path, value in changes)
            tried.append((not is_enough, *order, flags, size, seconds))
    for *_, flags, size, seconds in sorted(tried)[:MAX_REMEDIES]:
        slower = seconds / now - 1
        yield flags, size, "about as fast" if slower < 0.01 else f"about {slower:.0%} slower"


def _combinations() -> Iterator[tuple[tuple[str, str], ...]]:
    singles = [(path, value) for path, values in REMEDIES for value in values]
    yield from ((single,) for single in singles)
    for number, first in enumerate(singles):
        yield from ((first, second) for second in singles[number + 1 :] if first[0] != second[0])


def _changed(forecast: Forecast, changes: tuple[tuple[str, str], ...]) -> Forecast | None:
    """The plan with other settings; None where they are what the run has, or do not suit it."""
    values = {path: int(text) if text.isdigit() else text for path, text in changes}
    now = config.flatten(forecast.run)
    if any(now[path] == value for path, value in values.items()):
        return None
    try:
        return predict.forecast(forecast.run.changed(values), forecast.machine)
    except ConfigError:
        return None
