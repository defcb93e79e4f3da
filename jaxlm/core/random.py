"""Named key streams: every random number is a function of (seed, purpose, step)."""

import hashlib

import jax
from jax import Array
from jaxtyping import Int


def key(seed: int, name: str, step: int | Array = 0) -> Array:
    """Return the key of stream `name` at `step`.

    There is no state to save: a resumed run draws the same numbers as an uninterrupted one.

    Example:
        >>> dropout = key(seed=7, name="dropout", step=3)
        >>> bool(jax.random.bernoulli(dropout) == jax.random.bernoulli(key(7, "dropout", 3)))
        True
    """
    return jax.random.fold_in(stream(jax.random.key(seed), name), step)


def stream(root: Array, name: str) -> Array:
    """Return the key of stream `name`: `root` folded with 4 bytes of the name's sha256."""
    digest = hashlib.sha256(name.encode()).digest()
    return jax.random.fold_in(root, int.from_bytes(digest[:4], "big"))


@jax.jit
def draw_keys(root: Array, prompts: Int[Array, "N"], samples: Int[Array, "N"]) -> Array:
    """Return the key of each draw: `root` folded with the number of its prompt, then of its sample.

    Other draws do not change the key of a draw. `prompts` and `samples` are 0 to 2**32 - 1.
    """
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(jax.random.fold_in)(fold(root, prompts), samples)
