"""The one place where a weight meets an activation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.core.precision import Precision
from jaxlm.nn.init import Initializer
from jaxlm.ops import layouts
from jaxlm.ops.layouts import Side
from jaxlm.ops.matmul import grouped_matmul, matmul
from jaxlm.parallel.rules import constrain

# Parameters that know the names of their axes.


LOGICAL_AXES = "logical_axes"


def parameter(value: Array, *axes: str) -> nnx.Param:
    """A parameter whose dimensions carry logical axis names, for `parallel.rules`.

    The names are kept under our own key: Flax shards eagerly by its own `sharding_names`, which needs a mesh to build.
    """
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names for shape {value.shape}")
    return nnx.Param(value, logical_axes=axes)  # type: ignore[call-arg]


class Linear(nnx.Module):
    """y = x W + b from one or several input dimensions to one or several output dimensions.

    `ins` and `outs` are (logical axis, size) pairs: attention's query is `{"embed": D} -> {"heads": N, "head_dim": H}`.
    The weight keeps these dimensions, so that each can be split over its own mesh axis. `result` is the dtype that
    comes out, by default that of activations. With `is_gathered` every device multiplies with the whole weight, of which fsdp
    holds parts: for a weight that tensor does not split, which XLA would else put together over both axes (jax 0.12).
    """

    def __init__(
        self,
        ins: dict[str, int],
        outs: dict[str, int],
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
        bias: bool = False,
        ends_on_residual: bool = False,
        ends_outside: bool = False,
        result: jnp.dtype | None = None,
        is_gathered: bool = False,
    ):
        self.ins, self.outs = tuple(ins.values()), tuple(outs.values())
        self._is_gathered = is_gathered
        self.precision, self.result = precision, result
        self._side: Side = 0  # of the flat weight, on which the input is
        flat = (math.prod(self.ins), math.prod(self.outs))
        weight = init.weight(
            key, flat, ends_on_residual=ends_on_residual, ends_outside=ends_outside
        ).reshape(self.ins + self.outs)
        self.weight = parameter(weight, *ins, *outs)
        self.bias = parameter(jnp.zeros(self.outs, init.dtype), *outs) if bias else None

    def relayout_for_decode(self) -> None:
        """Holds the weight as this CPU reads it fastest for a few rows, in the dtype in which it is multiplied."""
        flat = self.weight[...].reshape(math.prod(self.ins), math.prod(self.outs))
        flat, self._side = layouts.for_few_rows(flat.astype(self.precision.compute), 0)
        self.weight = nnx.Param(flat)

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """2 x ins x outs FLOPs a token."""
        leading = x.shape[: x.ndim - len(self.ins)]
        weight = self.weight[...]
        if self._side == 0:
            weight = weight.reshape(math.prod(self.ins), math.prod(self.outs))
        if self._is_gathered:
            weight = constrain(weight, None, None)
        y = matmul(x.reshape(*leading, -1), weight, self.precision, self.result, self._side)
        y = y.reshape(*leading, *self.outs)
        if self.bias is None:
            return y
        # In float32, rounded once: the bias's gradient is a sum over all tokens, in the dtype of this addition.
        bias = self.bias[...].astype(jnp.float32).reshape((1,) * len(leading) + self.outs)
        return (y.astype(jnp.float32) + bias).astype(y.dtype)


class HeadLinear(Linear):
    """From what all heads share to a vector of each: y_n = x W_n.

    By head, too, for whoever would rather not make them of many x: q_n . y_n is (W_n q_n) . x, and what is summed of
    the y_n is W_n times what is summed of the x.
    """

    def relayout_for_decode(self) -> None:
        """Casts the weight only: by head it is read as it lies."""
        self.weight[...] = self.weight[...].astype(self.precision.compute)

    def asked(self, query: Float[Array, "B T N H"]) -> Float[Array, "B T N R"]:
        """What is multiplied with an x as each head's vector would be with its y. 2 N R H FLOPs a token."""
        return self._by_head("btnh,rnh->btnr", query)

    def of_each(self, x: Float[Array, "B T N R"]) -> Float[Array, "B T N H"]:
        """Each head's vector of an x of its own. 2 N R H FLOPs a token."""
        return self._by_head("btnr,rnh->btnh", x)

    def _by_head(self, terms: str, x: Array) -> Array:
        compute = self.precision.compute
        weight = self.weight[...].astype(compute)
        y = jnp.einsum(terms, x.astype(compute), weight, preferred_element_type=jnp.float32)
        return y.astype(x.dtype)


class GroupedLinear(nnx.Module):
    """Several linear maps without biases, one for each expert; row i of the input meets the weight of its group."""

    def __init__(
        self,
        experts: int,
        ins: dict[str, int],
        outs: dict[str, int],
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
        ends_on_residual: bool = False,
    ):
        self.precision = precision
        self.axes = ("experts", *ins, *outs)
        shape = (math.prod(ins.values()), math.prod(outs.values()))

        def weight(key: Array) -> Array:
            return init.weight(key, shape, ends_on_residual=ends_on_residual)

        self.weight = parameter(jax.vmap(weight)(jax.random.split(key, experts)), *self.axes)

    def relayout_for_decode(self) -> None:
        """Casts the weights, so that no product casts them again."""
        self.weight[...] = self.weight[...].astype(self.precision.compute)

    def __call__(
        self, x: Float[Array, "..."], weight: Float[Array, "E I O"], sizes: Array | None
    ) -> Float[Array, "..."]:
        """2 x ins x outs FLOPs a row. `weight` is what this device holds of ours; rows and sizes as in `grouped_matmul`."""
        return grouped_matmul(x, weight, sizes, self.precision)
