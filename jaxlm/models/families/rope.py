"""How rotary positions are written in a config.json. Free of JAX."""

import math
from typing import Any

from jaxlm.models.families.hub import Attributes
from jaxlm.nn.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoScaling,
    Rope,
    Scaling,
    YarnScaling,
)

KINDS = ("default", "linear", "llama3", "yarn")  # of scaling, as config.json calls them


def read(
    given: Attributes,
    *,
    theta: float = 10_000.0,
    share: float = 1.0,
    kinds: tuple[str, ...] = KINDS,
) -> Rope:
    """How heads are rotated; `theta` and `share` are what transformers takes where config.json names none.

    transformers 4 has `rope_theta` beside `rope_scaling`, transformers 5 both in `rope_parameters`.
    """
    theta = given.get("rope_theta", theta, kind=float)
    share = given.get("partial_rotary_factor", share, kind=float)
    scaling: Scaling | LongScaling = NoScaling()
    for name in ("rope_scaling", "rope_parameters"):
        inner = given.inner(name)
        if inner is not None:
            theta = inner.get("rope_theta", theta, kind=float)
            share = inner.get("partial_rotary_factor", share, kind=float)
            scaling = scaling_of(inner, given, kinds)
            inner.note_unused()
    return Rope(theta=theta, share=share, scaling=scaling)


def scaling_of(
    inner: Attributes, given: Attributes, kinds: tuple[str, ...] = KINDS
) -> Scaling | LongScaling:
    """The scaling in a `rope_scaling` or `rope_parameters`; what it lacks may be in the config around it."""
    kind = inner.get("rope_type", inner.get("type", "default", kind=str), kind=str)
    inner.ignore("type")
    if kind == "default":
        return NoScaling()
    if kind not in kinds:
        inner.expect("rope_type", *kinds)
        inner.expect("type", *kinds)
        return NoScaling()
    context = given.get("max_position_embeddings", 2048)
    if kind == "longrope":
        return _long(inner, given, context)
    factor = inner.get("factor", kind=(float, int))
    if kind == "linear":
        return LinearScaling(factor=float(factor))
    original = inner.get("original_max_position_embeddings", context)
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(factor),
            low=inner.get("low_freq_factor", 1.0, kind=float),
            high=inner.get("high_freq_factor", 4.0, kind=float),
            original=original,
        )
    magnitude = inner.get("attention_factor", None, kind=float)
    scale, all_dims = (inner.get(name, None, kind=float) for name in ("mscale", "mscale_all_dim"))
    if magnitude is None and scale and all_dims:
        magnitude = _magnitude(factor, scale) / _magnitude(factor, all_dims)
    return YarnScaling(
        factor=float(factor),
        fast=inner.get("beta_fast", 32.0, kind=float),
        slow=inner.get("beta_slow", 1.0, kind=float),
        original=original,
        magnitude=magnitude,
        truncate=inner.get("truncate", True, kind=bool),
    )


def _long(inner: Attributes, given: Attributes, context: int) -> LongScaling:
    name = "original_max_position_embeddings"
    original = inner.get(name, given.get(name, 4096), least=2)
    ways: dict[str, Any] = {}
    for own in ("short", "long"):
        numbers = inner.get(f"{own}_factor", kind=list)
        is_sound = isinstance(numbers, list) and all(
            isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers
        )
        if isinstance(numbers, list) and not is_sound:
            inner.reject(f"{own}_factor", "a list of numbers above 0")
        ways[own] = tuple(map(float, numbers)) if is_sound else ()
    found = LongScaling(**ways, original=original, factor=max(1.0, context / original))
    inner.expect("factor", None, found.factor)
    inner.expect("attention_factor", None, found.amplitude)
    return found


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def written(theta: float, scaling: Scaling | LongScaling) -> dict[str, Any]:
    """Attributes that `read` understands, as transformers 4 and 5 do."""
    match scaling:
        case NoScaling():
            return {"rope_theta": theta, "rope_scaling": None}
        case LinearScaling():
            own: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            own = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        case YarnScaling():
            own = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "original_max_position_embeddings": scaling.original,
                "truncate": scaling.truncate,
            }
            if scaling.magnitude is not None:
                own["attention_factor"] = scaling.magnitude
        case LongScaling():  # transformers 4 allows these three
            own = {
                "type": "longrope",
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
            }
            beside = {"original_max_position_embeddings": scaling.original}
            return {"rope_theta": theta, "rope_scaling": own, **beside}
    return {"rope_theta": theta, "rope_scaling": own}
