"""Samples of a model for training: a pure function of parameters, prompts and keys.

The tokens of a sample depend on its prompt and its key, not on the slot or on other samples. A key
is a function of the seed of the run, the number of the rollout, the prompt and the sample.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
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
from jaxlm.generate.decode import DecodeState
from jaxlm.generate.sampler import REASONS
from jaxlm.models.build import Blueprint
from jaxlm.objectives.policy_config import MeanOf
from jaxlm.parallel import host, rules
from jaxlm.rl.config import prompt_rows, refilled


class DrawnSample(NamedTuple):
    """A sample: the ids after its prompt, and the log-probability of each when it was drawn.

    The ids have the end token. Of several turns, `is_drawn` is False for ids that the model did not
    draw, whose log-probability is 0; None if it drew all.
    """

    ids: Int[np.ndarray, "n"]
    log_p: Float[np.ndarray, "n"]
    reason: str  # eos_token or length
    is_drawn: Bool[np.ndarray, "n"] | None = None

    @property
    def mask(self) -> Bool[np.ndarray, "n"]:
        """The ids that the model drew."""
        return np.ones(len(self.ids), bool) if self.is_drawn is None else self.is_drawn

    @property
    def turns(self) -> int:
        """The number of turns of the model."""
        mask = self.mask
        return 1 + int((~mask[:-1] & mask[1:]).sum())

    @property
    def last_turn(self) -> Int[np.ndarray, "n"]:
        """The ids of the last turn, with the end token."""
        others = np.flatnonzero(~self.mask)
        return self.ids[others[-1] + 1 :] if len(others) else self.ids

    def followed(self, more: Int[np.ndarray, "n"]) -> "DrawnSample":
        """Return the sample with ids that the model did not draw."""
        return self.then(
            DrawnSample(more, np.zeros(len(more), np.float32), self.reason), is_drawn=False
        )

    def then(self, turn: "DrawnSample", *, is_drawn: bool = True) -> "DrawnSample":
        """Return the sample with a further turn."""
        mask = np.concatenate((self.mask, np.full(len(turn.ids), is_drawn)))
        ids, log_p = np.concatenate((self.ids, turn.ids)), np.concatenate((self.log_p, turn.log_p))
        return DrawnSample(ids, log_p, turn.reason, mask)


class _Prompts(NamedTuple):
    """Prompts of some slots; `words` are those of the keys of samples."""

    ids: Int[Array, "N P"]
    lengths: Int[Array, "N"]
    sources: Int[Array, "A"]  # the prompt of each slot
    words: Int[Array, "A 2"]
    turns: Int[Array, "A"]
    is_used: Bool[Array, "A"]


# The ids that follow a turn of each (sample, what it has so far), None where the sample is over.
Follow = Callable[[Sequence[tuple[int, DrawnSample]]], Sequence[Int[np.ndarray, "n"] | None]]
Deliver = Callable[[int, DrawnSample], None]


def allowed_ids(tokenizer: Tokenizer, vocab: int) -> Bool[np.ndarray, "V"]:
    """Return the mask of the ids that are drawn: those of text, and those that end it."""
    ids = np.arange(vocab)
    return np.isin(ids, [*np.flatnonzero(tokenizer.token_bytes > 0), *tokenizer.ends])


@functools.partial(jax.jit, static_argnums=(2, 3))
def row_keys(root: Array, number: Array, prompts: int, samples: int) -> Array:
    """Return the keys of the samples of a rollout, those of a prompt one after another."""
    of_prompts = jnp.repeat(jnp.arange(prompts), samples)
    of_samples = jnp.tile(jnp.arange(samples), prompts)
    return random.draw_keys(jax.random.fold_in(root, number), of_prompts, of_samples)


def turn_keys(words: Int[Array, "B 2"], turns: Int[Array, "B"]) -> Array:
    """Return the key of each sample's turn: the first turn has that of the sample."""
    keys = jax.random.wrap_key_data(words)
    return jnp.where(turns == 0, keys, jax.vmap(jax.random.fold_in)(keys, turns))


def root_key(seed: int, name: str = "rollout") -> Array:
    """Return the key from which those of all rollouts of a run are derived."""
    return random.stream(jax.random.key(seed), name)


