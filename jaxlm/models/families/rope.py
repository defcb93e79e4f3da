"""Rotary positions in a config.json. Free of JAX."""

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

KINDS = ("default", "linear", "llama3", "yarn")  # of scaling, by transformers' names


def read(
    attributes: Attributes,
    *,
    theta: float = 10_000.0,
    share: float = 1.0,
    kinds: tuple[str, ...] = KINDS,
) -> Rope:
    """Return the rotary position embedding of a config.json.

    transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 both in `rope_parameters`.

    Args:
      attributes: of the config.json.
      theta: transformers' default of the base.
      share: transformers' default of the rotated fraction of a head.
      kinds: of scaling that are accepted.
    """
    theta = attributes.get("rope_theta", theta, kind=float)
    share = attributes.get("partial_rotary_factor", share, kind=float)
    scaling: Scaling | LongScaling = NoScaling()
    for name in ("rope_scaling", "rope_parameters"):
        inner = attributes.inner(name)
        if inner is not None:
            theta = inner.get("rope_theta", theta, kind=float)
            share = inner.get("partial_rotary_factor", share, kind=float)
            scaling = scaling_of(inner, attributes, kinds)
            inner.note_unused()
    return Rope(theta=theta, share=share, scaling=scaling)


def scaling_of(
    inner: Attributes, attributes: Attributes, kinds: tuple[str, ...] = KINDS
) -> Scaling | LongScaling:
    """Return the scaling of a `rope_scaling` or `rope_parameters` inside of `attributes`."""
    kind = inner.get("rope_type", inner.get("type", "default", kind=str), kind=str)
    inner.ignore("type")
    if kind == "default":
        return NoScaling()
    if kind not in kinds:
        inner.expect("rope_type", *kinds)
        inner.expect("type", *kinds)
        return NoScaling()
    context = attributes.get("max_position_embeddings", 2048)
    if kind == "longrope":
        return _long(inner, attributes, context)
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


def _long(inner: Attributes, attributes: Attributes, context: int) -> LongScaling:
    name = "original_max_position_embeddings"
    original = inner.get(name, attributes.get(name, 4096), least=2)
    factors: dict[str, Any] = {}
    for part in ("short", "long"):
        numbers = inner.get(f"{part}_factor", kind=list)
        is_valid = isinstance(numbers, list) and all(
            isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers
        )
        if isinstance(numbers, list) and not is_valid:
            inner.reject(f"{part}_factor", "a list of numbers above 0")
        factors[part] = tuple(map(float, numbers)) if is_valid else ()
    scaling = LongScaling(**factors, original=original, factor=max(1.0, context / original))
    inner.expect("factor", None, scaling.factor)
    inner.expect("attention_factor", None, scaling.amplitude)
    return scaling


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def written(theta: float, scaling: Scaling | LongScaling) -> dict[str, Any]:
    """Return the attributes of a rotary embedding in a form that transformers 4 and 5 read."""
    match scaling:
        case NoScaling():
            return {"rope_theta": theta, "rope_scaling": None}
        case LinearScaling():
            attributes: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            attributes = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        case YarnScaling():
            attributes = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "original_max_position_embeddings": scaling.original,
                "truncate": scaling.truncate,
            }
            if scaling.magnitude is not None:
                attributes["attention_factor"] = scaling.magnitude
        case LongScaling():  # transformers 4 allows these three
            attributes = {
                "type": "longrope",
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
            }
            original = {"original_max_position_embeddings": scaling.original}
            return {"rope_theta": theta, "rope_scaling": attributes, **original}
    return {"rope_theta": theta, "rope_scaling": attributes}
