"""Calibration of choices: confidence in the picked choice against the share of right picks.

Example:
  >>> error([confidence([0.0, 100.0])] * 2, [1.0, 0.0])
  0.5
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxlm.evals.loss import BINS, Reliability


def confidence(nats: Sequence[float]) -> float:
    """Return the picked choice's share of the likelihood of all, from -log p of each."""
    best = min(nats)
    return 1 / math.fsum(math.exp(best - each) for each in nats)


def error(confidences: Sequence[float], right: Sequence[float]) -> float:
    """Return the expected calibration error of picks, with the bins of `evals.loss`.

    Args:
      confidences: the confidence in each pick.
      right: 1 for each right pick, otherwise 0.
    """
    sums = np.zeros((3, BINS))
    for each, is_right in zip(confidences, right, strict=True):
        bin_ = min(max(math.ceil(each * BINS) - 1, 0), BINS - 1)
        sums[:, bin_] += (1.0, each, is_right)
    return Reliability.of(sums).expected_error
