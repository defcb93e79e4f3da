"""Calibration of choices: confidence in the picked choice against the share of right picks.

Example:
  >>> error([([0.0, 100.0], True), ([0.0, 100.0], False)])
  0.5
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxlm.evals.loss import BINS, Reliability


def error(choices: Sequence[tuple[Sequence[float], bool]]) -> float:
    """Return the expected calibration error of picks, with the bins of `evals.loss`.

    The confidence is the picked choice's share of the likelihood of all choices.

    Args:
      choices: nats (-log p) of the choices of an item, and if the likeliest is right.
    """
    sums = np.zeros((3, BINS))
    for nats, is_right in choices:
        best = min(nats)
        confidence = 1 / math.fsum(math.exp(best - each) for each in nats)
        bin_ = min(max(math.ceil(confidence * BINS) - 1, 0), BINS - 1)
        sums[:, bin_] += (1.0, confidence, float(is_right))
    return Reliability.of(sums).expected_error
