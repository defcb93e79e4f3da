"""What layers note about themselves while a program is traced, where somebody asked for it.

Nobody asks in training, evaluation and generation: there the program is the one without notes. A note is an array of the
program that is traced, so whoever takes notes gives them back from the very function that he traces, before a scan or a
gradient ends.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

Kind = Literal["activations", "entropy", "logits"]


class Intermediates(NamedTuple):
    """Arrays by name; in a stack those of all layers of a kind, [L, ...], under `stack/0/name`."""

    sums: dict[str, Array]  # micro-batches add theirs
    peaks: dict[str, Array]  # the largest counts

    def __add__(self, other: Self) -> Self:  # type: ignore[override]
        return type(self)(
            jax.tree.map(jnp.add, self.sums, other.sums),
            jax.tree.map(jnp.maximum, self.peaks, other.peaks),
        )


_open: ContextVar[tuple[frozenset[Kind], Intermediates] | None] = ContextVar("notes", default=None)


@contextlib.contextmanager
def capture(kinds: Collection[Kind]) -> Iterator[Intermediates]:
    """Notes of these kinds, which are whole when the block ends."""
    notes = Intermediates({}, {})
    token = _open.set((frozenset(kinds), notes) if kinds else None)
    try:
        yield notes
    finally:
        _open.reset(token)


@contextlib.contextmanager
def capture_layer() -> Iterator[Intermediates]:
    """What is noted in the block apart from the rest, of the kinds that are asked for."""
    asked = _open.get()
    with capture(asked[0] if asked else ()) as notes:
        yield notes


def is_captured(kind: Kind) -> bool:
    """Whether somebody takes notes of this kind."""
    asked = _open.get()
    return asked is not None and kind in asked[0]


def record_sum(name: str, value: Array) -> None:
    """Notes a sum; only where it is asked for."""
    _put("sums", name, value)


def record_peak(name: str, value: Array) -> None:
    """Notes a maximum; only where it is asked for."""
    _put("peaks", name, value)


def put(stack: str, kinds: Mapping[str, Intermediates]) -> None:
    """Notes what the layers of a stack noted, by their kind."""
    for kind, notes in kinds.items():
        for name, value in notes.sums.items():
            record_sum(f"{stack}/{kind}/{name}", value)
        for name, value in notes.peaks.items():
            record_peak(f"{stack}/{kind}/{name}", value)


def _put(part: Literal["sums", "peaks"], name: str, value: Array) -> None:
    asked = _open.get()
    assert asked is not None, f"nobody asked for {name}"
    notes = getattr(asked[1], part)
    if name in notes:
        raise ValueError(f"{name} is noted twice")
    notes[name] = lax.stop_gradient(value)
