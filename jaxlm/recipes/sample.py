"""Text from a model: the same prompts, drawn with the same keys, at any step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import random
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import decode, sampling
from jaxlm.generate.config import SampleConfig
from jaxlm.models.build import Blueprint
from jaxlm.parallel import host, rules

PROMPT_MULTIPLE = 32  # prompts are padded to a multiple, so that few lengths are compiled


class Sampler:
    """Goes on from prompts, which are read `both_ways` or not. One program is compiled for each number of prompts and padded length.

    Raises:
      ConfigError: where a prompt of the config and what follows it do not fit the model's position table; `flag` is what
        its fix puts before `max_tokens`.
    """

    def __init__(
        self,
        config: SampleConfig,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        seed: int,
        *,
        both_ways: bool = False,
        flag: str = "--config.sample.",
    ):
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self._check_room(blueprint.config.positions, flag)
        ids = np.arange(blueprint.config.vocab)
        text = np.isin(ids, np.flatnonzero(tokenizer.token_bytes > 0)) | (ids == tokenizer.eos)
        draw = functools.partial(
            sampling.draw, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
        )
        self._generate = jax.jit(
            decode.build(
                blueprint.merge,
                draw,
                max_tokens=config.max_tokens,
                end=tokenizer.eos,
                pad=tokenizer.pad,
                allowed=jnp.asarray(text),
                both_ways=both_ways,
            )
        )

    def _check_room(self, positions: int | None, flag: str) -> None:
        longest = max(map(len, self._rows(self.config.prompts)), default=0)
        if positions is None or longest + self.config.max_tokens <= positions:
            return
        room = positions - longest
        raise ConfigError(
            f"{longest} prompt tokens and {self.config.max_tokens} new ones are more than the model has positions",
            where=f"{flag}prompts, {flag}max_tokens",
            why=f"the model has {positions} positions",
            fix=f"{flag}max_tokens={room}" if room > 0 else "a shorter prompt",
        )

    def _rows(self, prompts: tuple[str, ...]) -> list[list[int]]:
        """The ids of each prompt as a document begins; where nothing does, after the end of another."""
        first = self.tokenizer.before
        encoded = self.tokenizer.encode_many(prompts)
        return [[*(first if first or ids else self.tokenizer.after), *ids] for ids in encoded]

    def draw(self, params: Any) -> list[tuple[str, str]]:
        """(prompt, text) for each prompt of the config."""
        ids = self.ids(params, self.config.prompts)
        return [
            (prompt, self.tokenizer.decode(row))
            for prompt, row in zip(self.config.prompts, ids, strict=True)
        ]

    def ids(self, params: Any, prompts: tuple[str, ...]) -> list[list[int]]:
        """The new ids after each prompt, without the end token."""
        tokenizer = self.tokenizer
        rows = self._rows(prompts)
        # Rows that only fill up to the devices hold one token, and are dropped again.
        ways = rules.split(jax.sharding.get_abstract_mesh(), "batch")
        rows += [[tokenizer.eos]] * (-len(rows) % ways)
        longest = -(-max(map(len, rows)) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        padded = np.full((len(rows), longest), tokenizer.pad, np.int32)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in rows], np.int32)
        out = self._generate(params, padded, lengths, random.key(self.seed, "sample"))
        ids, counts = host.fetch((out.ids, out.length))
        drawn = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
        return [[i for i in row if i != tokenizer.eos] for row in drawn[: len(prompts)]]
