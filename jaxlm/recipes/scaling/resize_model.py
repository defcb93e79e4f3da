"""Settings and decoder of a run's model at another width of its family. Free of JAX.

Example:
  >>> settings_at_width(Run(), 2 * Run().model.width)
  {'model.width': 1024, 'model.depth': 16, 'model.heads': 16, 'model.kv_heads': 16}
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxlm.core.nearest import nearest_divisors
from jaxlm.models.config import EncoderDecoderConfig, OneStack
from jaxlm.models.cost import model_cost
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.recipes.scaling.loss_law import Costs

UNIT = 8  # widths are multiples of it
MAX_WIDTH = 2**15
INNER = ("hidden", "shared", "dense_hidden", "query_rank", "kv_rank")


def settings_at_width(run: Run, width: int) -> dict[str, int]:
    """Return the model settings that change with the width, by path.

    Depth and heads scale with the width, and head size stays; if heads of that size do not divide
    the width, the nearest size that does is used. MLPs keep their ratio to the width, query groups
    their size. The width of the run itself changes nothing.
    """
    model = run.model
    share = width / model.width
    if share == 1:
        return {}
    heads = max(1, round(model.heads * share))
    if getattr(model, "head_dim", "auto") == "auto":
        # Heads are rotated in pairs.
        heads = next(n for n in nearest_divisors(width, heads) if width // n % 2 == 0)
    sizes = {"width": width, "depth": max(1, round(model.depth * share)), "heads": heads}
    kv_heads = getattr(model, "kv_heads", "auto")
    if isinstance(kv_heads, int):
        grouped = round(heads * kv_heads / model.heads)
        sizes["kv_heads"] = nearest_divisors(heads, max(1, grouped))[0]
    for name in INNER:
        if isinstance(inner := getattr(model, name, None), int) and inner:
            sizes[name] = max(UNIT, round(inner * share / UNIT) * UNIT)
    if dense := getattr(model, "dense_depth", 0):
        sizes["dense_depth"] = min(dense, sizes["depth"] - 1)
    return {f"model.{name}": size for name, size in sizes.items() if size != getattr(model, name)}


def decoder(run: Run, vocab: int, width: int) -> OneStack:
    """Return the model at a width."""
    changed = settings_at_width(run, width)
    sizes: dict[str, Any] = {path.partition(".")[2]: size for path, size in changed.items()}
    built = dataclasses.replace(run.model, vocab=vocab, **sizes).build()
    if isinstance(built, EncoderDecoderConfig):
        raise divisibility.unscaled(run)
    return built


@functools.lru_cache(maxsize=4)
def costs(run: Run, vocab: int) -> Costs:
    """Return active parameters and training FLOPs per token over all widths of the family."""
    powers = [UNIT * 2**power for power in range((MAX_WIDTH // UNIT).bit_length())]
    widths = sorted({*powers, *(3 * width // 2 for width in powers[1:])})
    shapes, length = [decoder(run, vocab, width) for width in widths], run.data.sequence
    parameters = [model_cost.active_parameters(each) for each in shapes]
    flops = [model_cost.flops_per_token(each, length, causal=True) for each in shapes]
    return Costs(np.array(parameters, np.float64), np.array(flops))


def nearest(run: Run, vocab: int, parameters: float) -> int:
    """Return the width, a multiple of head size, or of 8 if narrow, with about `parameters`."""
    head = run.model.width // run.model.heads

    def size(width: int) -> int:
        return model_cost.active_parameters(decoder(run, vocab, width))

    unit = head if head % UNIT == 0 and size(8 * head) <= parameters else UNIT
    low, high = 1, MAX_WIDTH // unit
    while low < high:  # the first that is at least as large
        middle = (low + high) // 2
        low, high = (middle + 1, high) if size(middle * unit) < parameters else (low, middle)
    candidates = [unit * each for each in (low - 1, low) if each > 0]
    return min(candidates, key=lambda width: abs(np.log(size(width) / parameters)))
