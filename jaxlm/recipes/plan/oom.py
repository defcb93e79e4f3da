"""Forecast for the devices of this process, the memory check, and remedies if memory is short."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, OutOfMemory, is_out_of_memory
from jaxlm.models.config import ModelConfig
from jaxlm.monitor import chips, formatting, host_machine
from jaxlm.monitor.chips import Machine
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility, predict, search
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.plan.serving import PlannedDraft, ServingForecast, forecast_serving

GIB = 2**30
# Settings that shrink a step with nearly the same result; tried alone, then in pairs.
REMEDIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss.chunk", ("8192", "1024", "256")),
    ("train.remat", ("dots", "save:attention_out", "full")),
    ("train.attention", ("blockwise",)),
    ("train.microbatches", ("2", "4", "8", "16", "32")),
    ("precision.compute", ("bfloat16",)),
)
MAX_REMEDIES = 3


def forecast_here(run: Run, decoder: ModelConfig) -> Forecast | None:
    """Return the forecast on this process's devices; None for a chip that is in no table."""
    assumed: list[str] = []
    on = _machine(assumed)
    return None if on is None else predict.forecast(_settled(run, decoder), on, assumed)


def _settled(run: Run, decoder: ModelConfig) -> Run:
    """Return the run with the vocabulary of its model."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=decoder.vocab))


def _machine(assumed: list[str]) -> Machine | None:
    count, kind = jax.device_count(), jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return host_machine.this_machine(count, assumed)
    chip = chips.of_kind(kind)
    return None if chip is None else Machine(name=f"{chip.name}x{count}", chip=chip, devices=count)


def memory_limit(run: Run) -> float | None:
    """Return the bytes per device that a step may use: by the config, the device or the host."""
    if run.train.memory_gib is not None:
        return run.train.memory_gib * GIB
    if jax.default_backend() == "cpu":
        return host_machine.physical_bytes() / jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def check(run: Run, forecast: Forecast | None, needed: float) -> None:
    """Raise OutOfMemory, with remedies, if the compiled step needs more than a device has."""
    available = memory_limit(run)
    if available is not None and needed > available:
        raise oom_error(forecast, needed, available, when="checked before the first step")


@contextlib.contextmanager
def explain_serving_oom(
    run: Run,
    decoder: ModelConfig,
    *,
    slots: int,
    context: int,
    chunk: int,
    is_int8: bool,
    draft: PlannedDraft,
    kept_bytes: int,
) -> Iterator[None]:
    """Raise OutOfMemory, with slots and a context that fit, if a server does not fit the device.

    The plan is checked first, then what the device reports inside. A server on a mesh of several
    devices has no plan.

    Args:
      run: the run.
      decoder: its model.
      slots: requests that run at once.
      context: largest number of tokens of a request.
      chunk: tokens of a prompt that are read in one pass.
      is_int8: the KV cache is stored in int8.
      draft: what guesses tokens.
      kept_bytes: bytes of kept beginnings of prompts.
    """
    on, available = _machine([]), memory_limit(run)
    if on is None or on.devices > 1 or available is None:
        yield
        return
    room = available - kept_bytes
    plan = functools.partial(
        forecast_serving,
        _settled(run, decoder),
        on,
        slots=slots,
        context=context,
        chunk=chunk,
        is_int8=is_int8,
        draft=draft,
    )
    forecast = plan()
    if forecast.total_bytes > room:
        raise _serving_error(forecast, plan, room, kept_bytes, "checked before the server starts")
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reported = 0.9 * forecast.total_bytes  # less than planned was available
        raise _serving_error(
            forecast, plan, reported, kept_bytes, "reported by the device"
        ) from error


def _serving_error(
    forecast: ServingForecast,
    plan: Callable[..., ServingForecast],
    room: float,
    kept_bytes: int,
    when: str,
) -> OutOfMemory:
    """Return the error of a server beyond the memory; each line of its fix fits alone.

    Args:
      forecast: the plan of the server.
      plan: makes the plan of other `slots`, another `context` or another `draft`.
      room: available bytes, without the kept ones.
      kept_bytes: bytes of kept beginnings of prompts.
      when: the moment at which it was seen.
    """
    show = formatting.size
    fixes = []
    most = forecast.slots_within(room)
    if most >= 1 and plan(slots=most).total_bytes <= room:
        fixes.append(f"--slots={most}")
    shorter = forecast.context // 2
    while shorter >= 2 and plan(context=shorter).total_bytes > room:
        shorter //= 2
    if shorter >= 2:
        fixes.append(f"--context={shorter}    # with {forecast.slots} slots")
    if kept_bytes and forecast.total_bytes <= room + kept_bytes:
        fixes.append("--prefix_mib=0")
    if forecast.draft_bytes and plan(draft="lookup").total_bytes <= room:
        fixes.append("--draft=lookup    # needs no run")
    draft = f" · draft {show(forecast.draft_bytes)}" if forecast.draft_bytes else ""
    return OutOfMemory(
        f"a server of {forecast.slots} slots of {forecast.context} tokens does not fit the memory",
        where=when,
        why=f"weights {show(forecast.weights_bytes)}{draft} · {show(forecast.slot_bytes)} a slot · "
        f"kept prompts {show(kept_bytes)}; {show(room + kept_bytes)} is available",
        fix="\n".join(fixes) or "a smaller model",
    )


@contextlib.contextmanager
def explain_oom(run: Run, forecast: Forecast | None) -> Iterator[None]:
    """Turn a device's out-of-memory error into an OutOfMemory with remedies."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise oom_error(forecast, None, memory_limit(run), when="reported by the device") from error


