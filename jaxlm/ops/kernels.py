"""Which kernel computes attention, and why. Free of JAX, so that a config can be judged without it."""

from typing import Literal, NamedTuple

Kernel = Literal["reference", "blockwise", "ring"]
Wanted = Literal["auto", "reference", "blockwise"]

BLOCK = 256  # queries, and keys, that meet at a time; the best of 128, 256, 512 and 1024 on a CPU, see scripts/LOG.md
BLOCKWISE_FROM = 2 * BLOCK


class Choice(NamedTuple):
    """A kernel, and the reason in words."""

    kernel: Kernel
    reason: str


def choose(wanted: Wanted, *, length: int, dropout: float) -> Choice:
    """The kernel for whole rows of `length` tokens; `dropout` is that of the attention weights."""
    if wanted != "auto":
        return Choice(wanted, "as train.attention says")
    if dropout:
        return Choice("reference", "the others have no attention dropout")
    if length < BLOCKWISE_FROM:
        return Choice("reference", f"rows of {length} tokens are not two blocks of {BLOCK}")
    return Choice("blockwise", f"rows of {length} tokens, {BLOCK} queries and keys at a time")
