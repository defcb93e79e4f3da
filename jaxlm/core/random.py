"""Named key streams: every random number is a function of (seed, purpose, step)."""

import hashlib

import jax
from jax import Array


def key(seed: int, name: str, step: int | Array = 0) -> Array:
    """Return the key of stream `name` at `step`.

    There is no state to save: a resumed run draws the same numbers as an uninterrupted one.
    """
    return jax.random.fold_in(stream(jax.random.key(seed), name), step)


def stream(root: Array, name: str) -> Array:
    """Return the key of stream `name`: `root` folded with 4 bytes of the name's sha256."""
    return jax.random.fold_in(
        root, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    )
