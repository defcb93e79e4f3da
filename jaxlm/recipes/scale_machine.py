"""What a budget takes on a machine: days, and room for the state."""

import math
from typing import Any

from jaxlm.monitor import chips, words
from jaxlm.monitor.chips import Dtype, Machine
from jaxlm.recipes import plan

STATE_BYTES = 16  # a parameter: float32 weights, gradients, and two moments


def spend(
    on: Machine,
    flops: float,
    parameters: float,
    dtype: Dtype,
    assumed: list[str],
    risks: list[str],
) -> dict[str, Any]:
    """Days of training (None for a chip of unknown speed), and whether the machine holds the state; if not, the nearest that does.

    Args:
      dtype: of the products.
      assumed, risks: to which lines are added.
    """
    peak = on.devices * plan.peak_flops(dtype, on.chip, assumed)
    low, high = plan.REACHED["cpu" if on.chip.name == "cpu" else "accelerator"]
    if on.chip.is_known:
        assumed.append(
            f"training reaches an MFU between {low:.0%} and {high:.0%} of {peak / 1e12:.3g} TFLOP/s in {dtype}"
        )
    there = on.devices * plan.memory_bytes(on, assumed)
    needed = STATE_BYTES * parameters
    assumed.append(
        f"{STATE_BYTES} bytes a parameter, split over all devices: float32 weights, gradients and two moments; activations come on top"
    )
    nearest = None if needed <= there else _roomier(on, needed)
    if nearest:
        risks.append(f"{words.size(needed)} of state do not fit {on.name}: --on={nearest} has room")
    return {
        "on": on.name,
        "devices": on.devices,
        "days": [flops / (peak * share) / 86400 for share in (high, low)]
        if on.chip.is_known
        else None,
        "state_bytes": needed,
        "memory_bytes": there,
        "fits": needed <= there,
        "nearest": nearest,
    }


def _roomier(on: Machine, needed: float) -> str:
    """The smallest machine with room for so many bytes: of the same chip, or of H200s where slices end before."""
    slices = [each for each in chips.SLICES.values() if each.chip == on.chip]
    roomy = [each for each in slices if each.devices * plan.memory_bytes(each, []) >= needed]
    if roomy:
        return min(roomy, key=lambda each: each.devices).name
    is_joined = not on.chip.is_tpu and on.chip.name != "cpu"
    chip = on.chip if is_joined else chips.CHIPS["h200"]
    one = plan.memory_bytes(Machine(name=chip.name, chip=chip, devices=1), [])
    return f"{chip.name}x{math.ceil(needed / one)}"