class RolloutSizes(NamedTuple):
    """Sizes of rollouts.

    Args:
      slots: samples that are drawn at once; rounded up to what the mesh divides.
      longest: most ids of a prompt, those of earlier turns included.
      max_tokens: maximum new ids of a turn.
      samples: usual number of samples of a prompt, which are drawn one after another.
    """

    slots: int
    longest: int
    max_tokens: int
    samples: int = 1


class RolloutSampler:
    """Draws samples, `slots` at a time. A slot whose sample has ended gets the next prompt.

    The program is that of `jaxlm generate` (`generate.decode`), and draws the ids that the engine
    of the server draws by the same keys. The engine is another loop for another promise: a request
    has the same bits whenever it comes, so prompts are read one at a time, on one device, and its
    scores are those of the model. A rollout has all its prompts at the start, reads many at once,
    splits them over a mesh, and keeps the log-probabilities of the distribution it draws from.

    Slots are filled when a quarter of them are free. The tokens of a sample are those of any other
    number of slots, up to rounding. Use it under the mesh of the parameters; a mesh that splits
    batches splits the slots. On one device a prompt is read once for its samples that begin
    together; the program that reads prompts then compiles twice, as those of further turns differ.

    Args:
      blueprint: the model, a decoder.
      tokenizer: its tokenizer.
      sizes: slots, prompts and samples.
      temperature: divisor of the logits; 0 draws the likeliest ids, without log-probabilities.

    Raises:
      ConfigError: if a prompt and its sample do not fit the positions of the model.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        sizes: RolloutSizes,
        temperature: float,
    ):
        slots, longest, max_tokens, samples = sizes
        _check(blueprint, longest, max_tokens)
        mesh = jax.sharding.get_abstract_mesh()
        ways = rules.split(mesh, "batch")
        self._samples = samples if mesh.size <= 1 else 1  # else prompts would change devices
        self.slots, self._longest = -(-slots // ways) * ways, longest
        self._refilled = refilled(self.slots, ways)
        self._max_tokens, self._pad = max_tokens, tokenizer.pad
        self.passes = 0  # of the model, for a token of each slot
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
        )
        self._prepare = self._decoding.compiled().prepare
        self._start = jax.jit(self._started)
        self._layout: Any = None  # of the state; programs keep it, so that they compile once

    def _started(self, ready: Any, prompts: _Prompts) -> DecodeState:
        """Return the state of some rows after their first tokens; rows without a sample ended."""
        keys = turn_keys(prompts.words, prompts.turns)
        is_shared = len(prompts.ids) < len(prompts.sources)
        sources = prompts.sources if is_shared else None
        state = self._decoding.start(ready, prompts.ids, prompts.lengths, keys, sources)
        return state._replace(reason=jnp.where(prompts.is_used, state.reason, decode.END))

    def _refill(
        self, ready: Any, state: DecodeState, prompts: _Prompts, rows: Array
    ) -> DecodeState:
        """Put new samples into some rows; a row past the last one is dropped."""
        new = self._started(ready, prompts)
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, new)

    def _advanced(
        self, ready: Any, state: DecodeState, words: Array, turns: Array, ended: Array
    ) -> DecodeState:
        """Draw until a number of rows have ended."""
        until = jnp.int32(self._max_tokens)
        return self._decoding.decode_until(ready, state, turn_keys(words, turns), until, ended)

    def _compile(self, state: DecodeState) -> None:
        """Compile the other programs for the layout of the first state."""
        self._layout = jax.tree.map(lambda x: x.sharding, state)
        options: dict[str, Any] = {"donate_argnums": 1, "out_shardings": self._layout}
        self._admit = jax.jit(self._refill, **options)
        self._advance = jax.jit(self._advanced, **options)

    def draw(
        self,
        params: Any,
        prompts: Sequence[Int[np.ndarray, "n"]],
        keys: Array,
        *,
        follow: Follow | None = None,
        deliver: Deliver = lambda number, drawn: None,
    ) -> list[DrawnSample]:
        """Return a sample of each prompt, drawn with its key.

        Args:
          params: all parameters.
          prompts: ids of each prompt.
          keys: the key of each sample.
          follow: the ids that follow a turn which ended by an end token, after which the model
            draws another; by default (None) a sample is one turn.
          deliver: called with each sample as soon as it has ended, while others are drawn.
        """
        ready = self._prepare(params)
        board = _Board(prompts, np.asarray(jax.random.key_data(keys)), self.slots)
        state = self._start(ready, self._next(board, self.slots)[0])
        if self._layout is None:
            self._compile(state)
        while True:
            ended = np.int32((board.owners < 0).sum() + self._refilled)
            state = self._advance(ready, state, *board.keys_of(board.owners), ended)
            out: Any = host.fetch(decode.collect(state)._replace(reason=state.reason))
            self.passes += board.passes(out.length)
            over = (out.reason >= 0) | (out.length >= self._max_tokens)
            for number, sample in board.ended(out, over, follow):
                deliver(number, sample)
            if not board.waiting and (board.owners < 0).all():
                return [board.samples[number] for number in range(len(prompts))]
            while board.waiting and (board.owners < 0).any():
                state = self._admit(ready, state, *self._next(board, self._refilled))

    def _next(self, board: "_Board", size: int) -> tuple[_Prompts, Int[np.ndarray, "A"]]:
        """Put the next samples into free rows; return their prompts and rows, `size` of each."""
        rows = np.flatnonzero(board.owners < 0)[:size]
        chosen = board.fill(rows)
        prompts = [board.prompt(number) for number in chosen]
        distinct = {prompt.tobytes(): prompt for prompt in prompts}
        most = prompt_rows(size, self._samples)
        is_shared = most < size and len(distinct) <= most
        read = [*distinct.values()] if is_shared else prompts
        ids = np.full((most if is_shared else size, self._longest), self._pad, np.int32)
        lengths = np.ones(len(ids), np.int32)  # of a row without a sample
        for row, prompt in enumerate(read):
            ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        sources = np.arange(size, dtype=np.int32)
        if is_shared:
            number_of = {name: number for number, name in enumerate(distinct)}
            sources = np.zeros(size, np.int32)
            sources[: len(prompts)] = [number_of[prompt.tobytes()] for prompt in prompts]
        numbers, places = np.full(size, -1), np.full(size, self.slots, np.int32)
        numbers[: len(chosen)], places[: len(chosen)] = chosen, rows[: len(chosen)]
        inputs: Any = ids, lengths, sources, *board.keys_of(numbers), numbers >= 0
        return _Prompts(*inputs), places


class _Board:
    """The samples that are drawn: those in slots, those that wait, and those that have ended."""

    def __init__(self, prompts: Sequence[np.ndarray], words: np.ndarray, slots: int):
        self._prompts, self._words = prompts, words
        self._turns = np.zeros(len(prompts), np.int32)
        self._parts: dict[int, DrawnSample] = {}  # of samples that have a further turn
        self._lengths = np.zeros(slots, np.int32)  # of each slot, when it was last seen
        self.owners = np.full(slots, -1)  # the sample in each slot; -1 for none
        self.waiting = deque(range(len(prompts)))
        self.samples: dict[int, DrawnSample] = {}

    def keys_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the words of the key and the turn of each sample."""
        numbers = np.maximum(numbers, 0)
        return self._words[numbers], self._turns[numbers]

    def prompt(self, number: int) -> np.ndarray:
        """Return the ids before the next turn of a sample."""
        prompt, part = self._prompts[number], self._parts.get(number)
        return prompt if part is None else np.concatenate((prompt, part.ids))

    def fill(self, rows: np.ndarray) -> list[int]:
        """Put the samples that wait into free rows, as many as there are; return them."""
        chosen = [self.waiting.popleft() for _ in range(min(len(self.waiting), len(rows)))]
        self.owners[rows[: len(chosen)]], self._lengths[rows[: len(chosen)]] = chosen, 1
        return chosen

    def passes(self, lengths: np.ndarray) -> int:
        """Return the passes of the model since the slots were last seen."""
        passes = np.where(self.owners >= 0, lengths - self._lengths, 0).max()
        self._lengths = lengths.copy()
        return int(passes)

    def ended(
        self, out: Any, over: np.ndarray, follow: Follow | None
    ) -> list[tuple[int, DrawnSample]]:
        """Free the rows whose turn is over; return the samples that have ended."""
        done: list[tuple[int, DrawnSample]] = []
        for row in np.flatnonzero(over & (self.owners >= 0)).tolist():
            number, self.owners[row] = int(self.owners[row]), -1
            size = int(out.length[row])
            scores = out.log_probabilities
            log_p = np.zeros(size, np.float32) if scores is None else scores[row, :size]
            turn = DrawnSample(out.ids[row, :size], log_p, REASONS[max(int(out.reason[row]), 0)])
            part = self._parts.pop(number, None)
            done.append((number, turn if part is None else part.then(turn)))
        open_turns = [each for each in done if follow and each[1].reason == "eos_token"]
        following = follow(open_turns) if follow and open_turns else []
        for (number, sample), more in zip(open_turns, following, strict=True):
            if more is not None:
                self._parts[number] = sample.followed(more)
                self._turns[number] += 1
                self.waiting.append(number)
        finished = [(number, sample) for number, sample in done if number not in self._parts]
        self.samples |= dict(finished)
        return finished


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
    drawn: DrawnSample
    advantage: float | None


