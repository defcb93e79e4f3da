"""The only average in the house: a sum and a weight, divided once, at the end."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float


class Mean(NamedTuple):
    """A weighted mean that has not been divided yet.

    Micro-batches, devices and data sets add their parts with `+`; `value` divides. Averaging averages
    is wrong as soon as the parts weigh differently, and they do: padding, packing and last batches.
    Within a step both fields are float32. Totals over many steps are added on the host, in Python floats,
    because float32 stops counting at 2**24.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @classmethod
    def of(cls, values: Float[Array, "..."], weights: Float[Array, "..."]) -> Self:
        """The weighted mean of `values`; both have one shape. A value of weight 0 is not looked at, even when it is NaN."""
        kept = jnp.where(weights > 0, values.astype(jnp.float32) * weights, 0.0)
        return cls(jnp.sum(kept), jnp.sum(weights.astype(jnp.float32)))

    def __add__(self, other: Self) -> Self:  # type: ignore[override]
        return type(self)(self.total + other.total, self.weight + other.weight)

    @staticmethod
    def merged(*parts: "dict[str, Mean]") -> "dict[str, Mean]":
        """Named means, those of one name added."""
        out: dict[str, Mean] = {}
        for part in parts:
            out |= {name: out[name] + mean if name in out else mean for name, mean in part.items()}
        return out

    @property
    def value(self) -> Float[Array, ""]:
        """total / weight, and 0 where nothing was weighed."""
        return self.total / jnp.maximum(self.weight, 1e-30)

    @property
    def figure(self) -> Float[Array, ""]:
        """As `value`, for a person: NaN where nothing was weighed."""
        return jnp.where(self.weight > 0, self.value, jnp.nan)
