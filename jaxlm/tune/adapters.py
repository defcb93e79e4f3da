"""Adapted linear layers. Each holds the base's weight at the base's own path, and new leaves."""

import fnmatch
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxlm.core import random
from jaxlm.nn.dropout import dropout, layer_key
from jaxlm.nn.linear import HeadLinear, Linear
from jaxlm.ops.matmul import matmul
from jaxlm.parallel.rules import constrain
from jaxlm.tune import config
from jaxlm.tune.quantized import QuantizedHeadLinear, QuantizedLinear, share_fields

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


class Adapted(Linear):
    """A linear layer that holds the leaves of another, and leaves of its own.

    It trains and evaluates. To decode, merge the model first, see `merge.merged_params`.

    Args:
      base: the layer to adapt; in a stack its weight has a first axis of layers.
      settings: settings of the adapter.
      path: path of the layer in the model, which names its random numbers.
      key: key of the model's initial values.
    """

    axes: tuple[tuple[str, ...], tuple[str, ...]]
    stack: tuple[int, ...]

    def __init__(self, base: Linear, settings: Any, path: str, key: Array):
        share_fields(self, base)
        self.settings, self.path = settings, path
        self._add(random.stream(key, f"tune/{path}"))

    def _add(self, key: Array) -> None:
        """Add the adapter's parameters."""
        raise NotImplementedError

    def merged(self) -> dict[str, Array]:
        """Return weight and bias with which a plain layer computes the same, of one layer."""
        raise NotImplementedError

    def _leaf(self, value: Array, *axes: str) -> nnx.Param:
        """Return a parameter in the dtype of the weight; a stack's axis of layers has no name."""
        value = value.astype(self.precision.params)
        return nnx.Param(value, logical_axes=axes)  # type: ignore[call-arg]


