"""A law of loss fitted to runs, and how sure it is. Free of JAX."""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxlm.recipes.scaling.loss_law import Law, Vector

HUBER = 1e-3  # least noise of log loss; beyond the noise a run counts by its distance, and not by the square of that
# What is known before any run: published exponents lie between 0.28 and 0.37, and no text is without entropy. With many runs
# it weighs nothing; with few, or all of about one size, it keeps what they do not determine near to what others found.
EXPONENT, SPREAD = 0.35, 0.15
# E over the lowest loss, and the standard deviation of its logarithm.
FLOOR, FLOOR_SPREAD = 1 / 3, 1.0
# Where log E, alpha and beta stand in a state, and how uncertain each is.
KNOWN = [0, 3, 4]
SPREADS = np.array([FLOOR_SPREAD, SPREAD, SPREAD])
LEAST = 0.05  # exponent that a prior is drawn about
MOST_STEPS = 400
FEWEST_RUNS, FEWEST_SIZES = 5, 3  # a law has five constants, and an exponent takes three sizes


class Points(NamedTuple):
    """Runs that a law is fitted to, float64: parameters, tokens, nats per token."""

    parameters: Vector
    tokens: Vector
    losses: Vector

    @property
    def sizes(self) -> int:
        """How many sizes of model there are."""
        return len(set(self.parameters.tolist()))

    @property
    def suffice(self) -> bool:
        """Whether a law can be fitted to them."""
        return len(self.losses) >= FEWEST_RUNS and self.sizes >= FEWEST_SIZES


def fit(points: Points) -> Law:
    """The law nearest to the runs: the Huber loss of log L, summed, and a weak prior on E and both exponents.

    sum huber((log L(N, D) - log loss) / s) + ((alpha - 0.35)^2 + (beta - 0.35)^2) / (2 0.15^2) + log(3 E / lowest)^2 / 2

    with s = 0.001 first, and then with the noise that this leaves, where it is more. By Levenberg-Marquardt steps on
    reweighted squares, from 27 starts; the lowest is kept.

    Source: Hoffmann et al. 2022, section 3.3, by L-BFGS, with s = 0.001 alone and no prior; their 240 runs need none.
    """
    law = _fit(points, HUBER)
    return _fit(points, noise(law, points))


def noise(law: Law, points: Points) -> float:
    """The standard deviation of log loss about a law of five constants, from the median distance; at least 0.001."""
    far = np.abs(np.log(law.loss(points.parameters, points.tokens) / points.losses))
    runs = len(far)
    return max(HUBER, 1.4826 * float(np.median(far)) * float(np.sqrt(runs / max(runs - 5, 1))))


def _fit(points: Points, scale: float) -> Law:
    aim = _Aim(points, np.ones((1, len(points.losses))), scale, _expected(points)[None])
    found, values = _descend(_starts(points), aim)
    return _law(found[int(np.argmin(values))], points)


def resample(points: Points, law: Law, draws: int, seed: int = 0) -> list[Law]:
    """Laws of runs drawn with replacement, each descended to from `law`: how much depends on which runs there were.

    The prior's centre is drawn too, from the prior: what no run determines is as uncertain afterwards as it was before.

    Source: Efron 1979, Annals of Statistics 7(1); Bardsley et al. 2014, SIAM Journal on Scientific Computing 36(4).
    """
    runs, random = len(points.losses), np.random.default_rng(seed)
    counts = random.multinomial(runs, [1 / runs] * runs, size=draws).astype(np.float64)
    centres = _expected(points) + SPREADS * random.standard_normal((draws, 3))
    centres[:, 1:] = np.maximum(centres[:, 1:], LEAST)
    begun = np.repeat(_theta(law, points)[None], draws, axis=0)
    found, _ = _descend(begun, _Aim(points, counts, noise(law, points), centres))
    return [_law(theta, points) for theta in found]


# A state of the descent is [log E, log A', log B', alpha, beta]: A' and B' are those of sizes and tokens over their
# geometric means, which exponents then move little.


