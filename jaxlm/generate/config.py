"""Settings of sampling."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

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

    @property
    def request(self) -> "GenerateConfig":
        """The same for `generate`."""
        shared = ("prompts", "max_tokens", "temperature", "top_k", "top_p")
        return GenerateConfig(**{name: getattr(self, name) for name in shared})


BEAM_HAS_NONE: dict[str, object] = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "prompt_lookup": 0,
    "stop": (),
}
# Of all stops together: the table of their states has as many rows, of two bytes an id.
STOP_BYTES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What is written after which prompts, and how each token is chosen."""

    prompts: tuple[str, ...] = setting(("",), "texts to go on from, as one batch")
    max_tokens: int = setting(100, "most new tokens of a prompt", unit="tokens", low=1)
    temperature: float = setting(
        0.8, "logits are divided by this before a token is drawn; 0 takes the likeliest", low=0
    )
    top_k: int | None = setting(None, "draw from the k likeliest tokens; None from all", low=1)
    top_p: float | None = setting(
        None, "draw from the likeliest tokens that add up to this; None from all", above=0, high=1
    )
    min_p: float | None = setting(
        None,
        "draw from tokens at least this share as likely as the likeliest; None from all",
        above=0,
        high=1,
    )
    repetition_penalty: float = setting(
        1.0, "divides positive logits of tokens in the prompt or text, multiplies negative", above=0
    )
    presence_penalty: float = setting(0.0, "taken from the logits of tokens in the text")
    frequency_penalty: float = setting(
        0.0, "taken from the logit of a token as often as it is in the text"
    )
    stop: tuple[str, ...] = setting((), "strings before which a text ends")
    beams: int = setting(1, "texts kept in a beam search, which draws nothing; 1 is none", low=1)
    length_penalty: float = setting(
        1.0, "a beam scores its log-probability over its tokens to this power"
    )
    seed: tuple[int, ...] = setting((0,), "the same seed draws the same text; one, or one a prompt")
    prompt_lookup: int = setting(
        0,
        "tokens guessed at a time from what was said before, and checked in one pass: the same text, sooner where it repeats itself",
        unit="tokens",
        low=0,
        high=15,
    )
    kv_cache_dtype: Literal["auto", "int8"] = setting(
        "auto", "numbers of the key-value cache; auto is what activations have"
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """There is a seed for each prompt, stops are something, and a beam search is asked for nothing that it does not do."""
        if len(self.seed) not in (1, len(self.prompts)):
            yield (
                "seed",
                f"{len(self.seed)} seeds for {len(self.prompts)} prompts: give one, or one for each prompt",
                "--seed=0",
            )
        if "" in self.stop:
            yield "stop", "an empty string is before every text", "jaxlm generate --help"
        if (size := sum(len(text.encode()) for text in self.stop)) > STOP_BYTES:
            yield (
                "stop",
                f"{size} bytes, and {STOP_BYTES} are allowed for all stops",
                "jaxlm generate --help",
            )
        for name, none in BEAM_HAS_NONE.items():
            if self.beams > 1 and getattr(self, name) != none:
                yield (
                    name,
                    f"a beam search ranks whole texts by the model's own probabilities: {name} must be {none!r}",
                    "--beams=1" if name == "stop" else f"--{name}={none}",
                )
