"""Text from a model: the same prompts, drawn with the same keys, at any step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import random
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import beam, decode, sampling, text_stream
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampling import Penalties
from jaxlm.generate.text_stream import Stream
from jaxlm.models.build import Blueprint
from jaxlm.models.config import EncoderDecoder
from jaxlm.parallel import host, rules

MIN_PADDED = (
    32  # slots of a prompt; longer ones have a power of two, so that few lengths are compiled
)
SHOWN_TOKENS = 4  # of each row between two looks at what there is, where it is told
# Told of a row, by its place among the prompts: what follows of its text, and whether that was all.
OnText = Callable[[int, str, bool], None]
REASONS = {decode.LENGTH: "length", decode.END: "eos_token", decode.STOP: "stop_sequence"}


class Continuation(NamedTuple):
    """What follows a prompt."""

    prompt: str
    ids: list[int]  # without the end token; the last may reach beyond the stop that cut the text
    text: str
    log_probabilities: list[float] | None  # of each id
    finish_reason: str

    def as_json(self) -> dict[str, Any]:
        """Under these names; without log-probabilities where they were not asked for."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Sampler:
    """Goes on from prompts, which are read `both_ways` or not. One program is compiled for each number of prompts and padded length.

    Raises:
      ConfigError: where a prompt of the config and what follows it do not fit the model's position table; `flag` is what
        its fix puts before `max_tokens`.
    """

    def __init__(
        self,
        config: GenerateConfig,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        *,
        both_ways: bool = False,
        is_scored: bool = False,
        flag: str = "--config.sample.",
    ):
        self.config, self.tokenizer = config, tokenizer
        self._is_paired = isinstance(blueprint.config, EncoderDecoder)
        self._check_room(blueprint.config.positions, flag)
        if config.prompt_lookup and not decode.can_look_up(blueprint.config):
            raise ConfigError(
                "this model cannot check guesses",
                where=f"{flag}prompt_lookup={config.prompt_lookup}",
                why="it reads a text otherwise once that goes beyond the original context (rope_scaling.name=long), as guesses may",
                fix=f"{flag}prompt_lookup=0",
            )
        ids = np.arange(blueprint.config.vocab)
        text = np.isin(ids, [*np.flatnonzero(tokenizer.token_bytes > 0), *tokenizer.ends])
        self._stops = tuple(stop.encode() for stop in config.stop)
        shared: dict[str, Any] = {
            "max_tokens": config.max_tokens,
            "ends": tokenizer.ends,
            "pad": tokenizer.pad,
            "allowed": jnp.asarray(text),
            "both_ways": both_ways,
            "is_int8": config.kv_cache_dtype == "int8",
        }
        if config.beams > 1:
            searched = beam.build(
                blueprint.merge,
                beams=config.beams,
                length_penalty=config.length_penalty,
                **shared,
            )
            self._search = jax.jit(searched)
            return
        cuts = ("temperature", "top_k", "top_p", "min_p")
        self._decoding = decode.build(
            blueprint.merge,
            functools.partial(sampling.draw, **{name: getattr(config, name) for name in cuts}),
            penalties=Penalties(
                repetition=config.repetition_penalty,
                presence=config.presence_penalty,
                frequency=config.frequency_penalty,
            ),
            stops=jnp.asarray(text_stream.automaton(self._stops, tokenizer.table))
            if self._stops
            else None,
            is_scored=is_scored,
            lookup=config.prompt_lookup,
            **shared,
        ).compiled()

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
        """The ids of each prompt as a document begins; where nothing does, after the end of another.

        An encoder reads each as a whole document.
        """
        first = self.tokenizer.before
        encoded = self.tokenizer.encode_many(prompts)
        if self._is_paired:
            return [[*first, *ids, *self.tokenizer.after] for ids in encoded]
        return [[*(first if first or ids else self.tokenizer.after), *ids] for ids in encoded]

    def write(self, params: Any, tell: OnText | None = None) -> list[Continuation]:
        """What follows each prompt of the config. Depends on that prompt and its seed, not on what is beside it.

        `tell` is told of it as it is made, but of a search, whose text is not known before its end.
        """
        config, tokenizer = self.config, self.tokenizer
        rows = self._rows(config.prompts)
        seeds = config.seed if len(config.seed) > 1 else config.seed * len(rows)
        # Rows that only fill up to the devices hold one token, and are dropped again.
        spare = -len(rows) % rules.split(jax.sharding.get_abstract_mesh(), "batch")
        rows += [[tokenizer.eos]] * spare
        longest = max(MIN_PADDED, 1 << (max(map(len, rows)) - 1).bit_length())
        padded = np.full((len(rows), longest), tokenizer.pad, np.int32)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in rows], np.int32)
        keys = jnp.stack([random.key(seed, "sample") for seed in (*seeds, *(0,) * spare)])
        given = (padded, lengths, keys)
        if config.beams > 1:
            out = host.fetch(self._search(params, *given))
        else:
            out = self._drawn(params, given, tell)
        return [self._written(prompt, row, out) for row, prompt in enumerate(config.prompts)]

    def _drawn(self, params: Any, given: tuple[Any, ...], tell: OnText | None) -> decode.Generated:
        """By the same programs, in one go or, where somebody is told, some tokens at a time."""
        decoding, most = self._decoding, self.config.max_tokens
        ready, keys = decoding.ready(params), given[-1]
        state = decoding.begin(ready, *given)
        if tell is None:
            state = decoding.go_on(ready, state, keys, jnp.int32(most))
            return host.fetch(decode.drawn(state))
        streams = [Stream(self._stops) for _ in self.config.prompts]
        shown, until = [0] * len(streams), 1
        while True:
            ids, lengths, reasons = host.fetch((state.ids, state.length, state.reason))
            is_last = not ((reasons < 0) & (lengths < most)).any()
            for row, stream in enumerate(streams):
                end = lengths[row] - (reasons[row] == decode.END)
                more = b"".join(self.tokenizer.table[i] for i in ids[row, shown[row] : end])
                shown[row] = end
                is_ended = is_last or bool(reasons[row] >= 0)
                tell(row, stream.push(more, is_ended=is_ended), is_ended)
            if is_last:
                return host.fetch(decode.drawn(state))
            until = min(until + SHOWN_TOKENS, most)
            state = decoding.go_on(ready, state, keys, jnp.int32(until))

    def _written(self, prompt: str, row: int, out: Any) -> Continuation:
        reason, count = int(out.reason[row]), int(out.length[row])
        count -= reason == decode.END
        ids = out.ids[row, :count].tolist()
        text = b"".join(self.tokenizer.table[i] for i in ids)
        found = out.log_probabilities
        return Continuation(
            prompt=prompt,
            ids=ids,
            text=text_stream.cut(text, self._stops).decode("utf-8", "replace"),
            log_probabilities=None if found is None else found[row, :count].tolist(),
            finish_reason=REASONS[reason],
        )
