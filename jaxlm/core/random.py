"""Named key streams: every random number is a function of (seed, what it is for, which step)."""

import hashlib

import jax
from jax import Array


def key(seed: int, name: str, step: int | Array = 0) -> Array:
    """The key of stream `name` at `step`.

    Nothing is carried from step to step, so nothing has to be saved: a resumed run draws what the unbroken run drew.
    """
    return jax.random.fold_in(stream(jax.random.key(seed), name), step)


def stream(root: Array, name: str) -> Array:
    """A key that only `name` uses: `root` folded with the first four bytes of the name's sha256."""
    return jax.random.fold_in(
        root, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    )
