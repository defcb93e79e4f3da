"""Rotary positions in a config.json. Free of JAX."""

import math
from typing import Any

from jaxlm.models.families.hub import Attributes, ConfigKey, read_settings, write_settings
from jaxlm.nn import rotary
from jaxlm.nn.rotary import LongScaling, NoScaling, Rope, Scaling

ORIGINAL = "original_max_position_embeddings"
# Attributes of each kind of scaling, by transformers' name of the kind and our setting.
TABLES: dict[str, tuple[Any, dict[str, ConfigKey]]] = {
    "linear": (rotary.LinearScaling, {"factor": ConfigKey("factor", kind=float)}),
    "llama3": (
        rotary.Llama3Scaling,
        {
            "factor": ConfigKey("factor", kind=float),
            "low": ConfigKey("low_freq_factor", 1.0, kind=float),
            "high": ConfigKey("high_freq_factor", 4.0, kind=float),
            "original": ConfigKey(ORIGINAL),
        },
    ),
    "yarn": (
        rotary.YarnScaling,
        {
            "factor": ConfigKey("factor", kind=float),
            "fast": ConfigKey("beta_fast", 32.0, kind=float),
            "slow": ConfigKey("beta_slow", 1.0, kind=float),
            "original": ConfigKey(ORIGINAL),
            "magnitude": ConfigKey("attention_factor", None, kind=float),
            "truncate": ConfigKey("truncate", True, kind=bool),
        },
    ),
}
KINDS = ("default", *TABLES)


def read(
    attributes: Attributes,
    *,
    theta: float = 10_000.0,
    share: float = 1.0,
    kinds: tuple[str, ...] = KINDS,
) -> Rope:
    """Return the rotary position embedding of a config.json.

    transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 both in `rope_parameters`.
    `theta` and `share` are transformers' defaults of the base and of the rotated part of a head.
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
    max_positions = attributes.get("max_position_embeddings", 2048)
    if kind == "longrope":
        return _long(inner, attributes, max_positions)
    make, table = TABLES[kind]
    settings = read_settings(inner, table, {"original": max_positions})
    if kind == "yarn":
        names = ("mscale", "mscale_all_dim")
        scale, all_dims = (inner.get(name, None, kind=float) for name in names)
        if settings["magnitude"] is None and scale and all_dims:
            sizes = (_magnitude(settings["factor"], each) for each in (scale, all_dims))
            settings["magnitude"] = next(sizes) / next(sizes)
    return make(**settings | {"factor": float(settings["factor"])})


def _long(inner: Attributes, attributes: Attributes, max_positions: int) -> LongScaling:
    original = inner.get(ORIGINAL, attributes.get(ORIGINAL, 4096), least=2)
    factors: dict[str, Any] = {}
    for part in ("short", "long"):
        numbers = inner.get(f"{part}_factor", kind=list)
        is_valid = isinstance(numbers, list) and all(
            isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers
        )
        if isinstance(numbers, list) and not is_valid:
            inner.reject(f"{part}_factor", "a list of numbers above 0")
        factors[part] = tuple(map(float, numbers)) if is_valid else ()
    scaling = LongScaling(**factors, original=original, factor=max(1.0, max_positions / original))
    inner.expect("factor", None, scaling.factor)
    inner.expect("attention_factor", None, scaling.amplitude)
    return scaling


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def written(theta: float, scaling: Scaling | LongScaling) -> dict[str, Any]:
    """Return the attributes of a rotary embedding in a form that transformers 4 and 5 read."""
    more: dict[str, Any] = {}
    inner: dict[str, Any] | None = None
    if isinstance(scaling, LongScaling):  # transformers 4 allows these three
        short, long = list(scaling.short), list(scaling.long)
        inner = {"type": "longrope", "short_factor": short, "long_factor": long}
        more = {ORIGINAL: scaling.original}
    for kind, (arm, table) in TABLES.items():
        if isinstance(scaling, arm):
            settings = write_settings(scaling, table).items()
            inner = {"rope_type": kind} | {k: v for k, v in settings if v is not None}
    return {"rope_theta": theta, "rope_scaling": inner, **more}
