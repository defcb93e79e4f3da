"""Token and position tables."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import parameter
from jaxlm.ops.matmul import matmul
from jaxlm.ops.row_product import Side, decode_layout
from jaxlm.parallel.rules import constrain


class Embedding(nnx.Module):
    """A table with a row for each id; the host checks their range, which JAX would clamp."""

    def __init__(self, rows: int, width: int, *, axis: str, key: Array, init: Initializer):
        self.precision, self.axis = init.precision, axis
        self.table = parameter(init.table(key, (rows, width)), axis, "embed")
        self._decode_table: Array | None = None  # a copy in the layout that `unembed` reads
        self._side: Side = 1

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the rows of `ids`.

        Each device looks all ids up in its part of the vocabulary, and the parts are summed. The
        width is gathered first: XLA would rather look up a part of the width for the ids of all
        fsdp devices, and send activations.
        """
        return _lookup(constrain(self.table[...], self.axis, None), ids)

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the dot products of `x` with every row, in float32: the tied output layer."""
        table = self._values() if self._decode_table is None else self._decode_table
        return matmul(x, table, self.precision, jnp.dtype(jnp.float32), self._side)

    def relayout_for_decode(self) -> None:
        """Add a copy of the table as in `Linear.relayout_for_decode`; for a trace."""
        table, self._side = decode_layout(self._values().astype(self.precision.compute), 1)
        self._decode_table = nnx.data(table)

    def _values(self) -> Float[Array, "V D"]:
        return self.table[...]


@jax.custom_vjp
def _lookup(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the rows of `ids`; their gradients are summed in float32 for any dtype."""
    return table.at[ids].get(mode="promise_in_bounds")


def _lookup_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    table, ids = residuals  # only shape and dtype of the table are read, so it is not stored
    summed = jnp.zeros(table.shape, jnp.float32)
    summed = summed.at[ids].add(grad.astype(jnp.float32), mode="promise_in_bounds")
    return summed.astype(table.dtype), None


_lookup.defvjp(lambda *inputs: (_lookup(*inputs), inputs), _lookup_backward)
