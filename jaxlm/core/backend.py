"""The kind of device that a program is made for."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_other: contextvars.ContextVar[str | None] = contextvars.ContextVar("backend", default=None)


def name() -> str:
    """The platform of the program that is being traced: `cpu`, `gpu` or `tpu`.

    That of this process's devices, but inside `of`.
    """
    return _other.get() or jax.default_backend()


@contextlib.contextmanager
def of(platform: str) -> Iterator[None]:
    """What is traced in here is compiled for another platform than this process computes on.

    `jax.jit` does not know of it: a function that it has traced before keeps its program.
    """
    token = _other.set(platform)
    try:
        yield
    finally:
        _other.reset(token)
