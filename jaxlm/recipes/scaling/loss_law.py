"""The loss of a decoder by its size and the tokens it was trained on: a law, and published constants of it. Free of JAX."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "N"]

RESOLUTION = 6000  # sizes among which an optimum is looked for: half a percent apart


class Optimum(NamedTuple):
    """How a budget is best spent: parameters, tokens, and the loss that this leads to."""

    parameters: float
    tokens: float
    loss_nats: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """FLOPs of training on a token by the number of parameters, between the smallest and the largest size that there is.

    Args:
      parameters: rising.
      flops: those of a token for each.
    """

    parameters: Vector
    flops: Vector

    def at(self, parameters: Vector | float) -> Vector:
        """FLOPs a token; what a parameter costs is interpolated in its logarithm."""
        each = np.log(self.flops / self.parameters)
        return parameters * np.exp(np.interp(np.log(parameters), np.log(self.parameters), each))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, nats per token, of N parameters (embeddings included) and D tokens.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.3, equation 2.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: Vector | float, tokens: Vector | float) -> Vector:
        """Nats per token."""
        size = np.asarray(parameters, np.float64) ** -self.alpha
        data = np.asarray(tokens, np.float64) ** -self.beta
        return np.asarray(self.E + self.A * size + self.B * data)

    def optimum(self, budget: float, costs: Costs | None = None) -> Optimum:
        """The size and tokens of lowest loss for `budget` FLOPs.

        Without `costs` a token costs 6 N, and in closed form, with G = (alpha A / beta B)^(1 / (alpha + beta)):

            N = G (budget / 6)^(beta / (alpha + beta)),  D = budget / (6 N)

        With `costs` the sizes that there are are tried.

        Source: Hoffmann et al. 2022, equation 4.
        """
        if costs is None:
            both = self.alpha + self.beta
            scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
            parameters = scale * (budget / 6) ** (self.beta / both)
            tokens = budget / (6 * parameters)
            return Optimum(parameters, tokens, float(self.loss(parameters, tokens)))
        sizes = np.geomspace(costs.parameters[0], costs.parameters[-1], RESOLUTION)
        seen = budget / costs.at(sizes)
        losses = self.loss(sizes, seen)
        best = int(np.argmin(losses))
        return Optimum(float(sizes[best]), float(seen[best]), float(losses[best]))


# The first with the digits that its authors gave in the source of their paper, which the second quotes: rounded to two
# decimals they give 32 instead of 40 billion parameters for the budget of Chinchilla.
PUBLISHED = {
    "arXiv:2404.10102": Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
    "arXiv:2203.15556": Law(E=1.6934, A=406.4, B=410.7, alpha=0.3392, beta=0.2849),
}
PUBLISHED_FLOPS = (6e18, 3e21)  # of the runs behind both, arXiv:2203.15556, section 3.2