def _expected(points: Points) -> Float[np.ndarray, "3"]:
    """log E, alpha and beta as they are taken to be before any run."""
    return np.array([np.log(FLOOR * points.losses.min()), EXPONENT, EXPONENT])


def _starts(points: Points) -> Float[np.ndarray, "S 5"]:
    lowest, middle = points.losses.min(), np.median(points.losses)
    starts = []
    for share, alpha, beta in itertools.product((0.05, 0.4, 0.8), *[(0.2, 0.35, 0.6)] * 2):
        half = np.log((middle - share * lowest) / 2)
        starts.append([np.log(share * lowest), half, half, alpha, beta])
    return np.array(starts)


def _centred(points: Points) -> tuple[Vector, Vector]:
    sizes, tokens = np.log(points.parameters), np.log(points.tokens)
    return sizes - sizes.mean(), tokens - tokens.mean()


def _terms(theta: np.ndarray, points: Points) -> Float[np.ndarray, "3 S N"]:
    """E, the size's share and the data's share of the loss of each run."""
    sizes, tokens = _centred(points)
    floor, size, data, alpha, beta = (column[:, None] for column in theta.T)
    exponents = np.broadcast_arrays(floor, size - alpha * sizes, data - beta * tokens)
    return np.exp(np.clip(exponents, -80, 80))


class _Aim(NamedTuple):
    """What states are descended to: each run as often as it counts, the noise of a run, and what is expected of log E, alpha and beta."""

    points: Points
    counts: Float[np.ndarray, "S N"]
    scale: float
    centres: Float[np.ndarray, "S 3"]

    def value(self, theta: np.ndarray) -> Float[np.ndarray, "S"]:
        """What is minimised, for each state."""
        whole = _terms(theta, self.points).sum(axis=0)
        far = np.abs(np.log(whole / self.points.losses)) / self.scale
        huber = np.where(far < 1, far**2 / 2, far - 0.5)
        prior = ((theta[:, KNOWN] - self.centres) / SPREADS) ** 2 / 2
        return (self.counts * huber).sum(axis=1) + prior.sum(axis=1)


def _descend(
    theta: np.ndarray, aim: _Aim
) -> tuple[Float[np.ndarray, "S 5"], Float[np.ndarray, "S"]]:
    """Each state at its minimum, and the value there. A step is taken only where the value falls."""
    points, scale = aim.points, aim.scale
    sizes, tokens = _centred(points)
    value, damping = aim.value(theta), np.full(len(theta), 1e-3)
    idle = np.zeros(len(theta))
    for _ in range(MOST_STEPS):
        floor, size, data = terms = _terms(theta, points)
        whole = terms.sum(axis=0)
        slopes = np.stack([floor, size, data, -sizes * size, -tokens * data], axis=-1)
        slopes /= scale * whole[..., None]
        residuals = np.log(whole / points.losses) / scale
        weights = aim.counts / np.maximum(np.abs(residuals), 1)
        gradient = np.einsum("sn,sni->si", weights * residuals, slopes)
        curvature = np.einsum("sn,sni,snj->sij", weights, slopes, slopes)
        gradient[:, KNOWN] += (theta[:, KNOWN] - aim.centres) / SPREADS**2
        diagonal = np.einsum("sii->si", curvature)  # a view
        diagonal[:, KNOWN] += 1 / SPREADS**2
        diagonal += damping[:, None] * (diagonal + 1e-6)
        tried = theta - np.linalg.solve(curvature, gradient[..., None])[..., 0]
        new = aim.value(tried)
        fell = new < value
        idle = np.where(fell & (new < value - 1e-9 * (1 + value)), 0, idle + 1)
        theta, value = np.where(fell[:, None], tried, theta), np.where(fell, new, value)
        damping = np.clip(np.where(fell, damping / 3, damping * 4), 1e-9, 1e9)
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


def _theta(law: Law, points: Points) -> np.ndarray:
    size = np.log(law.A) - law.alpha * np.log(points.parameters).mean()
    data = np.log(law.B) - law.beta * np.log(points.tokens).mean()
    return np.array([np.log(law.E), size, data, law.alpha, law.beta])
