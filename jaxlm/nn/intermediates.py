"""Intermediates that layers record in a trace (Flax: `sow`); off by default.

Captured values are tracers: return them from the traced function, before a scan or gradient ends.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

# "weights" and "streams" are whole arrays, for one batch: attention weights [B, N, T, S], and the
# residual stream [B, T, D] before the first layer and after each layer.
Kind = Literal["activations", "entropy", "logits", "streams", "weights"]


class Intermediates(NamedTuple):
    """Arrays by name; those of a stack are `stack/0/name`, [L, ...] for all layers of a kind."""

    sums: dict[str, Array]  # added up over micro-batches
    peaks: dict[str, Array]  # maximum over micro-batches

    def __add__(self, other: Self) -> Self:  # type: ignore[override]
        return type(self)(
            jax.tree.map(jnp.add, self.sums, other.sums),
            jax.tree.map(jnp.maximum, self.peaks, other.peaks),
        )


_active: ContextVar[tuple[frozenset[Kind], Intermediates] | None] = ContextVar(
    "intermediates", default=None
)


@contextlib.contextmanager
def capture(kinds: Collection[Kind]) -> Iterator[Intermediates]:
    """Capture intermediates of these kinds; they are complete when the block ends."""
    captured = Intermediates({}, {})
    token = _active.set((frozenset(kinds), captured) if kinds else None)
    try:
        yield captured
    finally:
        _active.reset(token)


@contextlib.contextmanager
def capture_layer() -> Iterator[Intermediates]:
    """Capture the intermediates of one layer separately, of the kinds captured outside."""
    active = _active.get()
    with capture(active[0] if active else ()) as captured:
        yield captured


def is_captured(kind: Kind) -> bool:
    """Return whether intermediates of this kind are captured."""
    active = _active.get()
    return active is not None and kind in active[0]


def record_sum(name: str, value: Array) -> None:
    """Record a sum; call it only if its kind is captured."""
    _record("sums", name, value)


def record_peak(name: str, value: Array) -> None:
    """Record a maximum; call it only if its kind is captured."""
    _record("peaks", name, value)


def record_stack(stack: str, kinds: Mapping[str, Intermediates]) -> None:
    """Record the intermediates of a stack's layers, given by kind of layer."""
    for kind, layers in kinds.items():
        for name, value in layers.sums.items():
            record_sum(f"{stack}/{kind}/{name}", value)
        for name, value in layers.peaks.items():
            record_peak(f"{stack}/{kind}/{name}", value)


def _record(part: Literal["sums", "peaks"], name: str, value: Array) -> None:
    active = _active.get()
    assert active is not None, f"{name} is not captured"
    values = getattr(active[1], part)
    if name in values:
        raise ValueError(f"intermediate {name} is recorded twice")
    values[name] = lax.stop_gradient(value)
