"""Wilson's interval of a share, which stays inside [0, 1] and has a width at 0 and 1.

Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".

Example:
  >>> low, high = interval(0.0, 100)
  >>> round(low, 3), round(high, 3)
  (0.0, 0.037)
"""

import math

SCORE = 1.959963984540054  # of a normal distribution: 95% lie within it on both sides


def interval(share: float, size: float, score: float = SCORE) -> tuple[float, float]:
    """Return the confidence interval of a share of `size` items; [0, 1] for none.

    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n) with z = `score`.
    """
    if not size:
        return 0.0, 1.0
    scale = 1 + score**2 / size
    center = (share + score**2 / (2 * size)) / scale
    reach = score * math.sqrt(share * (1 - share) / size + score**2 / (4 * size**2)) / scale
    return max(center - reach, 0.0), min(center + reach, 1.0)
