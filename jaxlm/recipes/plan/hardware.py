"""What a shipped config is laid out for: a mesh and micro-batches by the name of the hardware, `8gpu` or `v5e-16`."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.provenance import short
from jaxlm.core.spelling import nearest
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling.plan import STATE_BYTES

Layout = tuple[dict[str, int], int]
FULLEST = 0.7  # of the memory, with the state alone: gathered layers, activations and logits need the rest


def layout(layouts: Mapping[str, Layout], hardware: str, c: Any, file: str) -> Layout:
    """The mesh and the micro-batches that a config, the ConfigDict `c` of a file, has for hardware.

    Raises:
      ConfigError: where it has none: whether the state would fit, and the nearest hardware that it has one for.
    """
    if hardware in layouts:
        return layouts[hardware]
    there = memory_bytes(hardware)
    if there is None:
        why = "it is neither a number of GPUs, such as 8gpu, nor a slice of TPUs, such as v5p-128"
        near = nearest(hardware, layouts)
        offered = [near] if near else list(layouts)
    else:
        needed = STATE_BYTES * model_cost.parameters(
            config.from_json(Run, c.to_dict(), file).model.build()
        )
        why = f"weights, gradients and moments take {needed / 1e9:,.0f} GB; {hardware} has {there / 1e9:,.0f} GB"
        why += (
            ", and activations need some too"
            if FULLEST * there < needed
            else ": it fits, with a mesh of your own"
        )
        offered = sorted(layouts, key=lambda name: _distance(name, hardware))
    raise ConfigError(
        f"{short(file)} has no layout for {hardware}",
        where=f"--config={short(file)}:{hardware}",
        why=f"{why}\nthere are layouts for {', '.join(layouts)}",
        fix="\n".join(f"--config={short(file)}:{each}" for each in offered[:4]),
    )


def memory_bytes(hardware: str) -> float | None:
    """What so many GPUs of 80 GB, as in `8gpu`, or a slice of TPUs have together; None where the name is of neither."""
    if found := re.fullmatch(r"([1-9][0-9]{0,4})gpu", hardware):
        return int(found[1]) * chips.CHIPS["h100"].memory_bytes
    known = chips.SLICES.get(hardware)
    return known.devices * known.chip.memory_bytes if known else None


def _distance(one: str, other: str) -> tuple[bool, float]:
    """GPUs are nearer to GPUs than to TPUs; then by the ratio of their memories."""
    here, there = memory_bytes(one), memory_bytes(other)
    assert here is not None
    assert there is not None
    return one.endswith("gpu") != other.endswith("gpu"), abs(math.log(here / there))
