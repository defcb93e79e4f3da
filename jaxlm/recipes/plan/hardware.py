"""Mesh and micro-batches of a shipped config by the name of the hardware: `8gpu`, `v5e-16`."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxlm.core import config, shipped
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import nearest_word
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling.plan import STATE_BYTES

Layout = tuple[dict[str, int], int]
MAX_STATE_SHARE = 0.7  # of the memory; gathered layers, activations and logits need the rest


def layout(layouts: Mapping[str, Layout], hardware: str, c: Any, file: str) -> Layout:
    """Return the mesh and the micro-batches for `hardware` from the table of a config file.

    Raises ConfigError if the table has none; the error reports if the state of `c`, the file's
    ConfigDict, would fit, and the nearest layouts.

    Example:
      >>> layout({"8gpu": ({"fsdp": 8}, 1)}, "8gpu", config.new(Run), "configs/mine.py")
      ({'fsdp': 8}, 1)
    """
    if hardware in layouts:
        return layouts[hardware]
    available = memory_bytes(hardware)
    if available is None:
        why = "hardware is a number of GPUs, such as 8gpu, or a slice of TPUs, such as v5p-128"
        near = nearest_word(hardware, layouts)
        offered = [near] if near else list(layouts)
    else:
        decoder = config.from_json(Run, c.to_dict(), file).model.build()
        needed = STATE_BYTES * model_cost.parameters(decoder)
        state = f"weights, gradients and moments take {needed / 1e9:,.0f} GB"
        verdict = ": it fits, with --config.mesh settings"
        if MAX_STATE_SHARE * available < needed:
            verdict = ", and activations need some too"
        why = f"{state}; {hardware} has {available / 1e9:,.0f} GB{verdict}"
        offered = sorted(layouts, key=lambda name: _distance(name, hardware))
    named = shipped.flag_value(file)
    raise ConfigError(
        f"{named} has no layout for {hardware}",
        where=f"--config={named}:{hardware}",
        why=f"{why}\nthe file has layouts for {', '.join(layouts)}",
        fix="\n".join(f"--config={named}:{each}" for each in offered[:4]),
    )


def memory_bytes(hardware: str) -> float | None:
    """Return the memory of GPUs of 80 GB (`8gpu`) or of a TPU slice; None for another name."""
    if gpus := re.fullmatch(r"([1-9][0-9]{0,4})gpu", hardware):
        return int(gpus[1]) * chips.CHIPS["h100"].memory_bytes
    slice_ = chips.SLICES.get(hardware)
    return slice_.devices * slice_.chip.memory_bytes if slice_ else None


def _distance(one: str, other: str) -> tuple[bool, float]:
    """Order GPUs nearer to GPUs than to TPUs; then by the ratio of the memories."""
    one_bytes, other_bytes = memory_bytes(one), memory_bytes(other)
    assert one_bytes is not None
    assert other_bytes is not None
    return one.endswith("gpu") != other.endswith("gpu"), abs(math.log(one_bytes / other_bytes))
