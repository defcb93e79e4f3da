"""Linear layers, experts and tables whose weight is stored in four or eight bits, not trained."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jaxlm.nn.embedding import Embedding
from jaxlm.nn.linear import LOGICAL_AXES, GroupedLinear, HeadLinear, Linear
from jaxlm.ops import integer_product
from jaxlm.ops.matmul import stored_matmul
from jaxlm.ops.row_product import decode_side, is_one_cpu
from jaxlm.ops.weight_codes import WeightFormat
from jaxlm.parallel.logical import mesh_axes
from jaxlm.parallel.rules import constrain
from jaxlm.tune import config

LEAVES = ("codes", "scales", "zeros", "scale_scales", "scale_mean")
PREFIX = "weight_"  # of the names of these leaves in a layer
Settings = config.QLora | config.Quantized
Axes = dict[str, tuple[str, ...]]  # logical axes of each leaf of one layer's weight


class StoredWeight(nnx.Module):
    """Mixin: a weight as blocks of codes along its inputs, see `ops.weight_codes`.

    Each weight of a stack of layers, and of experts, is quantized by itself. Attributes:
      weight_name: the name of the weight; those of its leaves begin with it.
      format: of codes and scales.
    """

    weight_name: ClassVar[str] = "weight"
    format: WeightFormat

    @property
    def lead(self) -> tuple[int, ...]:
        """The first axes of a leaf, those of a stack and of experts; () for one weight."""
        raise NotImplementedError

    def _one(self, weight: Array) -> dict[str, Array]:
        """Return the leaves of one weight, by names without a prefix."""
        raise NotImplementedError

    def _read(self, leaves: dict[str, Array]) -> Array:
        """Return one weight in float32."""
        raise NotImplementedError

    def quantized(self, weight: Array) -> dict[str, Array]:
        """Return the leaves of a weight, of a whole stack if the layer is stacked."""
        leaves = self._each(self._one, weight)
        return {f"{self.weight_name}_{name}": leaf for name, leaf in leaves.items()}

    def dequantized(self, leaves: dict[str, Array]) -> Array:
        """Return the weight in float32, of a whole stack; leaves have names without a prefix."""
        return self._each(self._read, leaves)

    def read_layer(self, leaves: dict[str, Array]) -> Array:
        """Return the weight of one layer in float32; leaves have names without a prefix."""
        return self._read(leaves)

    def _each(self, function: Callable[[Any], Any], arrays: Any) -> Any:
        # One weight at a time, as a stack in float32 would be larger than the stack that is read.
        for _ in self.lead:
            function = functools.partial(jax.lax.map, function)
        return function(arrays)

    def _store(self, weight: Array, axes: Axes) -> None:
        for name, leaf in self.quantized(weight).items():
            named: Any = {"logical_axes": axes[name.removeprefix(f"{self.weight_name}_")]}
            setattr(self, name, nnx.Param(leaf, **named))

    def _leaves(self) -> dict[str, Array]:
        leaves = {name: getattr(self, f"{self.weight_name}_{name}", None) for name in LEAVES}
        return {name: leaf[...] for name, leaf in leaves.items() if leaf is not None}

    def _drop_codes(self) -> None:
        """Remove the leaves of a weight that is read from another place from here on."""
        for name in LEAVES:
            if hasattr(self, f"{self.weight_name}_{name}"):
                delattr(self, f"{self.weight_name}_{name}")


class QuantizedLinear(StoredWeight, Linear):
    """y = x W + b with W as codes.

    W is read for each product, in the backward pass again: one layer's values exist at a time.
    fsdp gathers codes, not values. A token loop that wants another layout reads W once before it.

    Args:
      base: the layer to quantize; in a stack its weight has a first axis of layers.
      settings: format and block.
    """

    axes: tuple[tuple[str, ...], tuple[str, ...]]
    stack: tuple[int, ...]

    def __init__(self, base: Linear, settings: Settings):
        share_fields(self, base)
        self.format = WeightFormat(settings.base, settings.block)
        self.weight: Any = None
        self._store(base.weight[...], leaf_axes(settings.base, *self.axes))

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of layers in a stack."""
        return self.stack

    def _one(self, weight: Array) -> dict[str, Array]:
        return self.format.quantize(weight.reshape(math.prod(self.ins), *self.outs))

    def _read(self, leaves: dict[str, Array]) -> Array:
        return self.format.dequantize(leaves, math.prod(self.ins)).reshape(self.ins + self.outs)

    def _flat(self) -> Float[Array, "I O"]:
        if self.weight is not None:
            return super()._flat()
        return _values(self.format, self.ins, self.outs, self.axes, self._leaves())

    def _product(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs a few operations an element of W, twice in training, more than `Linear`."""
        if self.weight is not None:  # relayout_for_decode has read the codes
            return super()._product(x)
        leading = x.shape[: x.ndim - len(self.ins)]
        x = x.reshape(*leading, -1)
        if integer_product.is_integer(self.format):
            leaves = self._leaves() if self._side else self._flat_leaves()
            return self._integer_product(x, leaves, self.format)
        read = functools.partial(_values, self.format, self.ins, self.outs, self.axes)
        y = stored_matmul(x, self._leaves(), read, self.precision, self.result)
        return y.reshape(*leading, *self.outs)

    def relayout_for_decode(self) -> None:
        """Read the codes once, or put them into the layout that products of integers read."""
        if not integer_product.is_integer(self.format):
            super().relayout_for_decode()
            self._drop_codes()
        elif is_one_cpu() and decode_side() == 1:
            for name, leaf in self._flat_leaves().items():
                setattr(self, f"{self.weight_name}_{name}", nnx.Param(leaf.T))
            self._side = 1

    def _flat_leaves(self) -> dict[str, Array]:
        leaves = _placed(self._leaves(), leaf_axes(self.format.base, *self.axes))
        return {name: leaf.reshape(len(leaf), -1) for name, leaf in leaves.items()}


class QuantizedHeadLinear(QuantizedLinear, HeadLinear):
    """A quantized per-head projection of latent attention."""

    def relayout_for_decode(self) -> None:
        """Read the codes once, before the loop over tokens."""
        weight = self._flat().astype(self.precision.compute)
        self.weight = nnx.Param(weight.reshape(self.ins + self.outs))
        self._drop_codes()


class QuantizedGrouped(StoredWeight, GroupedLinear):
    """One linear map for each expert, each with its W as codes.

    All experts of a layer are read before its products; fsdp gathers codes.
    """

    def __init__(self, base: GroupedLinear, settings: Settings):
        self.precision, self.axes = base.precision, base.axes
        self._is_by_input = False
        self.stack = base.weight[...].shape[: -len(self.axes)]
        self.sizes = base.weight[...].shape[-len(self.axes) :]
        self.format = WeightFormat(settings.base, settings.block)
        self.weight: Any = nnx.data(None)
        self._store(base.weight[...], self._leaf_axes)

    @property
    def _leaf_axes(self) -> Axes:  # no attribute: a dict has no hash, which the graph needs
        first, *rest = self.axes
        axes = leaf_axes(self.format.base, (rest[0],), tuple(rest[1:]))
        return {name: (first, *each) for name, each in axes.items()}

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of layers in a stack, and that of experts."""
        return (*self.stack, self.sizes[0])

    def _one(self, weight: Array) -> dict[str, Array]:
        return self.format.quantize(weight)

    def _read(self, leaves: dict[str, Array]) -> Array:
        return self.format.dequantize(leaves, self.sizes[1])

    def read_layer(self, leaves: dict[str, Array]) -> Array:
        """Return the weights of one layer's experts in float32."""
        return jax.vmap(self._read)(leaves)

    def values(self) -> Float[Array, "E I O"]:
        """Return the weights in float32, or as `relayout_for_decode` has read them."""
        if self.weight is not None:
            return super().values()
        return self.read_layer(_placed(self._leaves(), self._leaf_axes))

    def relayout_for_decode(self) -> None:
        """Read the codes once, before the loop over tokens."""
        super().relayout_for_decode()
        self._drop_codes()


class QuantizedEmbedding(StoredWeight, Embedding):
    """A table of codes: a lookup reads those of its rows, and the unembedding all of them.

    The width is the inputs of a row, with which the unembedding multiplies. Leaves have the axis of
    rows first.
    """

    weight_name = "table"

    def __init__(self, base: Embedding, settings: Settings):
        table = base.table[...]
        self.precision, self.axis, self.width = base.precision, base.axis, table.shape[1]
        self.format = WeightFormat(settings.base, settings.block)
        self._decode_table: Array | None = None
        self._side = 1
        self._store(table, self._leaf_axes)

    @property
    def _leaf_axes(self) -> Axes:  # no attribute: a dict has no hash, which the graph needs
        axes = leaf_axes(self.format.base, ("embed",), (self.axis,))
        return {name: each[::-1] for name, each in axes.items()}

    @property
    def lead(self) -> tuple[int, ...]:
        """A table is one weight."""
        return ()

    def _one(self, weight: Array) -> dict[str, Array]:
        return _transposed(self.format.quantize(weight.T))

    def _read(self, leaves: dict[str, Array]) -> Array:
        return self.format.dequantize(_transposed(leaves), self.width).T

    def _values(self) -> Float[Array, "V D"]:
        return self._read(_placed(self._leaves(), self._leaf_axes))

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the rows of `ids` in the dtype of parameters, read from their codes."""
        placed = _transposed(_placed(self._leaves(), self._leaf_axes))
        leaves = self.format.with_float_scales(placed)
        rows = {
            name: leaf.T.at[ids.reshape(-1)].get(mode="promise_in_bounds").T
            for name, leaf in leaves.items()
        }
        # Rounded before positions are added, as a float table is: no fused multiply-add.
        values = lax.optimization_barrier(self.format.dequantize(rows, self.width).T)
        return values.reshape(*ids.shape, self.width).astype(self.precision.params)

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the dot products of `x` with every row, in float32: the tied output layer."""
        if not integer_product.is_integer(self.format):
            return super().unembed(x)
        leaves = _placed(self._leaves(), self._leaf_axes)
        return integer_product.integer_product(x, leaves, self.format, jnp.dtype(jnp.float32), 1)

    def relayout_for_decode(self) -> None:
        """Read the codes once for the unembedding, unless its products have integers."""
        if not integer_product.is_integer(self.format):
            super().relayout_for_decode()


QUANTIZED: dict[type, Callable[[Any, Settings], StoredWeight]] = {
    Linear: QuantizedLinear,
    HeadLinear: QuantizedHeadLinear,
    GroupedLinear: QuantizedGrouped,
    Embedding: QuantizedEmbedding,
}


def share_fields(layer: Any, base: Linear) -> None:
    """Give a layer the leaves and settings of another.

    `axes` are the logical axes of inputs and of outputs, and `stack` the first axis of a stack's
    leaves; it is empty for a layer by itself.
    """
    names = ["ins", "outs", "precision", "result", "_is_gathered", "_side", "weight", "bias"]
    if isinstance(base, QuantizedLinear):
        leaves = [PREFIX + name for name in LEAVES if hasattr(base, PREFIX + name)]
        names += ["format", "axes", "stack", *leaves]
    else:
        axes, shape = base.weight.get_metadata()[LOGICAL_AXES], base.weight[...].shape
        layer.axes = axes[: len(base.ins)], axes[len(base.ins) :]
        layer.stack = shape[: len(shape) - len(base.ins) - len(base.outs)]
    for name in names:
        setattr(layer, name, getattr(base, name))


def leaf_axes(base: str, ins: tuple[str, ...], outs: tuple[str, ...]) -> Axes:
    """Return the logical axes of each leaf of one layer's weight.

    Codes are split as the weight is: its inputs are one axis, with the name of the first. Scales
    are few, and a mesh need not divide them along the inputs.
    """
    axes: dict[str, tuple[str, ...]] = {"codes": (ins[0], *outs), "scales": ("blocks", *outs)}
    if base == "int4_zero":
        axes["zeros"] = axes["scales"]
    if base == "nf4_double":
        axes |= {"scale_scales": ("blocks",), "scale_mean": ()}
    return axes


def _values(
    format: WeightFormat,
    ins: tuple[int, ...],
    outs: tuple[int, ...],
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    leaves: dict[str, Array],
) -> Float[Array, "I O"]:
    """Return the weight in float32; fsdp gathers its codes."""
    inputs, placed = math.prod(ins), _placed(leaves, leaf_axes(format.base, *axes))
    return format.dequantize(placed, inputs).reshape(inputs, math.prod(outs))


def _placed(leaves: dict[str, Array], axes: Axes) -> dict[str, Array]:
    """Return the leaves, gathered over fsdp."""
    return {
        name: constrain(leaf, *(None if "fsdp" in mesh_axes(each) else each for each in axes[name]))
        for name, leaf in leaves.items()
    }


def _transposed(leaves: dict[str, Array]) -> dict[str, Array]:
    return {name: leaf.T for name, leaf in leaves.items()}
