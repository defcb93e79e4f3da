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
from jaxlm.nn.remat import stored_result
from jaxlm.ops.low_rank import leading_factors
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
    """y = x W + s (x A) B + b. The products with A and B are skinny; A B is never formed.

    PiSSA subtracts s (x A0) B0 with the first values of A and B, so that the weight stays that of
    the base. Its x has no dropout, as it is a part of the weight.
    """

    settings: config.Lora

    def _add(self, key: Array) -> None:
        (ins, outs), is_first = self.axes, self.settings.init == "pissa"
        a, b = self._leading() if is_first else self._random(key)
        self.lora_a, self.lora_b = self._leaf(a, *ins, "rank"), self._leaf(b, "rank", *outs)
        if is_first:
            self.lora_a0, self.lora_b0 = self._leaf(a, *ins, "rank"), self._leaf(b, "rank", *outs)

    def _random(self, key: Array) -> tuple[Array, Array]:
        rank, limit = self.settings.rank, 1 / math.sqrt(math.prod(self.ins))
        shape = (*self.stack, *self.ins, rank)
        a = jax.random.uniform(key, shape, jnp.float32, -limit, limit)
        return a, jnp.zeros((*self.stack, rank, *self.outs))

    def _leading(self) -> tuple[Array, Array]:
        """Return A and B with s A B = the part of W with its largest singular values."""
        rank = self.settings.rank

        def one(weight: Array) -> tuple[Array, Array]:
            flat = weight.reshape(math.prod(self.ins), -1).astype(jnp.float32)
            a, b = leading_factors(flat / self.settings.factor, rank)
            return a.reshape(*self.ins, rank), b.reshape(rank, *self.outs)

        weight = self.weight[...]
        return jax.lax.map(one, weight) if self.stack else one(weight)

    def _product(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Costs 2 rank (ins + outs) FLOPs a token more than the base."""
        y = super()._product(x)
        return stored_result((y.astype(jnp.float32) + self._update(x)).astype(y.dtype))

    def _update(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Return s (x A) B in float32; in training x has dropout. PiSSA subtracts s (x A0) B0."""
        leading = x.shape[: x.ndim - len(self.ins)]
        (first, *_), (last, *_) = self.axes

        def product(x: Array, pair: tuple[Array, Array]) -> Array:
            # Gathered over fsdp before the products, as XLA would split them over tensor too.
            a = constrain(pair[0], None if first == "embed" else first, None)
            # s multiplies B, and no array with a row for each token, in either pass.
            scaled = self.settings.factor * pair[1]
            b = constrain(scaled, None, None if last == "embed" else last)
            wide = jnp.dtype(jnp.float32)
            low = matmul(x.reshape(*leading, -1), a, self.precision, wide)
            return matmul(low, b, self.precision, wide)

        key = layer_key()
        dropped = dropout(
            x, self.settings.dropout, key if key is None else random.stream(key, self.path)
        )
        pair, *others = self._pairs()
        y = product(dropped, pair)
        for each in others:
            y = y - product(x, each)
        return y.reshape(*leading, *self.outs)

    def _pairs(self) -> list[tuple[Float[Array, "I r"], Float[Array, "r O"]]]:
        """Return A and B, and for PiSSA their first values."""
        rank, pairs = self.settings.rank, [(self.lora_a, self.lora_b)]
        if self.settings.init == "pissa":
            pairs.append((self.lora_a0, self.lora_b0))
        return [(a[...].reshape(-1, rank), b[...].reshape(rank, -1)) for a, b in pairs]

    def _matrices(self) -> tuple[Float[Array, "I R"], Float[Array, "R O"]]:
        """Return matrices in float32 whose product is the update of the weight over s."""
        (a, b), *others = self._pairs()
        wide = jnp.float32
        return (
            jnp.concatenate([a.astype(wide), *(each.astype(wide) for each, _ in others)], 1),
            jnp.concatenate([b.astype(wide), *(-each.astype(wide) for _, each in others)], 0),
        )

    def _sum(self) -> Float[Array, "I O"]:
        """Return W + s A B in float32; for PiSSA less s A0 B0."""
        update = jnp.matmul(*self._matrices(), precision="highest")
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
        a, b = self._matrices()
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