def empty_last(samples: Sequence[Weighted], microbatches: int) -> list[Weighted]:
    """Return the samples of an update, those without an advantage in its last micro-batches.

    Each part of the rows that a device has fills the same micro-batches: row r of an update is in
    micro-batch r mod `microbatches`, see `parallel.pipeline.split_microbatches`.
    """
    if microbatches == 1:
        return [*samples]
    places = sorted(range(len(samples)), key=lambda row: row % microbatches)
    ranked = sorted(samples, key=lambda each: each.advantage is None)
    placed = dict(zip(places, ranked, strict=True))
    return [placed[row] for row in range(len(samples))]


def _places(
    rows: Int[np.ndarray, "n"], firsts: Int[np.ndarray, "n"], counts: Int[np.ndarray, "n"]
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
    """Return row and slot of the slots of each row from its first on, `counts` of them."""
    before = np.cumsum(counts) - counts
    return np.repeat(rows, counts), np.arange(counts.sum()) + np.repeat(firsts - before, counts)


def as_rows(
    samples: Sequence[Weighted], length: int, *, mean: MeanOf = "sum", max_tokens: int = 1
) -> Tokens:
    """Return rows of `length` slots with one sample each, NumPy arrays.

    The weights of sampled tokens and the counts make sum_t w_t L_t / N the mean that `mean` names,
    see `objectives.config.Policy`. A sample without an advantage is an empty row.
    """
    shape = (len(samples), length)
    tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights, log_p, advantages, counts = (np.zeros(shape, np.float32) for _ in range(4))
    used = [(row, each) for row, each in enumerate(samples) if each.advantage is not None]
    if used:  # all rows at once: a loop over them is a share of a small model's iteration
        rows = np.array([row for row, _ in used])
        prompts = np.array([len(each.prompt) for _, each in used])
        sizes = np.array([len(each.drawn.ids) for _, each in used])
        ids = np.concatenate([x for _, each in used for x in (each.prompt, each.drawn.ids)])
        stops = np.cumsum(prompts + sizes)
        read = _places(rows, np.zeros_like(prompts), prompts + sizes - 1)
        tokens[read], targets[read] = np.delete(ids, stops - 1), np.delete(ids, stops[:-1])[1:]
        segments[read], positions[read] = 1, read[1]
        here = _places(rows, prompts - 1, sizes)
        masks = [each.drawn.mask for _, each in used]
        mask = np.concatenate(masks)
        log_p[here] = np.concatenate([each.drawn.log_p for _, each in used])
        advantages[here] = np.repeat([each.advantage for _, each in used], sizes) * mask
        divisors = np.full(len(used), max_tokens if mean == "constant" else 1)
        if mean == "sequence":
            divisors = np.array([each.sum() for each in masks])
        weights[here] = mask / np.repeat(divisors, sizes)
        if mean == "token":
            counts[here] = mask
        else:
            counts[rows, prompts - 1] = 1
    columns: Any = log_p, advantages, counts
    fields: Any = tokens, targets, weights, segments, positions
    return Tokens(*fields)._replace(rollout=Rollout(*columns))
