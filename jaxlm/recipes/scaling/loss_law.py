"""Scaling law of a decoder's loss in its size and training tokens, with published constants."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "N"]

RESOLUTION = 6000  # sizes in the search for an optimum: half a percent apart
HUBER = 1e-3  # least noise of log loss; beyond the noise a run counts by its distance, not squared
# The prior: published exponents are between 0.28 and 0.37, and every text has entropy. It has no
# weight with many runs; with few runs, or runs of one size, it fixes what they do not determine.
EXPONENT, SPREAD = 0.35, 0.15
# E over the lowest loss, and the standard deviation of its logarithm.
FLOOR, FLOOR_SPREAD = 1 / 3, 1.0
# Indices of log E, alpha and beta in a state, and their prior standard deviations.
KNOWN = [0, 3, 4]
SPREADS = np.array([FLOOR_SPREAD, SPREAD, SPREAD])
MIN_EXPONENT = 0.05  # center of a resampled prior
MAX_STEPS = 400
MIN_RUNS, MIN_SIZES = 5, 3  # a law has five constants, and an exponent needs three sizes


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

    Example:
      >>> best = PUBLISHED["arXiv:2404.10102"].optimum(5.76e23)
      >>> f"{best.parameters:.3g} parameters, {best.tokens:.3g} tokens, {best.loss_nats:.3f} nats"
      '7.22e+10 parameters, 1.33e+12 tokens, 1.974 nats'

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

        Without `costs` a token costs 6 N FLOPs; in closed form, with G = (alpha A / beta B)^(1 /
        (alpha + beta)):

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


class Points(NamedTuple):
    """Runs to fit a law to, in float64: parameters, tokens, nats per token."""

    parameters: Vector
    tokens: Vector
    losses: Vector

    @property
    def sizes(self) -> int:
        """Return the number of distinct model sizes."""
        return len(set(self.parameters.tolist()))

    @property
    def suffice(self) -> bool:
        """Return True if a law can be fitted to them."""
        return len(self.losses) >= MIN_RUNS and self.sizes >= MIN_SIZES


def fit(points: Points) -> Law:
    """Return the law of lowest Huber loss of log L, with a weak prior on E and the exponents.

    sum huber((log L(N, D) - log loss) / s) + ((alpha - 0.35)^2 + (beta - 0.35)^2) / (2 0.15^2)
        + log(3 E / lowest)^2 / 2

    First s = 0.001, then the noise that this fit leaves, if larger. Levenberg-Marquardt steps on
    reweighted squares from 27 starts; the lowest minimum is returned.

    Source: Hoffmann et al. 2022, section 3.3: L-BFGS, s = 0.001 alone, no prior, 240 runs.
    """
    law = _fit(points, HUBER)
    return _fit(points, noise(law, points))


def noise(law: Law, points: Points) -> float:
    """Return the standard deviation of log loss by the median distance to a law, at least 0.001."""
    distances = np.abs(np.log(law.loss(points.parameters, points.tokens) / points.losses))
    count = len(distances)
    freedom = float(np.sqrt(count / max(count - 5, 1)))
    return max(HUBER, 1.4826 * float(np.median(distances)) * freedom)


def _fit(points: Points, scale: float) -> Law:
    counts = np.ones((1, len(points.losses)))
    objective = _Objective(points, counts, scale, _prior_center(points)[None])
    states, values = _descend(_starts(points), objective)
    return _law(states[int(np.argmin(values))], points)


def resample(points: Points, law: Law, draws: int, seed: int = 0) -> list[Law]:
    """Return laws of runs drawn with replacement, each fitted from `law`.

    The center of the prior is drawn from it: constants that no run determines stay uncertain.

    Source: Efron 1979, Annals of Statistics 7(1); Bardsley et al. 2014, SIAM Journal on Scientific
    Computing 36(4).
    """
    runs, random = len(points.losses), np.random.default_rng(seed)
    counts = random.multinomial(runs, [1 / runs] * runs, size=draws).astype(np.float64)
    centers = _prior_center(points) + SPREADS * random.standard_normal((draws, 3))
    centers[:, 1:] = np.maximum(centers[:, 1:], MIN_EXPONENT)
    size = np.log(law.A) - law.alpha * np.log(points.parameters).mean()
    data = np.log(law.B) - law.beta * np.log(points.tokens).mean()
    theta = np.array([np.log(law.E), size, data, law.alpha, law.beta])
    starts = np.repeat(theta[None], draws, axis=0)
    states, _ = _descend(starts, _Objective(points, counts, noise(law, points), centers))
    return [_law(theta, points) for theta in states]


# A state of the descent is [log E, log A', log B', alpha, beta]. A' and B' apply to sizes and
# tokens over their geometric means, so that they depend little on the exponents.


def _prior_center(points: Points) -> Float[np.ndarray, "3"]:
    """Return log E, alpha and beta as expected before any run."""
    return np.array([np.log(FLOOR * points.losses.min()), EXPONENT, EXPONENT])


def _starts(points: Points) -> Float[np.ndarray, "S 5"]:
    lowest, middle = points.losses.min(), np.median(points.losses)
    starts = []
    for share, alpha, beta in itertools.product((0.05, 0.4, 0.8), *[(0.2, 0.35, 0.6)] * 2):
        half = np.log((middle - share * lowest) / 2)
        starts.append([np.log(share * lowest), half, half, alpha, beta])
    return np.array(starts)


def _centered(points: Points) -> tuple[Vector, Vector]:
    sizes, tokens = np.log(points.parameters), np.log(points.tokens)
    return sizes - sizes.mean(), tokens - tokens.mean()


def _terms(theta: np.ndarray, points: Points) -> Float[np.ndarray, "3 S N"]:
    """Return E, the term of the size and the term of the data in the loss of each run."""
    sizes, tokens = _centered(points)
    floor, size, data, alpha, beta = (column[:, None] for column in theta.T)
    exponents = np.broadcast_arrays(floor, size - alpha * sizes, data - beta * tokens)
    return np.exp(np.clip(exponents, -80, 80))


class _Objective(NamedTuple):
    """Minimized function: weights of the runs, their noise, and the center of the prior."""

    points: Points
    counts: Float[np.ndarray, "S N"]
    scale: float
    centers: Float[np.ndarray, "S 3"]

    def value(self, theta: np.ndarray) -> Float[np.ndarray, "S"]:
        """Return the objective of each state."""
        losses = _terms(theta, self.points).sum(axis=0)
        distances = np.abs(np.log(losses / self.points.losses)) / self.scale
        huber = np.where(distances < 1, distances**2 / 2, distances - 0.5)
        prior = ((theta[:, KNOWN] - self.centers) / SPREADS) ** 2 / 2
        return (self.counts * huber).sum(axis=1) + prior.sum(axis=1)


def _descend(
    theta: np.ndarray, objective: _Objective
) -> tuple[Float[np.ndarray, "S 5"], Float[np.ndarray, "S"]]:
    """Minimize the objective from each state; returns the minima and the values there.

    `scipy.optimize.least_squares` finds the same minima but is slower, 7 s instead of 1.2 s for all
    fits to 12 runs: it descends from one state at a time, and needs a loss function of its own, as
    the prior is not Huberized.
    """
    points, scale = objective.points, objective.scale
    sizes, tokens = _centered(points)
    value, damping = objective.value(theta), np.full(len(theta), 1e-3)
    idle = np.zeros(len(theta))
    for _ in range(MAX_STEPS):
        floor, size, data = terms = _terms(theta, points)
        losses = terms.sum(axis=0)
        slopes = np.stack([floor, size, data, -sizes * size, -tokens * data], axis=-1)
        slopes /= scale * losses[..., None]
        residuals = np.log(losses / points.losses) / scale
        weights = objective.counts / np.maximum(np.abs(residuals), 1)
        gradient = np.einsum("sn,sni->si", weights * residuals, slopes)
        curvature = np.einsum("sn,sni,snj->sij", weights, slopes, slopes)
        gradient[:, KNOWN] += (theta[:, KNOWN] - objective.centers) / SPREADS**2
        diagonal = np.einsum("sii->si", curvature)  # a view
        diagonal[:, KNOWN] += 1 / SPREADS**2
        diagonal += damping[:, None] * (diagonal + 1e-6)
        tried = theta - np.linalg.solve(curvature, gradient[..., None])[..., 0]
        new = objective.value(tried)
        improved = new < value
        idle = np.where(improved & (new < value - 1e-9 * (1 + value)), 0, idle + 1)
        theta, value = np.where(improved[:, None], tried, theta), np.where(improved, new, value)
        damping = np.clip(np.where(improved, damping / 3, damping * 4), 1e-9, 1e9)
        if idle.min() > 15:
            break
    return theta, value


def _law(theta: np.ndarray, points: Points) -> Law:
    floor, size, data, alpha, beta = map(float, np.clip(theta, -80, 80))
    return Law(
        E=float(np.exp(floor)),
        A=float(np.exp(size + alpha * np.log(points.parameters).mean())),
        B=float(np.exp(data + beta * np.log(points.tokens).mean())),
        alpha=alpha,
        beta=beta,
    )
