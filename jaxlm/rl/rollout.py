"""Samples of a model for training: a pure function of parameters, prompts and keys.

The tokens of a sample depend on its prompt and its key, not on the slot or on other samples. A key
is a function of the seed of the run, the number of the rollout, the prompt and the sample.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Rollout, Tokens
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import decode, sampling
from jaxlm.generate.sampler import REASONS
from jaxlm.models.build import Blueprint
from jaxlm.objectives.config import MeanOf
from jaxlm.parallel import host, rules


class Drawn(NamedTuple):
    """A sample: its ids with the end token, and the log-probability of each when it was drawn."""

    ids: Int[np.ndarray, "n"]
    log_p: Float[np.ndarray, "n"]
    reason: str  # eos_token or length


def allowed_ids(tokenizer: Tokenizer, vocab: int) -> Bool[np.ndarray, "V"]:
    """Return the mask of the ids that are drawn: those of text, and those that end it."""
    ids = np.arange(vocab)
    return np.isin(ids, [*np.flatnonzero(tokenizer.token_bytes > 0), *tokenizer.ends])


@functools.partial(jax.jit, static_argnums=(2, 3))
def row_keys(root: Array, number: Array, prompts: int, samples: int) -> Array:
    """Return the keys of the samples of a rollout, those of a prompt one after another."""
    key = jax.random.fold_in(root, number)

    def keys(prompt: Array) -> Array:
        mine = jax.random.fold_in(key, prompt)
        return jax.vmap(lambda sample: jax.random.fold_in(mine, sample))(jnp.arange(samples))

    return jax.vmap(keys)(jnp.arange(prompts)).reshape(-1)


def root_key(seed: int, name: str = "rollout") -> Array:
    """Return the key from which those of all rollouts of a run are derived."""
    return random.stream(jax.random.key(seed), name)


class RolloutSampler:
    """Draws samples, `slots` at a time, until each has ended. It compiles once.

    Use it under the mesh of the parameters. A mesh that splits batches splits the slots.

    Args:
      blueprint: the model, a decoder.
      tokenizer: its tokenizer.
      slots: samples that are drawn at once; rounded up to what the mesh divides.
      longest: most ids of a prompt.
      max_tokens: maximum new ids of a sample.
      temperature: divisor of the logits; 0 draws the likeliest ids, without log-probabilities.

    Raises:
      ConfigError: if a prompt and its sample do not fit the positions of the model.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        *,
        slots: int,
        longest: int,
        max_tokens: int,
        temperature: float,
    ):
        _check(blueprint, longest, max_tokens)
        ways = rules.split(jax.sharding.get_abstract_mesh(), "batch")
        self.slots, self._longest = -(-slots // ways) * ways, longest
        self._max_tokens, self._pad = max_tokens, tokenizer.pad
        self._decoding = decode.build(
            blueprint.merge,
            functools.partial(
                sampling.draw, temperature=temperature, top_k=None, top_p=None, min_p=None
            ),
            max_tokens=max_tokens,
            ends=tokenizer.ends,
            pad=tokenizer.pad,
            allowed=jnp.asarray(allowed_ids(tokenizer, blueprint.config.vocab)),
            is_scored=temperature > 0,
            temperature=temperature or None,
        ).compiled()

    def draw(
        self, params: Any, prompts: Sequence[Int[np.ndarray, "n"]], keys: Array
    ) -> list[Drawn]:
        """Return a sample of each prompt, drawn with its key."""
        ready = self._decoding.prepare(params)
        samples: list[Drawn] = []
        for first in range(0, len(prompts), self.slots):
            samples += self._drawn(ready, prompts[first : first + self.slots], keys[first:])
        return samples

    def _drawn(self, ready: Any, prompts: Sequence[np.ndarray], keys: Array) -> list[Drawn]:
        count = len(prompts)
        ids = np.full((self.slots, self._longest), self._pad, np.int32)
        lengths = np.ones(self.slots, np.int32)  # of a slot without a prompt, whose sample is lost
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        chosen = keys[np.minimum(np.arange(self.slots), count - 1)]
        inputs: Any = ids, lengths, chosen
        state = self._decoding.start(ready, *inputs)
        until = jnp.int32(self._max_tokens)
        state = self._decoding.decode_until(ready, state, chosen, until)
        out = host.fetch(decode.collect(state))
        log_p = np.zeros(out.ids.shape) if out.log_probabilities is None else out.log_probabilities
        return [
            Drawn(out.ids[row, :size], log_p[row, :size], REASONS[int(out.reason[row])])
            for row, size in enumerate(out.length[:count].tolist())
        ]


def _check(blueprint: Blueprint, longest: int, max_tokens: int) -> None:
    positions = blueprint.text_positions
    if positions is not None and longest + max_tokens > positions:
        raise ConfigError(
            f"{longest} tokens of a prompt and {max_tokens} new ones exceed the positions",
            where="rl.max_tokens",
            why=f"the model has {positions} positions for text",
            fix=f"--config.rl.max_tokens={max(positions - longest, 1)}",
        )


class Weighted(NamedTuple):
    """A sample with its prompt, and its advantage; None if it is not trained on."""

    prompt: Int[np.ndarray, "n"]
    drawn: Drawn
    advantage: float | None


def as_rows(
    samples: Sequence[Weighted], length: int, *, mean: MeanOf = "sum", max_tokens: int = 1
) -> Tokens:
    """Return rows of `length` slots with one sample each, NumPy arrays.

    The weights of sampled tokens and the counts make sum_t w_t L_t / N the mean that `mean` names,
    see `objectives.config.Policy`. A sample without an advantage has weight 0 and is not counted.
    """
    shape = (len(samples), length)
    tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights, log_p, advantages, counts = (np.zeros(shape, np.float32) for _ in range(4))
    for row, (prompt, drawn, advantage) in enumerate(samples):
        ids = np.concatenate((prompt, drawn.ids))
        size, first = len(ids) - 1, len(prompt) - 1
        tokens[row, :size], targets[row, :size] = ids[:-1], ids[1:]
        segments[row, :size], positions[row, :size] = 1, np.arange(size)
        here = (row, slice(first, size))
        log_p[here] = drawn.log_p
        if advantage is None:
            continue
        advantages[here] = advantage
        divisor = {"sequence": len(drawn.ids), "constant": max_tokens}.get(mean, 1)
        weights[here] = 1 / divisor
        counts[here if mean == "token" else (row, first)] = 1
    columns: Any = log_p, advantages, counts
    fields: Any = tokens, targets, weights, segments, positions
    return Tokens(*fields)._replace(rollout=Rollout(*columns))
