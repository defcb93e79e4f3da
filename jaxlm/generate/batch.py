"""Continuations of a batch of prompts by the engine."""

from collections.abc import Sequence

from jaxlm.core.callbacks import OnText
from jaxlm.core.errors import ConfigError
from jaxlm.generate import slots
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.grammar import Grammar
from jaxlm.generate.requests import Delta, Request
from jaxlm.generate.rows import Sampling
from jaxlm.generate.sampler import STREAMED_TOKENS, Continuation

MAX_ROWS = 32  # slots; further prompts wait for one
MAX_CHUNK = 64  # tokens of a prompt that are read in one pass

Ids = Sequence[Sequence[int]]  # of prompts


def settings_of(config: GenerateConfig, rows: Ids) -> EngineSettings:
    """Return the sizes of an engine that holds prompts, of these ids, and their continuations."""
    context = max(map(len, rows)) + config.max_tokens
    return EngineSettings(
        rows=min(len(rows), MAX_ROWS),
        context=context,
        chunk=min(MAX_CHUNK, context),
        is_int8=config.kv_cache_dtype == "int8",
    )


def continue_rows(
    engine: Engine,
    config: GenerateConfig,
    rows: Ids,
    grammar: Grammar | None = None,
    on_text: OnText | None = None,
) -> list[Continuation]:
    """Return the continuation of each prompt, with log-probabilities.

    Args:
      engine: the engine of these prompts.
      config: prompts and sampling settings.
      rows: the ids of the prompts.
      grammar: what a text may be; its end ids are those of the tokenizer.
      on_text: receives text as it is drawn, see `Sampler.write`.

    Raises:
      ConfigError: if the grammar became too complex while a text was drawn.
    """
    sampling = Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition=config.repetition_penalty,
        presence=config.presence_penalty,
        frequency=config.frequency_penalty,
    )
    seeds = config.seed if len(config.seed) > 1 else config.seed * len(rows)

    def deliver(row: int, delta: Delta) -> None:
        if on_text is not None:
            on_text(row, delta.text, delta.reason is not None)

    requests = (
        Request(
            ids=tuple(ids),
            max_tokens=config.max_tokens,
            sampling=sampling,
            seed=seed,
            ends=engine.tokenizer.ends,
            stop=tuple(text.encode() for text in config.stop),
            top=0,
            grammar=grammar,
        )
        for ids, seed in zip(rows, seeds, strict=True)
    )
    passes = slots.PASSES if on_text is None else STREAMED_TOKENS
    results = []
    drawn = engine.results(requests, deliver, passes)
    for prompt, whole in zip(config.prompts, drawn, strict=True):
        if whole.reason == "grammar":
            raise ConfigError(
                "the grammar became too complex while its text was drawn",
                where=", ".join(f"--{name}" for name in config.constraints),
                why=f"the work for the token after {whole.text[-40:]!r} is beyond a limit",
                fix="jaxlm docs serving    # limits of grammars",
            )
        scores = [score.log_probability for score in whole.scores]
        results.append(Continuation(prompt, [*whole.ids], whole.text, scores, whole.reason))
    return results
