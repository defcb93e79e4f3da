"""Continuous batching: requests come at any time, and share passes over the weights.

The result of a request is a function of its own fields: other requests, the slot and the time of
arrival change no bit of it. `Engine.warm_up` compiles all programs before the first request.
"""

import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.core import backend
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import balance, prefix, slots
from jaxlm.generate.balance import CallTimes, DraftBalance, DrawCall
from jaxlm.generate.draft import Draft
from jaxlm.generate.drafting import Chunk, Drafting, Mode
from jaxlm.generate.prefix import PrefixCache
from jaxlm.generate.requests import (
    CompletedRequest,
    Counters,
    Deliver,
    Delta,
    QueueFull,
    Reason,
    Request,
    Ticket,
    TokenScore,
    joined,
)
from jaxlm.generate.rows import ALL, RowSettings, Sampling
from jaxlm.generate.slots import NO_SCORES, Arrival, Programs, Scores
from jaxlm.models.build import Blueprint
from jaxlm.models.config import EncoderDecoderConfig
from jaxlm.ops.row_product import is_one_cpu
from jaxlm.parallel import rules

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event of a compilation
CHECKED_TOKENS = 8  # drawn at the start by two programs, to compare their bits
ALL_CHUNKS = 2**31  # if no stream waits for its next token
STOP_PASSES = 8  # of a call if a row has a stop, which the device does not know
MEASURED_PASSES = 8  # to compare the time of passes with guesses and without


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes of the slots, of the queue, and of the kept beginnings of prompts.

    Args:
      rows: number of slots.
      context: largest number of tokens of a request, its prompt included.
      chunk: tokens of a prompt that are read in one pass.
      is_int8: store the KV cache in int8.
      max_waiting: tokens of requests that may wait for a slot; None for any number.
      prefix_bytes: bytes of beginnings of prompts that are kept for later requests; a model whose
        layers have windows keeps none.
      keeps_params: keep the parameters that no program reads, as those of a CPU, which reads copies
        of them in another layout; False deletes each array when its copies exist.
    """

    rows: int = 8
    context: int = 1024
    chunk: int = 64
    is_int8: bool = False
    max_waiting: int | None = None
    prefix_bytes: int = 0
    keeps_params: bool = True


class Engine:
    """Slots of one KV cache with a static number of rows, and the requests in them.

    A tick admits requests into free slots, reads a chunk of a prompt, draws one token for all
    rows, and delivers. One thread calls `tick`, and must be the same for all ticks; other
    threads call `submit` and `cancel`.

    Args:
      blueprint: the model, a decoder.
      params: its parameters.
      tokenizer: the tokenizer of the model.
      settings: sizes of the slots and of the queue.
      draft: guesses tokens that a pass verifies; no text depends on it. Passes verify none while
        that costs more time than it saves, see `balance`. The last bits of log-probabilities are
        those of another program then.
      programs: those of an engine of this model, with the same settings and other weights. Nothing
        compiles then.

    Attributes:
      draws_few: passes compute the first slots alone if no request is in another, see `warm_up`.

    Raises:
      ConfigError: if the engine does not support the model or its mesh.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        params: Any,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        *,
        draft: Draft | None = None,
        programs: Programs | None = None,
    ):
        check_supported(blueprint)
        self.tokenizer, self.context = tokenizer, settings.context
        self.max_waiting = settings.max_waiting
        self.rows = settings.rows
        self.chunk = min(settings.chunk, settings.context)
        self.drafting: Drafting | None = None
        if draft is not None:
            self.drafting = Drafting(draft, self.chunk, tokenizer.pad)
        self.vocab = blueprint.config.vocab
        self.counters = self._fresh_counters()
        self.failure: Exception | None = None
        self._length = -(-self.context // self.chunk) * self.chunk
        self._tables: dict[tuple[int, ...], np.ndarray] = {}
        self._end_masks: dict[tuple[int, ...], np.ndarray] = {}
        self._text = np.zeros(self.vocab, bool)
        self._text[: tokenizer.size] = tokenizer.token_bytes > 0
        self._tickets: list[Ticket | None] = [None] * self.rows
        self._waiting: deque[Ticket] = deque()
        self._waiting_tokens = 0
        self._lock = threading.Condition()
        self.programs = programs or slots.build(
            blueprint.merge,
            params,
            rows=self.rows,
            length=self._length,
            chunk=self.chunk,
            is_int8=settings.is_int8,
            draft=draft,
        )
        prepare = self.programs.prepare if settings.keeps_params else self.programs.consume
        self._ready = prepare(params)
        self._state = self.programs.empty()
        named = [self._state.cache.layers]
        if draft is not None:
            named.append(draft.caches(self._state.draft))
        layers = [each for layers in named for caches in layers.values() for each in caches]
        self._has_prefixes = settings.prefix_bytes > 0 and not any(each.is_ring for each in layers)
        self.prefixes = PrefixCache(settings.prefix_bytes)
        self.draws_few = False
        jax.monitoring.register_event_duration_secs_listener(self._count_compile)

    def _fresh_counters(self) -> Counters:
        return Counters(accepted=(0,) * (self.drafting.draft.guesses if self.drafting else 0))

    def _count_compile(self, event: str, duration_secs: float, **more: str | int) -> None:
        if event == COMPILED:
            self.counters.compiles += 1

    def close(self) -> None:
        """Stop counting compilations."""
        jax.monitoring.unregister_event_duration_listener(self._count_compile)

    def warm_up(self) -> None:
        """Compile all programs, and measure the time of guesses; without requests so far.

        Each runs twice: its own outputs are the inputs of the second time. On a CPU the programs of
        the first slots are used from then on if they draw the bits of those of all slots: some
        processors sum the products of few rows in another order.
        """
        slots.compile_at_once(self._largest_calls())
        if self.drafting is not None:
            self.drafting.mode = "always"
        ids = (self.tokenizer.eos,) * min(self.chunk + 2, self.context - 1)
        for is_scored in (True, False, True, False):
            top = 1 if is_scored else None
            sampling = Sampling(temperature=1.0, top_p=0.9)
            request = Request(ids=ids, max_tokens=1, sampling=sampling, top=top)
            self.complete([dataclasses.replace(request, is_prompt_scored=is_scored)])
            self._state = self.programs.wipe(self._state, np.int32(0))
            if self._has_prefixes:
                block = self.programs.save(self._state, np.int32(0), np.int32(0))
                self._state = self.programs.load(self._state, np.int32(0), np.int32(0), block)
        if self.drafting is not None:
            self.drafting.mode = "never"
            self.complete([Request(ids=ids, max_tokens=1, top=1), Request(ids=ids, max_tokens=1)])
        if self.has_few_slots:
            self.draws_few = self._has_equal_bits(len(ids))
        if self.drafting is not None:
            self.drafting.mode, self.drafting.balance = "balanced", self._measured()
        self.prefixes.clear()
        self.counters = self._fresh_counters()

    @property
    def has_few_slots(self) -> bool:
        """Return True if there are programs of the first slots alone: on one CPU device."""
        return self.rows > slots.FEW and is_one_cpu()

    def _has_equal_bits(self, length: int) -> bool:
        """Return whether the programs of the first slots draw the bits of those of all slots.

        Two slots draw, one after a prompt of `length` ids, one after half of it.
        """
        most = min(CHECKED_TOKENS, self.context - length)
        ids = np.random.default_rng(0).integers(0, self.tokenizer.size, length).tolist()
        request = Request(ids=tuple(ids), max_tokens=most, top=slots.TOP)
        both = dataclasses.replace(request, ids=request.ids[length // 2 :]), request
        modes: tuple[Mode, ...] = ("never", "always") if self.drafting is not None else ("never",)
        results: dict[bool, list[CompletedRequest]] = {False: [], True: []}
        for mode in modes:
            if self.drafting is not None:
                self.drafting.mode = mode
            for self.draws_few, completed in results.items():
                completed += self.complete(both)
        return results[False] == results[True]

    def _largest_calls(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield the programs that read the weights, each with the arguments of a call."""
        programs, start = self.programs, (self._ready, self._state)
        zero, ids = np.int32(0), np.zeros(self.chunk, np.int32)
        on, counts = np.ones(self.rows, bool), np.zeros(self.rows, np.int32)
        rows = (on, counts, self._all_allowed(), counts, zero, np.bool_(False))
        draws = [(programs.draw, programs.draw_guessed)]
        if self.has_few_slots:
            draws.append((programs.draw_few, programs.draw_few_guessed))
        for plain, guessed in draws:
            yield plain, (*start, *rows)
            if guessed is not None:
                yield guessed, (*start, *rows, on)
        yield programs.score, (*start, zero, ids, zero, zero, ids)
        yield programs.read, (*start, zero, ids, zero, zero)
        if programs.read_seen is not None:
            yield programs.read_seen, (*start, zero, ids, zero, zero)

    def _all_allowed(self) -> np.ndarray:
        return np.full((self.rows, -(-self.vocab // 32)), ALL)

    def _measured(self) -> DraftBalance:
        """Return the balance of calls with guesses and without, of greedy rows without text."""
        assert self.programs.draw_guessed is not None
        on, off = np.ones(self.rows, bool), np.zeros(self.rows, bool)
        allowed = self._all_allowed()
        left = np.full(self.rows, 2**30, np.int32)

        def seconds(passes: int, program: Callable[..., Any], *more: np.ndarray) -> float:
            limits = left, np.int32(passes), np.bool_(False)
            inputs = (on, np.full(self.rows, NO_SCORES, np.int32), allowed, *limits, *more)
            self._state = jax.block_until_ready(self.programs.empty())
            begun = balance.clock()
            self._state, drawn = program(self._ready, self._state, *inputs)
            jax.block_until_ready(drawn.passes)
            return balance.clock() - begun

        times = []
        for program in ((self.programs.draw,), (self.programs.draw_guessed, off)):
            counts = (1,) * 6 + (MEASURED_PASSES,) * 3
            taken = [(n, seconds(n, *program)) for n in counts]
            one, several = (min(s for n, s in taken if n == k) for k in (1, MEASURED_PASSES))
            each = max(several - one, several / 2) / (MEASURED_PASSES - 1)
            times.append(CallTimes(max(one - each, 0.0), each))
        self._state = self.programs.empty()
        return DraftBalance(*times)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of requests without a slot."""
        return self._waiting_tokens

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return sum(each is not None for each in self._tickets)

    @property
    def is_idle(self) -> bool:
        """Return True if there is no request."""
        return not self._waiting and not self.running

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Queue a request; `deliver` is called by the thread of the ticks.

        Raises QueueFull if too many tokens wait, ValueError if the request does not fit a slot.
        """
        if not request.ids or request.size > self.context:
            raise ValueError(f"{request.size} tokens do not fit a slot of {self.context}")
        ticket = Ticket(request, deliver)
        with self._lock:
            total, most = self._waiting_tokens + request.size, self.max_waiting
            if self._waiting and most is not None and total > most:
                raise QueueFull(self._seconds_of(total - most))
            self._waiting.append(ticket)
            self._waiting_tokens += request.size
            self._lock.notify()
        return ticket

    def _seconds_of(self, tokens: int) -> float:
        """Return the time that a number of tokens takes at the speed since the start."""
        done = self.counters.prompt_tokens + self.counters.drawn_tokens
        rate = done / self.counters.seconds if done else 100.0
        return max(1.0, tokens / rate)

    def cancel(self, ticket: Ticket) -> None:
        """End a request at the next tick, which frees its slot."""
        ticket.is_cancelled = True
        self.wake()

    def wake(self) -> None:
        """End a `wait` of the thread of the ticks."""
        with self._lock:
            self._lock.notify()

    def wait(self, seconds: float) -> None:
        """Return when there is a request, at the latest after some seconds."""
        with self._lock:
            if self.is_idle:
                self._lock.wait(seconds)

    def complete(self, requests: Sequence[Request]) -> list[CompletedRequest]:
        """Return the results of some requests, in their order, see `results`."""
        return list(self.results(requests))

    def results(
        self,
        requests: Iterable[Request],
        deliver: Callable[[int, Delta], None] | None = None,
        passes: int = slots.PASSES,
    ) -> Iterator[CompletedRequest]:
        """Yield the result of each request, in their order, by ticks of this thread.

        Later requests are drawn meanwhile. A few are taken at a time, to fill the slots. Raises the
        exception of a pass.

        Args:
          requests: the requests.
          deliver: receives the number of a request and each part of its result.
          passes: most tokens of a row in a tick.
        """
        remaining, running = enumerate(requests), deque[list[Delta]]()

        def receive(number: int, parts: list[Delta], delta: Delta) -> None:
            parts.append(delta)
            if deliver is not None:
                deliver(number, delta)

        while True:
            free = max(2 * self.rows - self.running - self.waiting, 0)
            for number, request in itertools.islice(remaining, free):
                running.append([])
                self.submit(request, functools.partial(receive, number, running[-1]))
            while running and running[0] and running[0][-1].reason:
                yield joined(running.popleft())
            if not running:
                return
            self.tick(ALL_CHUNKS, passes)
            if self.failure is not None:
                raise self.failure

    def tick(self, chunks: int = 1, passes: int = 1) -> None:
        """Admit, read at most some chunks of prompts, draw a token for each row, deliver.

        A stream waits for these chunks between two of its tokens. With more `passes`, draw up to as
        many tokens in one call of the device, until a slot is free for a request that waits. All
        prompts should be read then: the others wait. While a row has a grammar there is one pass:
        the grammar needs each token before the next.

        If a pass raises an exception, all requests in slots end with `error`, and the slots are
        made again; a second exception is raised.
        """
        self._end_early()
        try:
            self._admit()
            begun = time.perf_counter()
            for _ in range(chunks):
                if not self._read_chunk():
                    break
            self._draw(passes, chunks)
            self.counters.seconds += time.perf_counter() - begun
        except Exception as error:
            self.counters.failures += 1
            self._end_running("error")
            if self.counters.failures > 1:
                raise
            self.failure = error
            self._state = self.programs.empty()
            self.prefixes.clear()

    def end_all(self, reason: Reason) -> None:
        """End every request, also those that wait."""
        self._end_running(reason)
        while (ticket := self._next_waiting()) is not None:
            ticket.end(reason)

    def _end_running(self, reason: Reason) -> None:
        for slot, ticket in enumerate(self._tickets):
            if ticket is not None:
                self._tickets[slot] = None
                ticket.end(reason)

    def _next_waiting(self) -> Ticket | None:
        with self._lock:
            if not self._waiting:
                return None
            ticket = self._waiting.popleft()
            self._waiting_tokens -= ticket.request.size
            return ticket

    def _end_early(self) -> None:
        """End requests that are canceled or past their deadline."""
        now = time.monotonic()

        def reason(ticket: Ticket) -> Reason | None:
            limit = ticket.request.deadline
            if ticket.is_cancelled:
                return "cancelled"
            return "deadline" if limit is not None and now - ticket.begun > limit else None

        for slot, ticket in enumerate(self._tickets):
            if ticket is not None and (early := reason(ticket)):
                self._tickets[slot] = None
                ticket.end(early)
        with self._lock:
            ended = [each for each in self._waiting if reason(each)]
            for each in ended:
                self._waiting.remove(each)
                self._waiting_tokens -= each.request.size
        for each in ended:
            each.end(reason(each) or "cancelled")

    def _admit(self) -> None:
        for slot, occupant in enumerate(self._tickets):
            if occupant is not None:
                continue
            ticket = self._next_waiting()
            if ticket is None:
                return
            request = ticket.request
            self._tickets[slot] = ticket
            ids = np.full(self._length, self.vocab, np.int32)
            ids[: len(request.ids)] = request.ids
            arrival = Arrival(
                token=np.int32(request.ids[-1]),
                seed=np.uint32(request.seed),
                ids=ids,
                count=np.int32(len(request.ids)),
                bias=self._bias(request),
                ends=self._ends(request),
                settings=RowSettings.of(request.sampling),
            )
            self._state = self.programs.admit(self._state, np.int32(slot), arrival)
            if self._has_prefixes:
                self._load_prefix(slot, ticket)

    def _load_prefix(self, slot: int, ticket: Ticket) -> None:
        """Put the chunks into the slot that an earlier request has read."""
        request = ticket.request
        ticket.blocks = [*prefix.names(request.ids[:-1], self.chunk, request.salt)]
        if request.is_prompt_scored:
            return
        for name in ticket.blocks:
            stored = self.prefixes.get(name)
            if stored is None:
                return
            block, (is_seen, is_followed) = stored
            if self._needs_stream and not is_seen:
                return
            inputs = np.int32(slot), np.int32(ticket.read), block
            self._state = self.programs.load(self._state, *inputs)
            if is_seen and ticket.seen == ticket.read:
                ticket.seen += self.chunk
            if is_followed and ticket.followed == ticket.read:
                ticket.followed += self.chunk
            ticket.read += self.chunk
            ticket.cached += self.chunk
            self.counters.cached_tokens += self.chunk

    def _bias(self, request: Request) -> np.ndarray:
        """Return what is added to the logits of a row: minus infinity for ids that are no text."""
        table = self._tables.get(request.ends)
        if table is None:
            table = np.where(self._text, np.float32(0), np.float32(-np.inf))
            table[[*request.ends]] = 0
            self._tables[request.ends] = table
        if request.sampling.bias:
            table = table.copy()
            for token, value in request.sampling.bias:
                table[token] += np.float32(value)
        return table

    def _ends(self, request: Request) -> np.ndarray:
        """Return a mask of the ids that end a row."""
        mask = self._end_masks.get(request.ends)
        if mask is None:
            mask = np.zeros(self.vocab, bool)
            mask[[*request.ends]] = True
            self._end_masks[request.ends] = mask
        return mask

    def _read_chunk(self) -> bool:
        """Read a chunk of the prompt that was submitted first; return False if all are read."""
        unread = [
            (ticket.begun, slot)
            for slot, ticket in enumerate(self._tickets)
            if ticket is not None and not ticket.is_read
        ]
        if not unread:
            return False
        slot = min(unread)[1]
        ticket = self._tickets[slot]
        assert ticket is not None
        request, start = ticket.request, ticket.read
        count = min(self.chunk, len(request.ids) - 1 - start)
        ids = np.full(self.chunk, self.tokenizer.pad, np.int32)
        ids[:count] = request.ids[start : start + count]
        inputs = (self._ready, self._state, np.int32(slot), ids, np.int32(start), np.int32(count))
        is_seen = ticket.seen == start and self._needs_stream
        if request.is_prompt_scored and request.top is not None:
            after = np.full(self.chunk, self.tokenizer.pad, np.int32)
            after[:count] = request.ids[start + 1 : start + 1 + count]
            self._state, scores = self.programs.score(*inputs, after)
            scores = jax.device_get(scores)
            ticket.add_prompt_scores(
                [_score(scores, place, int(after[place]), request.top) for place in range(count)]
            )
        elif is_seen:
            assert self.programs.read_seen is not None
            self._state = self.programs.read_seen(*inputs)
        else:
            self._state = self.programs.read(*inputs)
        ticket.read += count
        if is_seen:
            ticket.seen += count
        if self._has_prefixes and count == self.chunk:
            self._keep(slot, ticket, start)
        self.counters.chunks += 1
        self.counters.prompt_tokens += count
        return True

    @property
    def _needs_stream(self) -> bool:
        """Return True if the draft is to see the stream of prompts that are read now."""
        drafting = self.drafting
        return drafting is not None and drafting.draft.has_stream and drafting.is_due

    def _keep(self, slot: int, ticket: Ticket, start: int) -> None:
        """Keep a chunk that a slot has read for later prompts, and if the draft has read it."""
        name, stop = ticket.blocks[start // self.chunk], start + self.chunk
        known = ticket.seen >= stop, ticket.followed >= stop
        before = self.prefixes.get(name)
        if before is None or known > before[1]:
            block = self.programs.save(self._state, np.int32(slot), np.int32(start))
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(block))
            self.prefixes.add(name, (block, known), size)

    def _follow(self, chunk: Chunk) -> None:
        """Let the draft read a chunk."""
        assert self.programs.follow is not None
        slot, ids, start, size = chunk
        inputs = np.int32(slot), ids, np.int32(start), np.int32(size)
        self._state = self.programs.follow(self._ready, self._state, *inputs)
        jax.block_until_ready(self._state.token)
        ticket = self._tickets[slot]
        assert ticket is not None
        if self._has_prefixes and start // self.chunk < len(ticket.blocks):
            self._keep(slot, ticket, start)

    def _draw(self, passes: int, chunks: int) -> None:
        """Draw up to `passes` tokens for each row whose prompt is read.

        The draft reads up to `chunks` chunks before.
        """
        drawing = [
            (slot, ticket)
            for slot, ticket in enumerate(self._tickets)
            if ticket is not None and ticket.is_read
        ]
        for slot, ticket in drawing:
            if ticket.request.max_tokens == 0:
                self._tickets[slot] = None
                ticket.end("length")
        drawing = [(slot, ticket) for slot, ticket in drawing if ticket.request.max_tokens]
        if not drawing:
            return
        active, top = np.zeros(self.rows, bool), np.full(self.rows, NO_SCORES, np.int32)
        left = np.zeros(self.rows, np.int32)
        allowed = self._all_allowed()
        for slot, ticket in drawing:
            active[slot] = True
            if ticket.request.top is not None:
                top[slot] = ticket.request.top
            left[slot] = ticket.request.max_tokens - len(ticket.ids)
            if ticket.matcher is not None:
                allowed[slot] = ticket.matcher.mask()
                passes = 1
            if ticket.request.stop:
                passes = min(passes, STOP_PASSES)
        drafting, call = self.drafting, DrawCall(False, passes)
        ready: list[int] = []
        if drafting is not None:
            jax.block_until_ready(self._state.token)  # of chunks, whose time is not that of passes
            call, ready = drafting.next_call(drawing, passes, chunks, self._follow)
        limits = left, np.int32(call.passes), np.bool_(len(self._waiting) > 0)
        inputs = (self._ready, self._state, active, top, allowed, *limits)
        is_few = self.draws_few and not active[slots.FEW :].any()
        begun = balance.clock()
        if call.is_guessed:
            draw = self.programs.draw_few_guessed if is_few else self.programs.draw_guessed
            assert draw is not None
            is_guessed = np.zeros(self.rows, bool)
            is_guessed[ready] = True
            self._state, drawn = draw(*inputs, is_guessed)
        else:
            draw = self.programs.draw_few if is_few else self.programs.draw
            self._state, drawn = draw(*inputs)
        scores = drawn.scores if (top != NO_SCORES).any() else None
        done, is_drawn, tokens, is_finite, scores = jax.device_get((*drawn[:4], scores))
        places = is_drawn[: int(done) * len(is_drawn) // slots.PASSES]
        self.counters.passes += int(done)
        self.counters.drawn_tokens += int(places.sum())
        if drafting is not None:
            seconds, call = balance.clock() - begun, call._replace(passes=int(done))
            drafting.count(self.counters, drawing, call, ready, places, seconds)
        for number in range(len(places)):
            for slot, ticket in drawing:
                if not places[number, slot] or self._tickets[slot] is not ticket:
                    continue  # its text has reached a stop that the device does not know
                if not is_finite[number, slot]:
                    self._tickets[slot] = None
                    self._state = self.programs.wipe(self._state, np.int32(slot))
                    ticket.end("error")
                    continue
                token, count = int(tokens[number, slot]), ticket.request.top
                score = None if count is None else _score(scores, (number, slot), token, count)
                if ticket.push(token, self.tokenizer.table, score):
                    self._tickets[slot] = None


def check_supported(blueprint: Blueprint) -> None:
    """Raise ConfigError if the engine does not support the model or its mesh."""
    what, fix = "the engine does not support this model", "`jaxlm generate` continues its prompts"
    if isinstance(blueprint.config, EncoderDecoderConfig):
        why = "an encoder reads a prompt as a whole, and the engine reads it in chunks"
        raise ConfigError(what, where="an encoder-decoder", why=why, fix=fix)
    rotaries = (layer.attention.rotary for layer in blueprint.config.layers)
    if any(rotary and rotary.beyond for rotary in rotaries):
        why = "its rotary frequencies depend on the length of the text"
        raise ConfigError(what, where="rope_scaling.name=long", why=why, fix=fix)
    if (ways := rules.split(jax.sharding.get_abstract_mesh(), "batch")) > 1:
        what = "the engine does not support a mesh that splits batches"
        why = f"the mesh splits them {ways} ways, and the engine reads prompts one at a time"
        one_device = "--cpu_devices=1" if backend.name() == "cpu" else "CUDA_VISIBLE_DEVICES=0"
        raise ConfigError(what, where="mesh.data", why=why, fix=one_device)


def is_supported(blueprint: Blueprint) -> bool:
    """Return True if the engine supports the model, and the mesh, which is current."""
    try:
        check_supported(blueprint)
    except ConfigError:
        return False
    return jax.process_count() == 1


def _score(scores: Scores, place: int | tuple[int, int], token: int, top: int) -> TokenScore:
    ids, values = scores.top_ids[place][:top], scores.top[place][:top]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return TokenScore(token, float(scores.chosen[place]), tuple(pairs))
