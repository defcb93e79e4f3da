"""Token and position tables."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core.precision import Precision
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import parameter
from jaxlm.ops import layouts
from jaxlm.ops.layouts import Side
from jaxlm.ops.matmul import matmul
from jaxlm.parallel.rules import constrain


class Embedding(nnx.Module):
    """A table with one row for each id. Ids must lie in the table: JAX would clamp the others silently, so the host checks."""

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        axis: str,
        key: Array,
        init: Initializer,
        precision: Precision,
    ):
        self.precision, self.axis = precision, axis
        self.table = parameter(init.table(key, (rows, width)), axis, "embed")
        self._settled: Array | None = None  # the table again, as `unembed` reads it
        self._side: Side = 1

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The rows of `ids`.

        Each device looks its own ids up in its part of the vocabulary, and the parts are summed. The width is made whole
        before: the compiler would rather look up a part of it for the ids of all fsdp devices, and send activations.
        """
        table = constrain(self.table[...], self.axis, None)
        return _rows(table, ids)

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The dot product of `x` with every row, in float32: the tied output layer."""
        table = self.table[...] if self._settled is None else self._settled
        return matmul(x, table, self.precision, jnp.dtype(jnp.float32), self._side)

    def settle(self) -> None:
        """Keeps the table also as this CPU multiplies a few rows with it fastest, as `Linear.settle` does; for a trace."""
        cast = self.table[...].astype(self.precision.compute)
        settled, self._side = layouts.for_few_rows(cast, 1)
        self._settled = nnx.data(settled)


@jax.custom_vjp
def _rows(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the rows of `ids`; their gradients are summed in float32, whatever the table's dtype."""
    return table.at[ids].get(mode="promise_in_bounds")


def _rows_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows(table, ids), (table, ids)


def _rows_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    table, ids = kept  # of the table only its shape and dtype, so it is not kept in memory
    summed = jnp.zeros(table.shape, jnp.float32)
    summed = summed.at[ids].add(grad.astype(jnp.float32), mode="promise_in_bounds")
    return summed.astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)
