"""Linear maps: the one place where a weight meets an activation."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.nn.init import Initializer
from jaxlm.ops import integer_product
from jaxlm.ops.matmul import group_tile, grouped_matmul, matmul
from jaxlm.ops.row_product import Side, decode_layout, decode_side, is_one_cpu
from jaxlm.ops.weight_codes import WeightFormat
from jaxlm.parallel.rules import constrain

LOGICAL_AXES = "logical_axes"


def parameter(value: Array, *axes: str) -> nnx.Param:
    """Return a parameter with a logical axis name for each dimension, for `parallel.rules`.

    The names have a key of their own: Flax's `sharding_names` shards eagerly and needs a mesh.
    """
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names for shape {value.shape}")
    return nnx.Param(value, logical_axes=axes)  # type: ignore[call-arg]


class Product(NamedTuple):
    """Dtype of y, by default that of activations, and the layout of the weight in x W.

    If `is_gathered`, fsdp gathers the weight before the product: for a weight that tensor does not
    split, which XLA would gather over both axes (jax 0.12).
    """

    result: jnp.dtype | None = None
    is_gathered: bool = False


PLAIN = Product()


class Linear(nnx.Module):
    """y = x W + b from one or several input dimensions to one or several output dimensions.

    `ins` and `outs` map logical axes to sizes: attention's query is
    `{"embed": D} -> {"heads": N, "head_dim": H}`. The weight keeps these dimensions, so each can
    be split over its own mesh axis.
    """

    codes: nnx.Param  # they and `scales` replace the weight, see `relayout_for_decode`
    scales: nnx.Param

    def __init__(
        self,
        ins: dict[str, int],
        outs: dict[str, int],
        *,
        key: Array,
        init: Initializer,
        bias: bool = False,
        product: Product = PLAIN,
    ):
        self.ins, self.outs = tuple(ins.values()), tuple(outs.values())
        self._is_gathered = product.is_gathered
        self.precision, self.result = init.precision, product.result
        self._side: Side = 0  # the input's axis of the flat weight
        flat = (math.prod(self.ins), math.prod(self.outs))
        weight = init.weight(key, flat).reshape(self.ins + self.outs)
        self.weight: Any = parameter(weight, *ins, *outs)
        self.bias = parameter(jnp.zeros(self.outs, init.dtype), *outs) if bias else None

    def relayout_for_decode(self) -> None:
        """Cast the weight to the compute dtype, in the layout fastest for a few rows.

        A weight that its products round is rounded once, as a stored one; for products of integers
        its codes and scales replace it.
        """
        flat = self._flat()
        if self.precision.qat != "none":
            format = integer_product.FORMATS[self.precision.qat]
            if integer_product.is_integer(format):
                self._side = decode_side() if is_one_cpu() else 0
                for name, leaf in format.quantize(flat).items():
                    setattr(self, name, nnx.Param(leaf.T if self._side else leaf))
                self.weight = None
                return
            flat = format.dequantize(format.quantize(flat), len(flat))
            self.precision = self.precision.exact
        flat, self._side = decode_layout(flat.astype(self.precision.compute), 0)
        self.weight = nnx.Param(flat)

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs 2 x ins x outs FLOPs a token."""
        return self._with_bias(self._product(x))

    def _product(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        leading = x.shape[: x.ndim - len(self.ins)]
        x = x.reshape(*leading, -1)
        if self.weight is None:
            leaves = {"codes": self.codes[...], "scales": self.scales[...]}
            format = integer_product.FORMATS[self.precision.qat]
            return self._integer_product(x, leaves, format)
        weight = self.weight[...] if self._side else self._flat()
        if self._is_gathered:
            weight = constrain(weight, None, None)
        if self.precision.qat == "none":
            y = matmul(x, weight, self.precision, self.result, self._side)
        else:
            y = integer_product.qat_matmul(x, weight, self.precision, self.result)
        return y.reshape(*leading, *self.outs)

    def _integer_product(
        self, x: Float[Array, "B T I"], leaves: dict[str, Array], format: WeightFormat
    ) -> Float[Array, "B T ..."]:
        dtype = self.result or self.precision.activations
        y = integer_product.integer_product(x, leaves, format, dtype, self._side)
        return y.reshape(*x.shape[:-1], *self.outs)

    def _flat(self) -> Float[Array, "I O"]:
        return self.weight[...].reshape(math.prod(self.ins), math.prod(self.outs))

    def _with_bias(self, y: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        if self.bias is None:
            return y
        # In float32, rounded once: the bias's gradient is a sum over all tokens, in the dtype of
        # this addition.
        leading = (1,) * (y.ndim - len(self.outs))
        bias = self.bias[...].astype(jnp.float32).reshape(leading + self.outs)
        return (y.astype(jnp.float32) + bias).astype(y.dtype)


class HeadLinear(Linear):
    """Per-head projection y_n = x W_n of an input that all heads share.

    Its two methods are the weight absorption of latent attention, which avoids y_n of many x:
    q_n . y_n = (W_n q_n) . x, and a weighted sum of y_n is W_n times the weighted sum of x.
    """

    def relayout_for_decode(self) -> None:
        """Cast the weight only: the per-head products read it in its own layout."""
        self.weight = nnx.Param(self.weight[...].astype(self.precision.compute))

    def absorb_query(self, query: Float[Array, "B T N H"]) -> Float[Array, "B T N R"]:
        """Return W_n q_n, to be multiplied with x. 2 N R H FLOPs a token."""
        return self._per_head("btnh,rnh->btnr", query)

    def project_heads(self, x: Float[Array, "B T N R"]) -> Float[Array, "B T N H"]:
        """Return y_n of an x for each head. 2 N R H FLOPs a token."""
        return self._per_head("btnr,rnh->btnh", x)

    def _per_head(self, equation: str, x: Array) -> Array:
        compute = self.precision.compute
        weight = self._flat().reshape(self.ins + self.outs).astype(compute)
        y = jnp.einsum(equation, x.astype(compute), weight, preferred_element_type=jnp.float32)
        return y.astype(x.dtype)


class GroupedLinear(nnx.Module):
    """One linear map without a bias for each expert; each group of rows meets its own weight."""

    def __init__(
        self,
        experts: int,
        ins: dict[str, int],
        outs: dict[str, int],
        *,
        key: Array,
        init: Initializer,
    ):
        self.precision = init.precision
        self._is_by_input = False  # the weight is [I, E, O], not [E, I, O]
        self.axes = ("experts", *ins, *outs)
        shape = (math.prod(ins.values()), math.prod(outs.values()))

        weight = functools.partial(init.weight, shape=shape)
        self.weight = parameter(jax.vmap(weight)(jax.random.split(key, experts)), *self.axes)

    def values(self) -> Float[Array, "E I O"]:
        """Return the weights of all experts."""
        return self.weight[...].swapaxes(0, 1) if self._is_by_input else self.weight[...]

    def relayout_for_decode(self) -> None:
        """Cast the weights to the compute dtype, in the order of XLA's ragged product on a CPU.

        It multiplies a matrix [I E, O], and would copy all experts' weights in each call.
        """
        low = self.values().astype(self.precision.compute)
        self.weight, self._is_by_input = nnx.Param(low.swapaxes(0, 1)), True

    def __call__(
        self, x: Float[Array, "..."], weight: Float[Array, "E I O"], sizes: Array | None
    ) -> Float[Array, "..."]:
        """Apply `weight`, this device's part, as `grouped_matmul`: 2 x ins x outs FLOPs a row."""
        tile = None
        if sizes is not None and not self._is_by_input:
            tile = group_tile(len(x), len(weight))
        return grouped_matmul(x, weight, sizes, self.precision, tile)
