"""Text from a model: the same prompts, drawn with the same keys, at any step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import random
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import decode, sampling
from jaxlm.generate.config import SampleConfig
from jaxlm.models.build import Blueprint
from jaxlm.parallel import rules

PROMPT_MULTIPLE = 32  # prompts are padded to a multiple, so that few lengths are compiled


class Sampler:
    """Goes on from prompts. One program is compiled for each number of prompts and padded length."""

    def __init__(self, config: SampleConfig, blueprint: Blueprint, tokenizer: Tokenizer, seed: int):
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
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
            )
        )

    def draw(self, params: Any) -> list[tuple[str, str]]:
        """(prompt, text) for each prompt of the config."""
        if not self.config.prompts:
            return []
        ids = self.ids(params, self.config.prompts)
        return [
            (prompt, self.tokenizer.decode(row))
            for prompt, row in zip(self.config.prompts, ids, strict=True)
        ]

    def ids(self, params: Any, prompts: tuple[str, ...]) -> list[list[int]]:
        """The new ids after each prompt, without the end token."""
        tokenizer = self.tokenizer
        rows = [[tokenizer.bos, *ids] for ids in tokenizer.encode_many(prompts)]
        # Rows that only fill up to the devices hold one token, and are dropped again.
        ways = rules.split(jax.sharding.get_abstract_mesh(), "batch")
        rows += [[tokenizer.bos]] * (-len(rows) % ways)
        longest = -(-max(map(len, rows)) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        padded = np.full((len(rows), longest), tokenizer.pad, np.int32)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in rows], np.int32)
        out = self._generate(params, padded, lengths, random.key(self.seed, "sample"))
        ids, counts = jax.device_get((out.ids, out.length))
        drawn = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
        return [[i for i in row if i != tokenizer.eos] for row in drawn[: len(prompts)]]
