"""Requests of the engine, the parts and the whole of their results, and the state of each.

Example:
  >>> request = Request(ids=(3, 5, 8), max_tokens=4, stop=(b"\\n",))
  >>> request.size
  7
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxlm.generate.grammar import Grammar
from jaxlm.generate.rows import Sampling
from jaxlm.generate.text_stream import TextStream

Reason = Literal[
    "length", "eos_token", "stop_sequence", "cancelled", "deadline", "grammar", "error"
]


class TokenScore(NamedTuple):
    """Log-probability of an id, and the likeliest ids with theirs."""

    id: int
    log_probability: float
    top: tuple[tuple[int, float], ...]


class Delta(NamedTuple):
    """The next part of a result; the last one has a reason.

    `text` has whole characters, and no part of a stop sequence. `scores` are those of `ids`.
    """

    text: str
    ids: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()
    reason: Reason | None = None
    prompt_scores: tuple[TokenScore, ...] = ()  # of the ids after the first of the prompt


Deliver = Callable[[Delta], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue.

    Args:
      ids: the prompt, at least one id.
      max_tokens: maximum new ids; 0 only reads the prompt.
      sampling: sampling settings.
      seed: seed of the draws, 0 to 2**32 - 1.
      ends: ids that end the text.
      stop: byte strings before which the text ends.
      top: number of alternatives of each score; None returns no scores.
      is_prompt_scored: return scores of the prompt too, if `top` is not None.
      deadline: seconds after submission at which the request ends with what it has.
      salt: requests of other salts share no beginnings of prompts.
      grammar: limits the ids that are drawn; the text ends as soon as nothing can follow. If the
        grammar reaches a limit, the reason is `grammar`.
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    ends: tuple[int, ...] = ()
    stop: tuple[bytes, ...] = ()
    top: int | None = None
    is_prompt_scored: bool = False
    deadline: float | None = None
    salt: str = ""
    grammar: Grammar | None = None

    @property
    def size(self) -> int:
        """Number of tokens that the request may take."""
        return len(self.ids) + self.max_tokens


@dataclasses.dataclass(frozen=True)
class CompletedRequest:
    """A whole result, see `Engine.complete`."""

    text: str
    ids: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    prompt_scores: tuple[TokenScore, ...]
    reason: Reason


class QueueFull(Exception):
    """More tokens wait than the engine accepts; `seconds` is the time until there is room."""

    def __init__(self, seconds: float):
        super().__init__(f"the queue is full for about {seconds:.0f} s")
        self.seconds = seconds


@dataclasses.dataclass
class Counters:
    """Totals since the start."""

    compiles: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, not read again
    drawn_tokens: int = 0
    drafts: int = 0  # guesses of a row in a pass, one for each position
    accepted: tuple[int, ...] = ()  # by position, guesses that equal what the model drew
    passes: int = 0
    guessed_passes: int = 0  # of these, with guesses
    chunks: int = 0
    seconds: float = 0.0  # on the device
    failures: int = 0  # passes that raised an exception

    @property
    def guessed_tokens(self) -> int:
        """Number of guesses."""
        return self.drafts * len(self.accepted)

    @property
    def accepted_tokens(self) -> int:
        """Number of guesses that stood."""
        return sum(self.accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a row in a pass with guesses: those that stood, and the one after them."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


class Ticket:
    """A submitted request, what is read of its prompt, and what is drawn and delivered."""

    def __init__(self, request: Request, deliver: Deliver):
        self.request, self._deliver = request, deliver
        self.begun = time.monotonic()
        self.is_cancelled = False
        self.read = 0  # ids of the prompt that the slot has
        self.cached = 0  # of these, from the prefix cache
        self.seen = 0  # ids whose stream the draft has seen, see `Draft.seen`
        self.followed = 0  # ids that the draft has read
        self.blocks: list[bytes] = []  # names of the chunks of the prompt, see `prefix`
        self.ids: list[int] = []
        self._waiting: list[tuple[int, TokenScore | None, int]] = []  # not delivered; end in bytes
        self._stream = TextStream(request.stop)
        self._tail, self._bytes = b"", 0
        self._longest = max(map(len, request.stop), default=0)
        self._prompt_scores: list[TokenScore] = []
        self.matcher = None if request.grammar is None else request.grammar.start()

    @property
    def is_read(self) -> bool:
        """Return True if the next pass can draw a token."""
        return self.read == len(self.request.ids) - 1

    @property
    def known(self) -> int:
        """Number of ids that the slot has, of the prompt and drawn: all but the newest."""
        return self.read + len(self.ids)

    def add_prompt_scores(self, scores: Sequence[TokenScore]) -> None:
        """Keep scores of the prompt for the next delta."""
        self._prompt_scores += scores

    def push(self, token: int, table: Sequence[bytes], score: TokenScore | None) -> bool:
        """Add a drawn id; deliver text if some is whole. Return True if the request has ended."""
        request, matcher = self.request, self.matcher
        if matcher is not None and not matcher.accept(token):
            self.end("grammar")
            return True
        if token in request.ends:
            self.end("eos_token")
            return True
        more = table[token]
        self.ids.append(token)
        seen = self._tail + more
        is_stopped = any(stop in seen for stop in request.stop)
        self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else b""
        self._bytes += len(more)
        self._waiting.append((token, score, self._bytes))
        is_complete = matcher is not None and matcher.is_complete
        is_last = is_stopped or is_complete or len(self.ids) == request.max_tokens
        text = self._stream.push(more, is_ended=is_last)
        if is_last:
            reason: Reason = "eos_token" if is_complete else "length"
            self._send(text, "stop_sequence" if is_stopped else reason)
        elif text:
            self._send(text, None)
        return is_last

    def end(self, reason: Reason) -> None:
        """Deliver the rest with a reason."""
        self._send(self._stream.push(b"", is_ended=True), reason)

    def _send(self, text: str, reason: Reason | None) -> None:
        waiting, self._waiting = self._waiting, []
        ids = tuple(token for token, _, _ in waiting)
        scores = tuple(score for _, score, _ in waiting if score is not None)
        prompt, self._prompt_scores = tuple(self._prompt_scores), []
        self._deliver(Delta(text, ids, scores, reason, prompt))


def joined(parts: Sequence[Delta]) -> CompletedRequest:
    """Return the whole result of the deltas of a request."""
    reason = parts[-1].reason
    assert reason is not None
    return CompletedRequest(
        text="".join(each.text for each in parts),
        ids=tuple(token for each in parts for token in each.ids),
        scores=tuple(score for each in parts for score in each.scores),
        prompt_scores=tuple(score for each in parts for score in each.prompt_scores),
        reason=reason,
    )