class LoraLinear(Adapted):
    """y = x W + s (x A) B + b. The products with A and B are skinny; A B is never formed."""

    settings: config.Lora

    def _add(self, key: Array) -> None:
        rank, (ins, outs) = self.settings.rank, self.axes
        limit = 1 / math.sqrt(math.prod(self.ins))
        shape = (*self.stack, *self.ins, rank)
        a = jax.random.uniform(key, shape, jnp.float32, -limit, limit)
        self.lora_a = self._leaf(a, *ins, "rank")
        self.lora_b = self._leaf(jnp.zeros((*self.stack, rank, *self.outs)), "rank", *outs)

    def _product(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs 2 rank (ins + outs) FLOPs a token more than the base."""
        y = super()._product(x)
        return (y.astype(jnp.float32) + self._update(x)).astype(y.dtype)

    def _update(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Return s (x A) B in float32; in training x has dropout."""
        leading, (a, b) = x.shape[: x.ndim - len(self.ins)], self._matrices()
        # Gathered over fsdp before the products, as XLA would split them over tensor too.
        (first, *_), (last, *_) = self.axes
        a = constrain(a, None if first == "embed" else first, None)
        b = constrain(b, None, None if last == "embed" else last)
        key = layer_key()
        x = dropout(x, self.settings.dropout, key if key is None else random.stream(key, self.path))
        low = matmul(x.reshape(*leading, -1), a, self.precision, jnp.dtype(jnp.float32))
        y = matmul(low, b, self.precision, jnp.dtype(jnp.float32))
        return self.settings.factor * y.reshape(*leading, *self.outs)

    def _matrices(self) -> tuple[Float[Array, "I r"], Float[Array, "r O"]]:
        rank = self.settings.rank
        return self.lora_a[...].reshape(-1, rank), self.lora_b[...].reshape(rank, -1)

    def _sum(self) -> Float[Array, "I O"]:
        """Return W + s A B in float32."""
        a, b = (each.astype(jnp.float32) for each in self._matrices())
        update = jnp.matmul(a, b, precision="highest")
        return self._flat().astype(jnp.float32) + self.settings.factor * update

    def merged(self) -> dict[str, Array]:
        """Return W + s A B as the weight."""
        return {"weight": self._sum().reshape(*self.ins, *self.outs)}


class QLoraLinear(LoraLinear, QuantizedLinear):
    """LoRA of a quantized layer."""


class DoraLinear(LoraLinear):
    """y = g (x W + s (x A) B) + b with g = m / |W + s A B|, one number for each output.

    |W + s A B|^2 = |W|^2 + 2 s sum_r B (A^T W) + s^2 sum_r B (A^T A B): no array of the weight's
    size is made. The norm is a constant of the backward pass.
    """

    settings: config.Dora

    def _add(self, key: Array) -> None:
        super()._add(key)
        first = len(self.stack)
        inputs = tuple(range(first, first + len(self.ins)))
        square = jnp.sum(jnp.square(self.weight[...].astype(jnp.float32)), inputs)
        self.magnitude = self._leaf(jnp.sqrt(square), *self.axes[1])

    def _product(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs 2 rank ins outs FLOPs a step, and those of LoRA, more than the base."""
        y = super()._product(x)
        return (y.astype(jnp.float32) * _as_row(self._gain().reshape(self.outs), y)).astype(y.dtype)

    def _gain(self) -> Float[Array, "O"]:
        weight, s = self._flat().astype(jnp.float32), self.settings.factor
        a, b = (each.astype(jnp.float32) for each in self._matrices())
        across, low = jnp.sum(b * (a.T @ weight), 0), jnp.sum(b * ((a.T @ a) @ b), 0)
        square = jnp.sum(jnp.square(weight), 0) + 2 * s * across + s**2 * low
        norm = jax.lax.stop_gradient(jnp.sqrt(square))
        return self.magnitude[...].astype(jnp.float32).reshape(-1) / norm

    def merged(self) -> dict[str, Array]:
        """Return m (W + s A B) / |W + s A B| as the weight."""
        weight = self._sum()
        gain = self.magnitude[...].astype(jnp.float32).reshape(-1) / jnp.linalg.norm(weight, axis=0)
        return {"weight": (weight * gain[None]).reshape(*self.ins, *self.outs)}


class Ia3Linear(Adapted):
    """y = (x W + b) l for a factor of each output, or (x l) W + b for one of each input."""

    settings: config.Ia3

    def _add(self, key: Array) -> None:
        del key
        self.scales_inputs = any(
            fnmatch.fnmatchcase(f"{self.path}/weight", pattern) for pattern in self.settings.inputs
        )
        shape = self.ins if self.scales_inputs else self.outs
        self.ia3 = self._leaf(jnp.ones((*self.stack, *shape)), *self.axes[not self.scales_inputs])

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs one product for each output, or each input, more than the base."""
        factor = self.ia3[...].astype(jnp.float32)
        if self.scales_inputs:
            return super().__call__((x.astype(jnp.float32) * _as_row(factor, x)).astype(x.dtype))
        y = super().__call__(x)
        return (y.astype(jnp.float32) * _as_row(factor, y)).astype(y.dtype)

    def merged(self) -> dict[str, Array]:
        """Return weight and bias with the factors on the inputs or the outputs."""
        factor, weight = self.ia3[...].astype(jnp.float32), self.weight[...].astype(jnp.float32)
        if self.scales_inputs:
            return {"weight": weight * factor.reshape(*self.ins, *(1,) * len(self.outs))}
        bias = {} if self.bias is None else {"bias": self.bias[...].astype(jnp.float32) * factor}
        return {"weight": weight * _as_row(factor, weight)} | bias


class BottleneckLinear(Adapted):
    """z + up(act(down(z))) of the base's result z = x W + b. It has no merged weight."""

    settings: config.Bottleneck

    def _add(self, key: Array) -> None:
        hidden, outs = self.settings.hidden, self.axes[1]
        limit = 1 / math.sqrt(math.prod(self.outs))
        shape = (*self.stack, *self.outs, hidden)
        down = jax.random.uniform(key, shape, jnp.float32, -limit, limit)
        self.adapter_down = self._leaf(down, *outs, "rank")
        self.adapter_bias = self._leaf(jnp.zeros((*self.stack, hidden)), "rank")
        self.adapter_up = self._leaf(jnp.zeros((*self.stack, hidden, *self.outs)), "rank", *outs)

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs 4 hidden outs FLOPs a token more than the base."""
        hidden, wide = self.settings.hidden, jnp.dtype(jnp.float32)
        y = super().__call__(x)
        flat = y.reshape(*y.shape[: y.ndim - len(self.outs)], -1)
        # Gathered like weights that tensor does not split, see `Linear`.
        down = constrain(self.adapter_down[...].reshape(-1, hidden), None, None)
        low = matmul(flat, down, self.precision, wide)
        low = ACTIVATIONS[self.settings.activation](
            low + _as_row(self.adapter_bias[...].astype(wide), low)
        )
        up = constrain(self.adapter_up[...].reshape(hidden, -1), None, None)
        added = matmul(low, up, self.precision, wide).reshape(y.shape)
        return (y.astype(wide) + added).astype(y.dtype)


class LoraHeadLinear(LoraLinear, HeadLinear):
    """LoRA of a per-head projection of latent attention."""


class QLoraHeadLinear(QLoraLinear, HeadLinear):
    """LoRA of a quantized per-head projection of latent attention."""


class DoraHeadLinear(DoraLinear, HeadLinear):
    """DoRA of a per-head projection of latent attention."""


def _as_row(factor: Array, like: Array) -> Array:
    """Return the factor with first axes of size 1, as many as it multiplies."""
    return factor.reshape((1,) * (like.ndim - factor.ndim) + factor.shape)


LAYERS: dict[type, dict[type[Linear], type[Adapted]]] = {
    config.Lora: {Linear: LoraLinear, HeadLinear: LoraHeadLinear},
    config.QLora: {QuantizedLinear: QLoraLinear, QuantizedHeadLinear: QLoraHeadLinear},
    config.Dora: {Linear: DoraLinear, HeadLinear: DoraHeadLinear},
    config.Ia3: {Linear: Ia3Linear},
    config.Bottleneck: {Linear: BottleneckLinear},
}
