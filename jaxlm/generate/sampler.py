"""Text from a model: the same prompts with the same keys, at any step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.core import random
from jaxlm.core.callbacks import OnText
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import beam, decode, sampling, text_stream
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.consume import consume
from jaxlm.generate.sampling import Penalties
from jaxlm.generate.text_stream import TextStream
from jaxlm.models.build import Blueprint
from jaxlm.models.config import EncoderDecoderConfig
from jaxlm.parallel import host, rules

MIN_PADDED = (
    32  # slots of a prompt; longer ones are padded to powers of two, to compile few lengths
)
STREAMED_TOKENS = 4  # per row between two calls of `on_text`
# Receives the index of a prompt, the next part of its text, and True at the end of the text.
REASONS = {decode.LENGTH: "length", decode.END: "eos_token", decode.STOP: "stop_sequence"}


class Continuation(NamedTuple):
    """The continuation of a prompt."""

    prompt: str
    ids: list[int]  # without the end token; the last may reach beyond the stop sequence
    text: str
    log_probabilities: list[float] | None  # of each id
    finish_reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields; without log-probabilities if they were not requested."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def prompt_rows(
    tokenizer: Tokenizer, prompts: Sequence[str], *, is_paired: bool
) -> list[list[int]]:
    """Return the ids of each prompt as the start of a document, or after an end token.

    An end token stands in for a missing start token. An encoder (`is_paired`) reads each prompt as
    a whole document.
    """
    first, encoded = tokenizer.before, tokenizer.encode_many(prompts)
    if is_paired:
        return [[*first, *ids, *tokenizer.after] for ids in encoded]
    return [[*(first if first or ids else tokenizer.after), *ids] for ids in encoded]


def check_positions(
    rows: Sequence[Sequence[int]], max_tokens: int, positions: int | None, flag: str
) -> None:
    """Raise ConfigError if a row and its continuation exceed the positions of a model."""
    longest = max(map(len, rows), default=0)
    if positions is None or longest + max_tokens <= positions:
        return
    room = positions - longest
    raise ConfigError(
        f"{longest} prompt tokens and {max_tokens} new ones exceed the positions",
        where=f"{flag}prompts, {flag}max_tokens",
        why=f"the model has {positions} positions for text",
        fix=f"{flag}max_tokens={room}" if room > 0 else "a shorter prompt",
    )


class Sampler:
    """Continues prompts; one program is compiled for each number of prompts and padded length.

    `both_ways` makes attention within a prompt bidirectional.

    Raises:
      ConfigError: if a prompt of the config and its continuation do not fit the model's position
        table; `flag` is the prefix of `max_tokens` in the fix.
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
        self._is_paired = isinstance(blueprint.config, EncoderDecoderConfig)
        rows = prompt_rows(tokenizer, config.prompts, is_paired=self._is_paired)
        check_positions(rows, config.max_tokens, blueprint.text_positions, flag)
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
        self._search: Callable[..., Any] | None = None
        if config.beams > 1:
            searched = beam.build(
                blueprint.merge, beams=config.beams, length_penalty=config.length_penalty, **shared
            )
            self._search = jax.jit(searched)
            return
        cuts = ("temperature", "top_k", "top_p", "min_p")
        decoding = decode.build(
            blueprint.merge,
            functools.partial(sampling.draw, **{name: getattr(config, name) for name in cuts}),
            penalties=Penalties(
                repetition=config.repetition_penalty,
                presence=config.presence_penalty,
                frequency=config.frequency_penalty,
            ),
            stops=jnp.asarray(text_stream.stop_automaton(self._stops, tokenizer.table))
            if self._stops
            else None,
            is_scored=is_scored,
            **shared,
        )
        self._layout, self._decoding = decoding.prepare, decoding.compiled()

    def prepared(self, params: Any) -> Any:
        """Return the weights as the token loop reads them, for `write_prepared`."""
        return params if self._search is not None else self._decoding.prepare(params)

    def consumed(self, params: Any, retained: Sequence[Array] = ()) -> Any:
        """Return `prepared(params)`, made in parts; delete the parameters, see `consume`.

        Args:
          params: the parameters.
          retained: arrays that are not deleted.
        """
        if self._search is not None or not decode.needs_relayout():
            return params
        form = jax.tree.structure(jax.eval_shape(self._layout, params))
        leaves = consume(lambda params: jax.tree.leaves(self._layout(params)), params, retained)
        return jax.tree.unflatten(form, leaves)

    def write(self, params: Any, on_text: OnText | None = None) -> list[Continuation]:
        """Return the continuation of each prompt; it depends on that prompt and its seed only.

        `on_text` receives text while it is generated; beam search does not call it.
        """
        return self.write_prepared(self.prepared(params), on_text)

    def write_prepared(self, ready: Any, on_text: OnText | None = None) -> list[Continuation]:
        """Return what `write` does, with the weights that `prepared` returned."""
        rows = prompt_rows(self.tokenizer, self.config.prompts, is_paired=self._is_paired)
        seeds = self.config.seed if len(self.config.seed) > 1 else self.config.seed * len(rows)
        keys = [random.key(seed, "sample") for seed in seeds]
        return self._continued(ready, self.config.prompts, rows, keys, on_text)

    def continue_rows(
        self,
        params: Any,
        rows: Sequence[Sequence[int]],
        keys: Sequence[Array],
        *,
        least: int = 1,
    ) -> list[Continuation]:
        """Return the continuation of each row of ids, drawn with the key of the row.

        The prompts of the continuations are empty, and those of the config are not used. Rows are
        padded as if one had at least `least` ids.
        """
        return self._continued(self.prepared(params), [""] * len(rows), rows, keys, None, least)

    def _continued(
        self,
        ready: Any,
        prompts: Sequence[str],
        rows: Sequence[Sequence[int]],
        keys: Sequence[Array],
        on_text: OnText | None,
        least: int = 1,
    ) -> list[Continuation]:
        tokenizer = self.tokenizer
        # Rows that fill the devices hold one token and are dropped.
        spare = -len(rows) % rules.split(jax.sharding.get_abstract_mesh(), "batch")
        rows = [*rows, *[[tokenizer.eos]] * spare]
        longest = max(least, *map(len, rows))
        padded_length = max(MIN_PADDED, 1 << (longest - 1).bit_length())
        padded = np.full((len(rows), padded_length), tokenizer.pad, np.int32)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in rows], np.int32)
        stacked = jnp.stack([*keys, *[random.key(0, "sample")] * spare])
        inputs = (padded, lengths, stacked)
        if self._search is not None:
            out = host.fetch(self._search(ready, *inputs))
        else:
            out = self._drawn(ready, inputs, on_text)
        return [self._written(prompt, row, out) for row, prompt in enumerate(prompts)]

    def _drawn(
        self, ready: Any, inputs: tuple[Any, ...], on_text: OnText | None
    ) -> decode.Generated:
        """Generate with the same programs: all at once, or a few tokens at a time for `on_text`."""
        decoding, max_tokens = self._decoding, self.config.max_tokens
        keys = inputs[-1]
        state = decoding.start(ready, *inputs)
        if on_text is None:
            state = decoding.decode_until(ready, state, keys, jnp.int32(max_tokens))
            return host.fetch(decode.collect(state))
        streams = [TextStream(self._stops) for _ in self.config.prompts]
        shown, until = [0] * len(streams), 1
        while True:
            ids, lengths, reasons = host.fetch((state.ids, state.length, state.reason))
            is_last = not ((reasons < 0) & (lengths < max_tokens)).any()
            for row, stream in enumerate(streams):
                end = lengths[row] - (reasons[row] == decode.END)
                more = b"".join(self.tokenizer.table[i] for i in ids[row, shown[row] : end])
                shown[row] = end
                is_ended = is_last or bool(reasons[row] >= 0)
                on_text(row, stream.push(more, is_ended=is_ended), is_ended)
            if is_last:
                return host.fetch(decode.collect(state))
            until = min(until + STREAMED_TOKENS, max_tokens)
            state = decoding.decode_until(ready, state, keys, jnp.int32(until))

    def _written(self, prompt: str, row: int, out: Any) -> Continuation:
        reason, count = int(out.reason[row]), int(out.length[row])
        count -= reason == decode.END
        ids = out.ids[row, :count].tolist()
        text = b"".join(self.tokenizer.table[i] for i in ids)
        scores = out.log_probabilities
        return Continuation(
            prompt=prompt,
            ids=ids,
            text=text_stream.cut_at_stop(text, self._stops).decode("utf-8", "replace"),
            log_probabilities=None if scores is None else scores[row, :count].tolist(),
            finish_reason=REASONS[reason],
        )
