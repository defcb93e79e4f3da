"""Predicted memory and time of the rollouts of a run, by arithmetic alone. Free of JAX."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxlm.core import backend
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models.config import ModelConfig
from jaxlm.models.cost import model_cost
from jaxlm.monitor.chips import Machine
from jaxlm.parallel import logical
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import cpu_work
from jaxlm.rl import config as rl


class RolloutForecast(NamedTuple):
    """The plan of a rollout: bytes of a device besides the state, and seconds."""

    slots: int
    cache_bytes: float
    weights_bytes: float  # a second copy, in the layout of a token loop
    draw_seconds: tuple[float, float]
    rescore_seconds: tuple[float, float]  # of the trained program over the samples; 0 without

    @property
    def seconds(self) -> tuple[float, float]:
        """Lowest and highest seconds of a rollout."""
        low, high = map(sum, zip(self.draw_seconds, self.rescore_seconds, strict=True))
        return low, high

    def record(self, run: Run, *, is_timed: bool) -> dict[str, object]:
        """Return the JSON of the part `rollout` of a plan."""
        return {
            "samples": run.train.batch * run.rl.updates,
            "updates": run.rl.updates,
            "slots": self.slots,
            "cache_bytes_per_device": self.cache_bytes,
            "weights_bytes_per_device": self.weights_bytes,
            "draw_seconds": list(self.draw_seconds) if is_timed else None,
            "rescore_seconds": list(self.rescore_seconds) if is_timed else None,
        }


def forecast(
    run: Run,
    decoder: ModelConfig,
    machine: Machine,
    sizes: Sizes,
    held: Mapping[str, float],
    peak: float,
    reached: tuple[float, float],
    launch: tuple[float, float],
) -> RolloutForecast:
    """Return the plan of a rollout whose samples all have `rl.max_tokens` new tokens.

    Prompts fill the rest of a row. Shorter samples take less time: their slots are filled again.

    Args:
      run: the run.
      decoder: its model.
      machine: the devices.
      sizes: size of each mesh axis.
      held: bytes per device of the state, from `device_memory.held_bytes`.
      peak: operations of a device in a second.
      reached: lowest and highest share of the peak that products reach.
      launch: least and most seconds of the launches of a pass.
    """
    samples, ways = run.train.batch * run.rl.updates, logical.ways(sizes, "batch")
    slots = math.ceil(run.rl.slots_of(run.train.batch) / ways) * ways
    item = ITEM_BYTES[run.precision.compute_dtype]
    is_cpu = machine.chip.name == "cpu"
    cached = ITEM_BYTES[backend.cached_dtype(run.precision.compute_dtype, is_cpu=is_cpu)]
    row = model_cost.cache_bytes(decoder, run.data.sequence, element_bytes=cached)
    cache = row * slots / ways / logical.ways(sizes, "kv_heads")
    numbers = held["parameters"] / ITEM_BYTES[run.precision.params]
    weights = numbers * item if is_cpu else 0.0
    length, new = run.data.sequence, run.rl.max_tokens
    prompt = length - new
    passes = math.ceil(samples / slots) * new
    rows = _prompt_rows(run, samples, slots, ways) if machine.devices == 1 else samples
    # Forward passes: a prompt has the logits of its last token.
    whole = model_cost.flops_per_token(decoder, length, causal=True) / 3
    hidden = model_cost.flops_per_token(decoder, length, causal=True, has_logits=False) / 3
    compute = (hidden * rows * prompt + whole * passes * slots) / (machine.devices * peak)
    scored = (hidden * prompt + whole * new) * samples / (machine.devices * peak)
    if is_cpu:
        speed = machine.devices * machine.chip.flops["float32"]
        keys = prompt + new // 2
        begun = cpu_work.forward(decoder, prompt) * rows * prompt
        other = (begun + cpu_work.token(decoder, keys) * passes * slots) / speed
        read = numbers * item * passes / machine.chip.memory_speed
        low, high = (max(compute / share + other, read) for share in reversed(reached))
        scores = cpu_work.forward(decoder, length) * length * samples / speed
    else:
        read = (numbers * item + cache) * passes / machine.chip.memory_speed
        low = max(compute / reached[1], read) + passes * launch[0]
        high = compute / reached[0] + read + passes * launch[1]
        scores = 0.0
    rescored = [run.rescores_rollouts * (scored / share + scores) for share in reversed(reached)]
    return RolloutForecast(slots, cache, weights, (low, high), (rescored[0], rescored[1]))


def _prompt_rows(run: Run, samples: int, slots: int, ways: int) -> int:
    """Return the rows of prompts that are read if all samples end at the same length."""
    size = rl.refilled(slots, ways)
    refills = math.ceil(max(samples - slots, 0) / size)
    each = run.rl.samples
    return rl.prompt_rows(slots, each) + refills * rl.prompt_rows(size, each)
