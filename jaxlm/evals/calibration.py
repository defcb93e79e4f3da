"""Calibration: agreement of the model's confidence and its accuracy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

BINS = 15


def bin_sums(confidence: Array, correct: Array, weights: Array) -> Array:
    """Return weight, weighted confidence and weighted accuracy of each bin, [3, BINS].

    Bin i covers confidences in (i / BINS, (i + 1) / BINS].
    """
    index = jnp.clip(jnp.ceil(confidence.ravel() * BINS) - 1, 0, BINS - 1)
    inside = (index[:, None] == jnp.arange(BINS, dtype=index.dtype)[None]).astype(jnp.float32)
    weight = weights.ravel()
    parts = jnp.stack([weight, weight * confidence.ravel(), weight * correct.ravel()])
    return (parts[:, :, None] * inside[None]).sum(1)


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The bins of a reliability diagram: token weight, mean confidence and accuracy of each."""

    count: list[float]
    confidence: list[float]
    accuracy: list[float]

    @classmethod
    def of(cls, sums: np.ndarray) -> "Reliability":
        """Compute the diagram from bin sums; an empty bin has confidence and accuracy 0."""
        count, confidence, correct = np.asarray(sums, np.float64)
        filled = np.maximum(count, 1e-300)
        return cls(count.tolist(), (confidence / filled).tolist(), (correct / filled).tolist())

    @property
    def expected_error(self) -> float:
        """Return the expected calibration error, sum_b (n_b / n) |accuracy_b - confidence_b|.

        Source: Guo et al. 2017, arXiv:1706.04599, equation 5, with its 15 bins.
        """
        gaps = zip(self.count, self.confidence, self.accuracy, strict=True)
        total = sum(self.count)
        return sum(n * abs(accuracy - sure) for n, sure, accuracy in gaps) / total if total else 0.0
