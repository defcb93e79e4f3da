"""Frequencies of rotary embeddings, and their scaling for longer contexts. Free of JAX.

Example:
  >>> Rope(theta=100.0, scaling=LinearScaling(factor=4.0)).factors(4)
  (0.25, 0.25)
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

Problems = Iterator[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoScaling:
    """Unscaled frequencies."""

    name: Literal["none"] = "none"
    amplitude = 1.0

    def factors(self, frequencies: list[float], theta: float) -> None:
        """Return None: no frequency is multiplied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    name: Literal["linear"] = "linear"
    factor: float = setting(8.0, "divisor of positions", low=1.0)
    amplitude = 1.0

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """Return the same factor for every frequency."""
        return (1 / self.factor,) * len(frequencies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones unchanged, those between blended.

    A frequency f turns r = original f / 2 pi times in the original context. With
    s = (r - low) / (high - low), clipped to [0, 1], f becomes f ((1 - s) / factor + s).

    Source: Llama 3.1; Grattafiori et al. 2024, arXiv:2407.21783.
    """

    name: Literal["llama3"] = "llama3"
    factor: float = setting(8.0, "divisor of low frequencies", low=1.0)
    low: float = setting(1.0, "turns below which a frequency is low", above=0)
    high: float = setting(4.0, "turns above which a frequency is high", above=0)
    original: int = setting(8192, "context length before scaling", unit="tokens", low=1)
    amplitude = 1.0

    def problems(self) -> Problems:
        """Report a `high` that is not above `low`."""
        if self.high <= self.low:
            flag = f"--config.model.rope_scaling.high={4 * self.low:g}"
            yield "high", f"low = {self.low:g} is not below high = {self.high:g}", flag

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """Return the factor of each frequency."""
        turns = [self.original * frequency / (2 * math.pi) for frequency in frequencies]
        shares = [_clip((turn - self.low) / (self.high - self.low)) for turn in turns]
        return tuple((1 - share) / self.factor + share for share in shares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies blended by their index, and sharper scores.

    With i(r) the index of the frequency that turns r times in the original context: frequencies
    below i(fast) are unchanged, those above i(slow) divided by `factor`, and those between blended
    linearly. Cosine and sine are multiplied by `amplitude`, in the paper 0.1 ln factor + 1.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.4.
    """

    name: Literal["yarn"] = "yarn"
    factor: float = setting(4.0, "divisor of low frequencies", low=1.0)
    fast: float = setting(32.0, "turns above which a frequency is unchanged", above=0)
    slow: float = setting(1.0, "turns below which a frequency is divided by factor", above=0)
    original: int = setting(32_768, "context length before scaling", unit="tokens", low=1)
    magnitude: float | None = setting(
        None, "multiplier of rotated queries and keys; if None the paper's", above=0
    )
    truncate: bool = setting(True, "round the ends of the blended range to whole indices")

    @property
    def amplitude(self) -> float:
        """Multiplier of cosine and sine."""
        return 0.1 * math.log(self.factor) + 1 if self.magnitude is None else self.magnitude

    def problems(self) -> Problems:
        """Report a `fast` that is not above `slow`."""
        if self.fast <= self.slow:
            flag = f"--config.model.rope_scaling.fast={32 * self.slow:g}"
            yield "fast", f"slow = {self.slow:g} is not below fast = {self.fast:g}", flag

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """Return the factor of each frequency."""
        count = len(frequencies)

        def index(turns: float) -> float:
            return count * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

        first, last = index(self.fast), index(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        span = last - first or 0.001
        shares = [_clip((i - first) / span) for i in range(count)]
        return tuple(share / self.factor + 1 - share for share in shares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling:
    """Each frequency divided by a searched number of its own (LongRoPE).

    A document within the original context uses `short`, a longer one `long`; in transformers the
    longest document of a batch decides for all. A generated text that grows beyond continues with
    `long`, and cached keys keep their rotation, as there. Cosine and sine are multiplied by
    `amplitude`, sqrt(1 + ln factor / ln original).

    Source: Ding et al. 2024, arXiv:2402.13753.
    """

    name: Literal["long"] = "long"
    short: tuple[float, ...] = setting((), "divisors of frequencies within the original context")
    long: tuple[float, ...] = setting((), "divisors of frequencies in longer documents")
    original: int = setting(4096, "context length before scaling", unit="tokens", low=2)
    factor: float = setting(32.0, "context length over the original one", low=1.0)

    @property
    def amplitude(self) -> float:
        """Multiplier of cosine and sine."""
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))

    def problems(self) -> Problems:
        """Report divisors that are not positive."""
        for name in ("short", "long"):
            if min(getattr(self, name), default=1.0) <= 0:
                yield name, "a divisor of frequencies is not positive", "numbers above 0"

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """Return the factor of each frequency in a document within the original context."""
        return tuple(1 / each for each in self.short)


Scaling = NoScaling | LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of a part of each head."""

    theta: float = 10_000.0
    share: float = 1.0  # of a head's features, the first ones
    scaling: Scaling | LongScaling = NoScaling()
    interleaved: bool = False  # rotate features (2i, 2i + 1) together, not (i, i + dims / 2)

    def dims(self, head_dim: int) -> int:
        """Return the number of rotated features of a head."""
        return int(self.share * head_dim)

    def factors(self, head_dim: int) -> tuple[float, ...] | None:
        """Return the scaling's factor of each frequency theta**(-2i / dims), None if all are 1."""
        dims = self.dims(head_dim)
        frequencies = [self.theta ** (-2 * i / dims) for i in range(dims // 2)]
        return self.scaling.factors(frequencies, self.theta)

    @property
    def beyond(self) -> tuple[int, tuple[float, ...]] | None:
        """The position from which a document has other factors, and these; None without any."""
        if not isinstance(self.scaling, LongScaling):
            return None
        return self.scaling.original, tuple(1 / each for each in self.scaling.long)


def _clip(share: float) -> float:
    return min(max(share, 0.0), 1.0)
