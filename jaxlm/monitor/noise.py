"""What the noise of a gradient says of the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.monitor import formatting, sinks


def advice(records: Sequence[Mapping[str, Any]]) -> str | None:
    """What a larger and a smaller batch than the last would cost, by a run's records; None without an estimate above 0.

    A batch of B tokens beside a noise scale of N takes 1 + N / B times as many steps to a loss as an endless one, and
    1 + B / N times as many tokens as the smallest, each at the best rate for it.

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

    def beside(other: float) -> str:
        steps = (1 + scale / other) / (1 + scale / batch) - 1
        tokens = (1 + other / scale) / (1 + batch / scale) - 1
        return f"{abs(steps):.0%} {_more(steps)} steps and {abs(tokens):.0%} {_more(tokens)} tokens"

    return (
        f"{formatting.count(round(batch))} tokens, and the noise scale of the gradient is {formatting.count(round(scale))}: to the same "
        f"loss, each at its best rate, twice the batch would take {beside(2 * batch)}, half of it {beside(batch / 2)}"
    )


def _more(share: float) -> str:
    return "more" if share > 0 else "fewer"
