"""What an objective returns."""

from typing import NamedTuple

from jaxlm.core.mean import Mean


class Loss(NamedTuple):
    """The quantity whose gradient is taken, and what is reported beside it: sums and weights, not yet divided."""

    objective: Mean
    metrics: dict[str, Mean]
