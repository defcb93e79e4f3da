"""Weighted means as a sum and a weight that are divided once, at the end."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float


class Mean(NamedTuple):
    """A weighted mean before its division.

    Micro-batches, devices and data sets add their parts with `+`; `value` divides. Averaging
    averages is wrong if the parts have different weights, as padding, packing and last batches do.
    Within a step both fields are float32. Totals over many steps are added on the host, in Python
    floats, because float32 cannot count past 2**24.

    Example:
        >>> whole, last = Mean.of(jnp.array([2.0, 4.0]), jnp.ones(2)), Mean(jnp.array(6.0), 1)
        >>> float((whole + last).value)
        4.0
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @classmethod
    def of(cls, values: Float[Array, "..."], weights: Float[Array, "..."]) -> Self:
        """Return the weighted mean of `values`; one of weight 0 is ignored, even if it is NaN."""
        weighted = jnp.where(weights > 0, values.astype(jnp.float32) * weights, 0.0)
        return cls(jnp.sum(weighted), jnp.sum(weights.astype(jnp.float32)))

    def __add__(self, other: Self) -> Self:  # type: ignore[override]
        return type(self)(self.total + other.total, self.weight + other.weight)

    @staticmethod
    def merged(*parts: "dict[str, Mean]") -> "dict[str, Mean]":
        """Return named means; means of the same name are added."""
        out: dict[str, Mean] = {}
        for part in parts:
            out |= {name: out[name] + mean if name in out else mean for name, mean in part.items()}
        return out

    @property
    def value(self) -> Float[Array, ""]:
        """total / weight, or 0 if the weight is 0."""
        return self.total / jnp.maximum(self.weight, 1e-30)

    @property
    def figure(self) -> Float[Array, ""]:
        """total / weight for display: NaN if the weight is 0."""
        return jnp.where(self.weight > 0, self.value, jnp.nan)
