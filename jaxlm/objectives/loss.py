"""What an objective gives back."""

from typing import NamedTuple

from jaxlm.core.mean import Mean


class Loss(NamedTuple):
    """What is minimised, and what is worth knowing; all of it sums and weights."""

    objective: Mean
    metrics: dict[str, Mean]
