"""Continuations of many prompts: by the engine, or in passes where the engine cannot be used."""

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxlm.core import random
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.engine import Engine, EngineSettings, is_supported
from jaxlm.generate.requests import Request
from jaxlm.generate.rows import Sampling
from jaxlm.generate.sampler import Continuation, Sampler
from jaxlm.generate.slots import Programs
from jaxlm.models.build import Blueprint
from jaxlm.parallel import rules

PREFIX_BYTES = 2**28  # of beginnings of prompts that are kept for later ones


class Ask(NamedTuple):
    """A prompt, and how it is continued."""

    ids: Sequence[int]
    seed: int = 0
    temperature: float = 0.0


class Continuer:
    """Continues prompts; each text is a function of its prompt, seed and temperature.

    The engine fills a slot again as soon as its text has ended. A model or a mesh that it does not
    support has passes of as many rows of each device, of prompts of similar length. Programs
    compile once, for any parameters. Use it under the mesh.

    Args:
      blueprint: the model.
      tokenizer: the tokenizer, of a chat or of the run.
      sizes: sizes of the engine.
      limits: `max_tokens` and `stop` of each text.
      both_ways: attention within a prompt is bidirectional, which the engine does not support.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        sizes: EngineSettings,
        limits: GenerateConfig,
        *,
        both_ways: bool = False,
    ):
        self._both_ways = both_ways
        self._blueprint, self._tokenizer = blueprint, tokenizer
        self._sizes, self._limits = sizes, limits
        self._programs: Programs | None = None
        self._samplers: dict[float, Sampler] = {}

    def texts(self, params: Any, asks: Sequence[Ask]) -> list[Continuation]:
        """Return the continuation of each prompt, without its log-probabilities."""
        if is_supported(self._blueprint) and not self._both_ways:
            return self._by_engine(params, asks)
        return self._in_passes(params, asks)

    def _by_engine(self, params: Any, asks: Sequence[Ask]) -> list[Continuation]:
        limits, tokenizer = self._limits, self._tokenizer
        whole = Request(
            ids=(),
            max_tokens=limits.max_tokens,
            ends=tuple(tokenizer.ends),
            stop=tuple(text.encode() for text in limits.stop),
        )
        requests = (
            dataclasses.replace(
                whole,
                ids=tuple(ask.ids),
                seed=ask.seed,
                sampling=Sampling(temperature=ask.temperature),
            )
            for ask in asks
        )
        model = self._blueprint, params, tokenizer
        engine = Engine(*model, self._sizes, programs=self._programs)
        self._programs = engine.programs
        with contextlib.closing(engine):
            return [
                Continuation("", [*each.ids], each.text, None, each.reason)
                for each in engine.results(requests)
            ]

    def _in_passes(self, params: Any, asks: Sequence[Ask]) -> list[Continuation]:
        """Return the continuations by a `Sampler` of each temperature."""
        rows = self._sizes.rows * rules.split(jax.sharding.get_abstract_mesh(), "batch")
        longest = self._sizes.context - self._limits.max_tokens
        order = sorted(
            range(len(asks)), key=lambda number: (asks[number].temperature, len(asks[number].ids))
        )
        texts: dict[int, Continuation] = {}
        for temperature, group in itertools.groupby(order, lambda n: asks[n].temperature):
            sampler = self._sampler(temperature)
            for part in _parts([*group], rows):
                # The last pass repeats a row, so that it has the shape of the others.
                padded = [*part, *[part[-1]] * (rows - len(part))]
                drawn = sampler.continue_rows(
                    params,
                    [asks[number].ids for number in padded],
                    [random.key(asks[number].seed, "sample") for number in padded],
                    least=longest,
                )
                texts |= dict(zip(part, drawn, strict=False))
        return [texts[number] for number in range(len(asks))]

    def _sampler(self, temperature: float) -> Sampler:
        if temperature not in self._samplers:
            config = dataclasses.replace(self._limits, temperature=temperature)
            model = self._blueprint, self._tokenizer
            self._samplers[temperature] = Sampler(config, *model, both_ways=self._both_ways)
        return self._samplers[temperature]


def _parts(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


def sizes_of(lengths: Sequence[int], max_tokens: int, rows: int) -> EngineSettings:
    """Return the sizes of an engine that continues prompts of these lengths, `rows` at a time."""
    return EngineSettings(
        rows=rows,
        context=max(lengths) + max_tokens,
        chunk=chunk_of(lengths),
        prefix_bytes=PREFIX_BYTES,
    )


def chunk_of(lengths: Sequence[int]) -> int:
    """Return the ids of a prompt that are read at a time: the median prompt, from 16 to 64.

    The last id is read with the answer. A longer chunk of short prompts is mostly padding, which
    costs as much as some tokens of an answer.
    """
    size = 1 << max(int(statistics.median(lengths)) - 2, 0).bit_length()
    return min(max(size, 16), 64)
