"""Which frequencies queries and keys are rotated by, and how they are stretched for longer rows. Free of JAX."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

Problems = Iterator[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoScaling:
    """The frequencies as they are."""

    name: Literal["none"] = "none"
    amplitude = 1.0

    def factors(self, frequencies: list[float], theta: float) -> None:
        """None: nothing is multiplied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    name: Literal["linear"] = "linear"
    factor: float = setting(8.0, "what positions are divided by", low=1.0)
    amplitude = 1.0

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """The same for every frequency."""
        return (1 / self.factor,) * len(frequencies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1; Grattafiori et al. 2024, arXiv:2407.21783).

    A frequency turns r = original f / 2 pi times in the original context; s = (r - low) / (high - low), held to [0, 1]:

        f <- f ((1 - s) / factor + s)
    """

    name: Literal["llama3"] = "llama3"
    factor: float = setting(8.0, "what low frequencies are divided by", low=1.0)
    low: float = setting(1.0, "turns below which a frequency is low", above=0)
    high: float = setting(4.0, "turns above which a frequency is high", above=0)
    original: int = setting(8192, "context before the stretching", unit="tokens", low=1)
    amplitude = 1.0

    def problems(self) -> Problems:
        """There is something between low and high."""
        if self.high <= self.low:
            flag = f"--config.model.rope_scaling.high={4 * self.low:g}"
            yield "high", f"low = {self.low:g} is not below high = {self.high:g}", flag

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """What each frequency is multiplied by."""
        turns = [self.original * frequency / (2 * math.pi) for frequency in frequencies]
        kept = [_held((turn - self.low) / (self.high - self.low)) for turn in turns]
        return tuple((1 - share) / self.factor + share for share in kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies blended by their number rather than their size, and scores made sharper (Peng et al. 2023, arXiv:2309.00071).

    Frequency i of n, of those i(r) that turn r times in the original context, is kept below i(fast), divided by `factor`
    above i(slow), and between them a straight line in i. Cosine and sine are multiplied by `amplitude`, 0.1 ln factor + 1
    in the paper (section 3.4).
    """

    name: Literal["yarn"] = "yarn"
    factor: float = setting(4.0, "what low frequencies are divided by", low=1.0)
    fast: float = setting(32.0, "turns above which a frequency is kept", above=0)
    slow: float = setting(1.0, "turns below which a frequency is divided by factor", above=0)
    original: int = setting(32_768, "context before the stretching", unit="tokens", low=1)
    magnitude: float | None = setting(
        None, "what rotated queries and keys are multiplied by; None is the paper's", above=0
    )
    truncate: bool = setting(True, "the ends of the straight line are whole numbers")

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 0.1 * math.log(self.factor) + 1 if self.magnitude is None else self.magnitude

    def problems(self) -> Problems:
        """There is something between slow and fast."""
        if self.fast <= self.slow:
            flag = f"--config.model.rope_scaling.fast={32 * self.slow:g}"
            yield "fast", f"slow = {self.slow:g} is not below fast = {self.fast:g}", flag

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """What each frequency is multiplied by."""
        count = len(frequencies)

        def number(turns: float) -> float:
            return count * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

        first, last = number(self.fast), number(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        span = last - first or 0.001
        divided = [_held((i - first) / span) for i in range(count)]
        return tuple(share / self.factor + 1 - share for share in divided)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling:
    """Each frequency divided by a number of its own, which was searched for (LongRoPE; Ding et al. 2024, arXiv:2402.13753).

    A document within the original context has the numbers of `short`, one that goes beyond those of `long`; in transformers
    the longest of a batch decides for all. Text that is written beyond goes on with `long`, and what the cache holds stays
    as it was turned, as there. Cosine and sine are multiplied by `amplitude`, sqrt(1 + ln factor / ln original).
    """

    name: Literal["long"] = "long"
    short: tuple[float, ...] = setting((), "what frequencies are divided by within the original")
    long: tuple[float, ...] = setting((), "what they are divided by in documents that go beyond it")
    original: int = setting(4096, "context before the stretching", unit="tokens", low=2)
    factor: float = setting(32.0, "how many times as long the context is now", low=1.0)

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))

    def problems(self) -> Problems:
        """They divide."""
        for name in ("short", "long"):
            if min(getattr(self, name), default=1.0) <= 0:
                yield name, "a frequency cannot be divided by it", "numbers above 0"

    def factors(self, frequencies: list[float], theta: float) -> tuple[float, ...]:
        """What each frequency is multiplied by in a document within the original context."""
        return tuple(1 / each for each in self.short)


Scaling = NoScaling | LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of the first `share` of a head."""

    theta: float = 10_000.0
    share: float = 1.0
    scaling: Scaling | LongScaling = NoScaling()
    pairs: Literal["halves", "neighbours"] = "halves"  # which features turn together

    def dims(self, head_dim: int) -> int:
        """Features of a head that are rotated."""
        return int(self.share * head_dim)

    def factors(self, head_dim: int) -> tuple[float, ...] | None:
        """What the scaling multiplies each frequency theta**(-2i / dims) by; None is nothing."""
        dims = self.dims(head_dim)
        frequencies = [self.theta ** (-2 * i / dims) for i in range(dims // 2)]
        return self.scaling.factors(frequencies, self.theta)

    @property
    def beyond(self) -> tuple[int, tuple[float, ...]] | None:
        """The position from which on a document has other factors, and these; None where there are no others."""
        if not isinstance(self.scaling, LongScaling):
            return None
        return self.scaling.original, tuple(1 / each for each in self.scaling.long)


def _held(share: float) -> float:
    return min(max(share, 0.0), 1.0)
