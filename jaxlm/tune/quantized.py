"""Linear layers whose weight is stored in four or eight bits, and not trained."""

import functools
import math
from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxlm.nn.linear import LOGICAL_AXES, HeadLinear, Linear
from jaxlm.ops import integer_product
from jaxlm.ops.matmul import stored_matmul
from jaxlm.ops.weight_codes import WeightFormat
from jaxlm.parallel.logical import mesh_axes
from jaxlm.parallel.rules import constrain
from jaxlm.tune import config

LEAVES = ("codes", "scales", "zeros", "scale_scales", "scale_mean")
PREFIX = "weight_"  # of the names of these leaves


class QuantizedLinear(Linear):
    """y = x W + b with W in blocks of codes along the inputs, see `ops.weight_codes`.

    W is read for each product, in the backward pass again: one layer's values exist at a time.
    fsdp gathers codes, not values. A token loop that wants another layout reads W once before it.

    Args:
      base: the layer to quantize; in a stack its weight has a first axis of layers.
      settings: format and block.
    """

    axes: tuple[tuple[str, ...], tuple[str, ...]]
    stack: tuple[int, ...]

    def __init__(self, base: Linear, settings: config.QLora | config.Quantized):
        share_fields(self, base)
        self.format = WeightFormat(settings.base, settings.block)
        self.weight: Any = None
        axes = leaf_axes(settings.base, *self.axes)
        for name, leaf in self.quantized(base.weight[...]).items():
            named: Any = {"logical_axes": axes[name.removeprefix(PREFIX)]}
            setattr(self, name, nnx.Param(leaf, **named))

    def quantized(self, weight: Array) -> dict[str, Array]:
        """Return the leaves of a weight, of a whole stack if the layer is stacked."""

        def one(weight: Array) -> dict[str, Array]:
            leaves = self.format.quantize(weight.reshape(math.prod(self.ins), *self.outs))
            return {PREFIX + name: leaf for name, leaf in leaves.items()}

        # One layer at a time, as a stack in float32 would be larger than the stack that is read.
        return jax.lax.map(one, weight) if self.stack else one(weight)

    def _leaves(self) -> dict[str, Array]:
        leaves = {name: getattr(self, PREFIX + name, None) for name in LEAVES}
        return {name: leaf[...] for name, leaf in leaves.items() if leaf is not None}

    def _flat(self) -> Float[Array, "I O"]:
        if self.weight is not None:
            return super()._flat()
        return _read(self.format, self.ins, self.outs, self.axes, self._leaves())

    def _product(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs a few operations an element of W, twice in training, more than `Linear`."""
        if self.weight is not None:  # relayout_for_decode has read the codes
            return super()._product(x)
        leading = x.shape[: x.ndim - len(self.ins)]
        if integer_product.is_integer(self.format):
            leaves = _placed(self.format, self.axes, self._leaves())
            flat = {name: leaf.reshape(len(leaf), -1) for name, leaf in leaves.items()}
            dtype = self.result or self.precision.activations
            x = x.reshape(*leading, -1)
            y = integer_product.integer_product(x, flat, self.format, dtype)
            return y.reshape(*leading, *self.outs)
        read = functools.partial(_read, self.format, self.ins, self.outs, self.axes)
        x = x.reshape(*leading, -1)
        y = stored_matmul(x, self._leaves(), read, self.precision, self.result)
        return y.reshape(*leading, *self.outs)

    def relayout_for_decode(self) -> None:
        """Read the codes once, unless products have integers: those read them as they are."""
        if not integer_product.is_integer(self.format):
            super().relayout_for_decode()


class QuantizedHeadLinear(QuantizedLinear, HeadLinear):
    """A quantized per-head projection of latent attention."""

    def relayout_for_decode(self) -> None:
        """Read the codes once, before the loop over tokens."""
        weight = self._flat().astype(self.precision.compute)
        self.weight = nnx.Param(weight.reshape(self.ins + self.outs))


QUANTIZED: dict[type, type[QuantizedLinear]] = {
    Linear: QuantizedLinear,
    HeadLinear: QuantizedHeadLinear,
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


def leaf_axes(base: str, ins: tuple[str, ...], outs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
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


def _read(
    format: WeightFormat,
    ins: tuple[int, ...],
    outs: tuple[int, ...],
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    leaves: dict[str, Array],
) -> Float[Array, "I O"]:
    """Return the weight in float32; fsdp gathers its codes."""
    inputs, placed = math.prod(ins), _placed(format, axes, leaves)
    return format.dequantize(placed, inputs).reshape(inputs, math.prod(outs))


def _placed(
    format: WeightFormat, axes: tuple[tuple[str, ...], tuple[str, ...]], leaves: dict[str, Array]
) -> dict[str, Array]:
    """Return the leaves, gathered over fsdp."""
    return {
        name: constrain(leaves[name], *(None if "fsdp" in mesh_axes(each) else each for each in of))
        for name, of in leaf_axes(format.base, *axes).items()
    }
