"""The platform that a program is compiled for."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_other: contextvars.ContextVar[str | None] = contextvars.ContextVar("backend", default=None)


def name() -> str:
    """Return the platform of the program being traced: `cpu`, `gpu` or `tpu`.

    It is the platform of this process's devices, except inside `of`.
    """
    return _other.get() or jax.default_backend()


@contextlib.contextmanager
def of(platform: str) -> Iterator[None]:
    """Trace programs in this context for a platform other than this process's devices.

    `jax.jit` does not know about it: a function that it traced before keeps its program.
    """
    token = _other.set(platform)
    try:
        yield
    finally:
        _other.reset(token)
