"""Batch-size advice from the gradient noise scale."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.monitor import formatting, sinks


def advice(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the cost of doubling and of halving the batch; None without a noise scale above 0.

    At a noise scale of N, a batch of B tokens needs 1 + N / B times the steps of an infinite batch
    to reach a loss, and 1 + B / N times the tokens of the smallest batch, each at its best rate.

    Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.11 and section 2.3.
    """
    train = [r for r in records if r.get("split") == "train" and sinks.is_number(r.get("tokens"))]
    scales = [
        r["noise_scale_tokens"] for r in train if sinks.is_number(r.get("noise_scale_tokens"))
    ]
    earlier = [r for r in train if r["step"] < train[-1]["step"]]
    if not earlier or not scales or scales[-1] <= 0:
        return None
    last, before, scale = train[-1], earlier[-1], scales[-1]
    batch = (last["tokens"] - before["tokens"]) / (last["step"] - before["step"])

    def cost(other: float) -> str:
        steps = (1 + scale / other) / (1 + scale / batch) - 1
        tokens = (1 + other / scale) / (1 + batch / scale) - 1
        return f"{abs(steps):.0%} {_more(steps)} steps and {abs(tokens):.0%} {_more(tokens)} tokens"

    return (
        f"{formatting.count(round(batch))} tokens, and the noise scale of the gradient is "
        f"{formatting.count(round(scale))}: to the same loss, each at its best rate, twice the "
        f"batch would take {cost(2 * batch)}, half of it {cost(batch / 2)}"
    )


def _more(share: float) -> str:
    return "more" if share > 0 else "fewer"
