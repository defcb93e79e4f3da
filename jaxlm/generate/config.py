"""Settings of sampling."""

import dataclasses

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How text is drawn from a model, and how often a training run shows some."""

    every: Span = setting(Span.parse("25%"), "how often samples are drawn in training")
    prompts: tuple[str, ...] = setting((), "texts that samples go on from; none draws no samples")
    max_tokens: int = setting(64, "most tokens of a sample", unit="tokens", low=1)
    temperature: float = setting(
        0.8, "logits are divided by this before a token is drawn; 0 takes the likeliest", low=0
    )
    top_k: int | None = setting(None, "draw from the k likeliest tokens; None from all", low=1)
    top_p: float | None = setting(
        None, "draw from the likeliest tokens that add up to this; None from all", above=0, high=1
    )
