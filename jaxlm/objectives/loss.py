"""What an objective gives back."""

from typing import NamedTuple

from jax import Array

from jaxlm.core.mean import Mean


class Loss(NamedTuple):
    """What is minimised, and what is worth knowing; all of it sums and weights.

    Args:
      objective: the loss of the tokens that are trained on, and their weight.
      metrics: figures by name.
      added: what layers add, and the number of tokens that it is a sum over: all that are not padding, trained on or not. So
        the mean that is minimised is objective.value + added.value, and a coefficient of `added` means the same however few
        tokens an objective trains on. None if no layer adds anything.
    """

    objective: Mean
    metrics: dict[str, Mean]
    added: Mean | None = None

    @property
    def value(self) -> Array:
        """Return the mean that is minimised, of this batch alone."""
        return (
            self.objective.value if self.added is None else self.objective.value + self.added.value
        )
