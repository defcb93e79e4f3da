"""Forecast for the devices of this process, the memory check, and remedies if memory is short."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, OutOfMemory, is_out_of_memory
from jaxlm.generate.engine import EngineSettings
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


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine: its plan, and the bytes that it may use.

    Args:
      plan: makes the plan, also of other `slots`, another `context` or another `draft`.
      room: available bytes, without the kept ones.
      kept_bytes: bytes of kept beginnings of prompts.
    """

    plan: Callable[..., ServingForecast]
    room: float
    kept_bytes: int

    def fits(self, **other: Any) -> bool:
        """Return True if the plan, with other sizes, fits."""
        return self.plan(**other).total_bytes <= self.room

    @property
    def slots(self) -> int:
        """The most slots of the same context that fit; 0 if none does."""
        most = self.plan().slots_within(self.room)
        return most if most >= 1 and self.fits(slots=most) else 0

    def fewer_tokens(self, prompt: int = 0) -> int:
        """Return half, a quarter or less of the tokens after a prompt, with which the slots fit."""
        tokens = (self.plan().context - prompt) // 2
        while tokens and not self.fits(context=prompt + tokens):
            tokens //= 2
        return tokens

    def error(self, what: str, when: str, fixes: Sequence[str]) -> OutOfMemory:
        """Return the error of an engine beyond the memory.

        Args:
          what: the engine, for the first line.
          when: the moment at which it was seen.
          fixes: lines; one of them suffices.
        """
        show, forecast = formatting.size, self.plan()
        draft = f" · draft {show(forecast.draft_bytes)}" if forecast.draft_bytes else ""
        layer = f" · a layer {show(forecast.layer_bytes)}" if forecast.layer_bytes else ""
        prompts = f" · kept prompts {show(self.kept_bytes)}" if self.kept_bytes else ""
        return OutOfMemory(
            f"{what} of {forecast.context} tokens do not fit the memory",
            where=when,
            why=f"weights {show(forecast.weights_bytes)}{draft}{layer} · "
            f"{show(forecast.slot_bytes)} each{prompts}; "
            f"{show(self.room + self.kept_bytes)} is available",
            fix="\n".join(fixes) or "a smaller model",
        )


@contextlib.contextmanager
def explain_engine_oom(
    run: Run,
    decoder: ModelConfig,
    settings: EngineSettings,
    draft: PlannedDraft,
    explain: Callable[[EngineMemory, str], OutOfMemory],
) -> Iterator[None]:
    """Raise OutOfMemory if an engine does not fit the device.

    The plan is checked first, then what the device reports inside. An engine on a mesh of several
    devices has no plan.

    Args:
      run: the run.
      decoder: its model.
      settings: sizes of the engine.
      draft: what guesses tokens.
      explain: makes the error, of the memory and the moment at which it was seen.
    """
    on, available = _machine([]), memory_limit(run)
    if on is None or on.devices > 1 or available is None:
        yield
        return
    plan = functools.partial(
        forecast_serving,
        _settled(run, decoder),
        on,
        slots=settings.rows,
        context=settings.context,
        chunk=settings.chunk,
        is_int8=settings.is_int8,
        draft=draft,
        keeps_params=settings.keeps_params,
    )
    prefix_bytes = settings.prefix_bytes
    memory = EngineMemory(plan, available - prefix_bytes, prefix_bytes)
    if not memory.fits():
        raise explain(memory, "checked before anything is compiled")
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # Less than planned was available.
        reported = dataclasses.replace(memory, room=0.9 * plan().total_bytes)
        raise explain(reported, "reported by the device") from error


def serving_error(memory: EngineMemory, when: str) -> OutOfMemory:
    """Return the error of a server beyond the memory, with slots and a context that fit."""
    forecast, fixes = memory.plan(), []
    if most := memory.slots:
        fixes.append(f"--slots={most}")
    if (shorter := memory.fewer_tokens()) > 1:
        fixes.append(f"--context={shorter}    # with {forecast.slots} slots")
    if memory.kept_bytes and forecast.total_bytes <= memory.room + memory.kept_bytes:
        fixes.append("--prefix_mib=0")
    if forecast.draft_bytes and memory.fits(draft="lookup"):
        fixes.append("--draft=lookup    # needs no run")
    return memory.error(f"{forecast.slots} slots", when, fixes)


def texts_error(
    memory: EngineMemory,
    when: str,
    *,
    longest: int,
    has_draft: bool = False,
    fewer: str = "at most {} prompts at once",
    shorter: str = "--max_tokens={}",
) -> OutOfMemory:
    """Return the error of texts beyond the memory, see `serving_error`.

    Args:
      memory: the memory.
      when: the moment at which it was seen.
      longest: tokens of the longest prompt.
      has_draft: if a draft guesses tokens.
      fewer: fix with a number of texts at once; empty without such a setting.
      shorter: fix with a number of tokens of a text.
    """
    fixes = []
    if has_draft and memory.fits(draft=None):
        fixes.append("without --draft the text is the same")
    if fewer and (most := memory.slots):
        fixes.append(fewer.format(most))
    if tokens := memory.fewer_tokens(longest):
        fixes.append(shorter.format(tokens))
    return memory.error(f"{memory.plan().slots} texts", when, fixes)


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
