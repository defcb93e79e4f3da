"""Scaling law of a decoder's loss in its size and training tokens, with published constants."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "N"]

RESOLUTION = 6000  # sizes in the search for an optimum: half a percent apart


class Optimum(NamedTuple):
    """The best use of a budget: parameters, tokens, and the resulting loss."""

    parameters: float
    tokens: float
    loss_nats: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Training FLOPs per token by number of parameters, between the smallest and the largest size.

    Args:
      parameters: rising.
      flops: per token, for each of them.
    """

    parameters: Vector
    flops: Vector

    def at(self, parameters: Vector | float) -> Vector:
        """Return FLOPs per token; FLOPs per parameter are interpolated over log parameters."""
        ratio = np.log(self.flops / self.parameters)
        return parameters * np.exp(np.interp(np.log(parameters), np.log(self.parameters), ratio))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta: nats per token of N parameters and D tokens.

    Embeddings are included in N.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.3, equation 2.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: Vector | float, tokens: Vector | float) -> Vector:
        """Return nats per token."""
        size = np.asarray(parameters, np.float64) ** -self.alpha
        data = np.asarray(tokens, np.float64) ** -self.beta
        return np.asarray(self.E + self.A * size + self.B * data)

    def optimum(self, budget: float, costs: Costs | None = None) -> Optimum:
        """Return the size and tokens of lowest loss for `budget` FLOPs.

        Without `costs` a token costs 6 N FLOPs; in closed form, with
        G = (alpha A / beta B)^(1 / (alpha + beta)):

            N = G (budget / 6)^(beta / (alpha + beta)),  D = budget / (6 N)

        With `costs` the sizes of that table are searched.

        Source: Hoffmann et al. 2022, equation 4.
        """
        if costs is None:
            total = self.alpha + self.beta
            scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / total)
            parameters = scale * (budget / 6) ** (self.beta / total)
            tokens = budget / (6 * parameters)
            return Optimum(parameters, tokens, float(self.loss(parameters, tokens)))
        sizes = np.geomspace(costs.parameters[0], costs.parameters[-1], RESOLUTION)
        tokens = budget / costs.at(sizes)
        losses = self.loss(sizes, tokens)
        best = int(np.argmin(losses))
        return Optimum(float(sizes[best]), float(tokens[best]), float(losses[best]))


# The second is the original, with the digits in the source of its paper, which the first quotes:
# rounded to two decimals it gives 32 instead of 40 billion parameters for Chinchilla's budget.
PUBLISHED = {
    "arXiv:2404.10102": Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
    "arXiv:2203.15556": Law(E=1.6934, A=406.4, B=410.7, alpha=0.3392, beta=0.2849),
}
PUBLISHED_FLOPS = (6e18, 3e21)  # of the runs behind both, arXiv:2203.15556, section 3.2