def oom_error(
    forecast: Forecast | None, needed: float | None, available: float | None, *, when: str
) -> OutOfMemory:
    """Return the error for a run that does not fit; each line of its fix can be pasted."""
    show = formatting.size
    if forecast is None:
        why = f"it needs {show(needed)} of {show(available)}"
        fix = "--config.train.microbatches=2\n--config.train.remat=dots"
        return OutOfMemory("the run does not fit the device", where=when, why=why, fix=fix)
    planned = forecast.bytes_per_device["total"]
    at_least = "" if needed is not None else "more than "
    needed = max(planned, available or 0.0) if needed is None else needed
    held = [(size, name) for name, size in forecast.bytes_per_device.items() if name != "total"]
    biggest = " · ".join(f"{name} {show(size)}" for size, name in sorted(held, reverse=True)[:4])
    lines = [
        f"{flags}    # {show(size)} per device, {slower}"
        for flags, size, slower in _remedies(forecast, needed / planned, available)
    ]
    if not lines:
        smaller = search.smaller(forecast.run, forecast.machine)
        lines = [smaller.flags if smaller else "a smaller model\nmore devices"]
    needs = f"this run needs {at_least}{show(needed)} per device, {show(available)} is available"
    return OutOfMemory(needs, where=when, why=f"biggest: {biggest}", fix="\n".join(lines))


def _remedies(
    forecast: Forecast, factor: float, available: float | None
) -> Iterator[tuple[str, float, str]]:
    """Yield flags, bytes and slowdown of settings: those that suffice first, the fastest first.

    `factor` is measured over planned bytes; it is assumed to be the same for all settings.
    """
    tried = []
    now = sum(forecast.seconds)
    singles = [(path, value) for path, values in REMEDIES for value in values]
    pairs = [pair for pair in itertools.combinations(singles, 2) if pair[0][0] != pair[1][0]]
    for changes in [*((single,) for single in singles), *pairs]:
        changed = _changed(forecast, changes)
        if changed is None:
            continue
        size, seconds = factor * changed.bytes_per_device["total"], sum(changed.seconds)
        if size < 0.97 * factor * forecast.bytes_per_device["total"]:
            is_enough = available is None or size <= available
            order = (len(changes), seconds) if is_enough else (0, size)
            flags = divisibility.config_flags(dict(changes))
            tried.append((not is_enough, *order, flags, size, seconds))
    for *_, flags, size, seconds in sorted(tried)[:MAX_REMEDIES]:
        slower = seconds / now - 1
        yield flags, size, "about as fast" if slower < 0.01 else f"about {slower:.0%} slower"


def _changed(forecast: Forecast, changes: tuple[tuple[str, str], ...]) -> Forecast | None:
    """Return the forecast with other settings; None if they change nothing or are invalid."""
    values = {path: int(text) if text.isdigit() else text for path, text in changes}
    now = config.flatten(forecast.run)
    if any(now[path] == value for path, value in values.items()):
        return None
    try:
        return predict.forecast(forecast.run.changed(values), forecast.machine)
    except ConfigError:
        return None
