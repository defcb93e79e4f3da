"""The draft of an engine while it runs: what it has read, and which calls verify its guesses."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxlm.generate import balance
from jaxlm.generate.balance import CallTimes, DecayedMean, DraftBalance, DrawCall
from jaxlm.generate.draft import Draft
from jaxlm.generate.requests import Counters, Ticket

Rows = Sequence[tuple[int, Ticket]]  # slots and their requests
Mode = Literal["balanced", "always", "never"]
KEPT_CHUNKS = 16  # over which the time in which the draft reads a chunk is averaged


class Chunk(NamedTuple):
    """Ids of a slot that the draft has not read, see `slots.Programs.follow`."""

    slot: int
    ids: Int[np.ndarray, "C+G"]
    start: int
    size: int  # ids that are no padding


class Drafting:
    """Decides which calls of the device verify guesses, and for which rows.

    Guesses of a row need that the draft has read its ids. It does not read them while its guesses
    lose time, so a row may have to catch up, in whole chunks, before it takes guesses. Those of
    heads need the stream of the whole prompt: a row that was read without takes none.

    Args:
      draft: guesses tokens.
      chunk: ids that it reads at once.
      pad: an id for places without one.

    Attributes:
      mode: which calls verify guesses: those that save time, or, to measure and to compare, one
        kind of call alone, such that all tokens are drawn by one program.
    """

    mode: Mode = "balanced"

    def __init__(self, draft: Draft, chunk: int, pad: int):
        self.draft, self._chunk, self._pad = draft, chunk, pad
        self.balance = DraftBalance(CallTimes(0.0, 1.0), CallTimes(0.0, 1.0))
        self._chunk_seconds = DecayedMean(KEPT_CHUNKS)

    @property
    def is_on(self) -> bool:
        """Return True if the next calls verify guesses, but for those that measure."""
        return self.mode == "always" or (self.mode == "balanced" and self.balance.is_on)

    @property
    def is_due(self) -> bool:
        """Return True if the next calls may verify guesses."""
        return self.mode == "always" or (self.mode == "balanced" and self.balance.is_due)

    def next_call(
        self, rows: Rows, passes: int, chunks: int, follow: Callable[[Chunk], None]
    ) -> tuple[DrawCall, list[int]]:
        """Return the next call, of at most `passes` passes, and the slots that may take guesses.

        Args:
          rows: the rows that draw.
          passes: most passes of the call.
          chunks: most chunks that the draft may read before.
          follow: reads a chunk, and returns when that is done.
        """
        free = [(slot, ticket) for slot, ticket in rows if self._is_free(ticket)]
        if self.mode == "never" or not free:
            return DrawCall(False, passes), []
        is_balanced = self.mode == "balanced"
        call = self.balance.next_call(passes) if is_balanced else DrawCall(True, passes)
        if not call.is_guessed:
            return call, []
        ready = []
        for slot, ticket in sorted(free, key=lambda row: self._unread(row[1])):
            while (unread := self._unread(ticket)) and chunks:
                seconds = unread * (self._chunk_seconds.mean or 0.0)
                if is_balanced and not self.balance.affords(seconds):
                    break
                begun = balance.clock()
                follow(self._next_chunk(slot, ticket))
                taken = balance.clock() - begun
                self._chunk_seconds.add(taken)
                if is_balanced:
                    self.balance.add_reading(taken)
                chunks -= 1
            if not self._unread(ticket):
                ready.append(slot)
        return (DrawCall(False, passes), []) if is_balanced and not ready else (call, ready)

    def _is_free(self, ticket: Ticket) -> bool:
        """Return True if a row may take guesses: it has no grammar, whose mask is of one token."""
        is_seen = not self.draft.has_stream or ticket.seen == ticket.read
        return ticket.matcher is None and is_seen

    def _unread(self, ticket: Ticket) -> int:
        """Return the number of chunks that the draft has to read before it guesses."""
        if not self.draft.is_reader or ticket.known - ticket.followed <= self.draft.reread:
            return 0
        return -(-ticket.known // self._chunk) - ticket.followed // self._chunk

    def _next_chunk(self, slot: int, ticket: Ticket) -> Chunk:
        """Return the first chunk that the draft has not read whole; it counts as read."""
        start = ticket.followed // self._chunk * self._chunk
        count = min(self._chunk, ticket.known - start)
        ids = np.full(self._chunk + self.draft.guesses, self._pad, np.int32)
        known = (*ticket.request.ids, *ticket.ids)[start : start + len(ids)]
        ids[: len(known)] = known
        ticket.followed = start + count
        return Chunk(slot, ids, start, count)

    def count(
        self,
        counters: Counters,
        rows: Rows,
        call: DrawCall,
        ready: Sequence[int],
        is_drawn: Bool[np.ndarray, "N B"],
        seconds: float,
    ) -> None:
        """Count the guesses of a call, and its time.

        Args:
          counters: totals that the guesses are added to.
          rows: the rows that drew.
          call: the call, with the passes that were done.
          ready: slots that could take guesses.
          is_drawn: which places of passes have a token, see `slots.DecodedTokens`.
          seconds: the time of the call.
        """
        is_balanced = self.mode == "balanced"
        if not call.is_guessed:
            if is_balanced:
                self.balance.add_plain(seconds, passes=call.passes)
            return
        places = is_drawn.reshape(call.passes, 1 + self.draft.guesses, -1)
        drawn = places.sum((0, 2)).tolist()
        counters.guessed_passes += call.passes
        counters.drafts += int(places[:, 0, [*ready]].sum())
        counters.accepted = tuple(map(sum, zip(counters.accepted, drawn[1:], strict=True)))
        if is_balanced:
            self.balance.add_guessed(
                seconds, passes=call.passes, row_passes=drawn[0], tokens=sum(drawn)
            )
        for slot, ticket in rows:
            if slot in ready:
                ticket.followed = ticket.known + int(places[:, :, slot].sum())
