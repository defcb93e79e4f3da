"""Settings of text generation.

Example:
  >>> [setting for setting, why, fix in GenerateConfig(beams=2, temperature=0.8).problems()]
  ['temperature']
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sampling of text from a model, and how often a training run prints samples."""

    every: Span = setting(Span.parse("25%"), "interval between samples during training")
    prompts: tuple[str, ...] = setting((), "texts that samples continue; none draws no samples")
    max_tokens: int = setting(64, "maximum tokens of a sample", unit="tokens", low=1)
    temperature: float = setting(
        0.8, "logits are divided by this before a token is drawn; 0 takes the likeliest", low=0
    )
    top_k: int | None = setting(None, "draw from the k likeliest tokens; None from all", low=1)
    top_p: float | None = setting(
        None, "draw from the likeliest tokens that add up to this; None from all", above=0, high=1
    )

    @property
    def request(self) -> "GenerateConfig":
        """Return the equivalent settings of `jaxlm generate`."""
        shared = ("prompts", "max_tokens", "temperature", "top_k", "top_p")
        return GenerateConfig(**{name: getattr(self, name) for name in shared})


BEAM_HAS_NONE: dict[str, object] = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": (),
    "draft": None,
    "json_schema": None,
    "regex": None,
    "choice": (),
    "grammar": None,
}
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")  # settings that limit a text
# Limit of all stops together: their state table has as many rows, of two bytes an id.
STOP_BYTES = 256
GUESSES = 4  # ids of a row that a draft of the engine guesses at a time
PARTS = 8  # in which an engine that owns its parameters replaces them


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Prompts to continue, and how each token is chosen."""

    prompts: tuple[str, ...] = setting(("",), "texts to continue, as one batch")
    max_tokens: int = setting(100, "maximum new tokens of a prompt", unit="tokens", low=1)
    temperature: float = setting(
        0.8, "logits are divided by this before a token is drawn; 0 takes the likeliest", low=0
    )
    top_k: int | None = setting(None, "draw from the k likeliest tokens; None from all", low=1)
    top_p: float | None = setting(
        None, "draw from the likeliest tokens that add up to this; None from all", above=0, high=1
    )
    min_p: float | None = setting(
        None,
        "draw from tokens with at least this share of the top probability; None from all",
        above=0,
        high=1,
    )
    repetition_penalty: float = setting(
        1.0, "divides positive logits of tokens in the prompt or text, multiplies negative", above=0
    )
    presence_penalty: float = setting(
        0.0, "penalty subtracted from the logits of tokens that occur in the text"
    )
    frequency_penalty: float = setting(
        0.0, "penalty per occurrence of a token in the text, subtracted from its logit"
    )
    stop: tuple[str, ...] = setting((), "strings before which a text ends")
    beams: int = setting(1, "number of beams; 1 samples instead of searching", low=1)
    length_penalty: float = setting(
        1.0, "power of a beam's length that divides its log-probability"
    )
    seed: tuple[int, ...] = setting((0,), "random seed: one for all prompts, or one for each")
    draft: str | None = setting(
        None, "what guesses tokens: lookup, heads or a run; no text depends on it"
    )
    kv_cache_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "dtype of the KV cache; auto is precision.compute, or float32 on a CPU without units for "
        "bfloat16, and on any CPU before jax 0.12",
    )

    json_schema: str | None = setting(None, "JSON schema that each text matches")
    regex: str | None = setting(None, "regular expression that each whole text matches")
    choice: tuple[str, ...] = setting((), "allowed texts; each text is one of them")
    grammar: str | None = setting(None, "grammar of each text, in the form of Lark")

    @property
    def constraints(self) -> tuple[str, ...]:
        """Return the names of the settings that limit texts; at most one is valid."""
        return tuple(name for name in CONSTRAINTS if getattr(self, name) not in (None, ()))

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield invalid settings: seeds, stops, and what beam search cannot do."""
        if len(self.seed) not in (1, len(self.prompts)):
            why = (
                f"{len(self.seed)} seeds for {len(self.prompts)} prompts: "
                "give one, or one for each prompt"
            )
            yield "seed", why, "--seed=0"
        if far := [seed for seed in self.seed if not 0 <= seed < 2**32]:
            why = f"{far[0]}; seeds are 0 to 4294967295"
            yield "seed", why, " ".join(f"--seed={seed % 2**32}" for seed in self.seed)
        if "" in self.stop:
            yield "stop", "an empty string matches before every text", "jaxlm generate --help"
        if (size := sum(len(text.encode()) for text in self.stop)) > STOP_BYTES:
            why = f"{size} bytes; {STOP_BYTES} are allowed for all stops"
            yield "stop", why, "jaxlm generate --help"
        if len(self.constraints) > 1:
            first, second, *_ = self.constraints
            yield second, f"{first} is given, and a text has one of them", "jaxlm generate --help"
        if "" in self.choice:
            yield "choice", "an empty text is no choice", "jaxlm generate --help"
        if self.constraints and self.draft:
            why = f"a text with {self.constraints[0]} takes no guesses"
            yield "draft", why, "without --draft the text is the same"
        for name, neutral in BEAM_HAS_NONE.items():
            if self.beams > 1 and getattr(self, name) != neutral:
                why = (
                    "beam search ranks whole texts by the model's own probabilities: "
                    f"{name} must be {neutral!r}"
                )
                is_text = name in ("stop", "draft", *CONSTRAINTS)
                yield name, why, "--beams=1" if is_text else f"--{name}={neutral}"
