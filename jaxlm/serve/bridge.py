"""The engine's thread and the event loop of the server: requests one way, parts of results back."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from jaxlm.generate.engine import Engine
from jaxlm.generate.requests import Deliver, Delta, QueueFull, Request, Ticket
from jaxlm.serve.fields import RefusedRequest

IDLE_SECONDS = 0.5  # between two looks at signals while there is no request
Part = tuple[int, Delta]


class Results:
    """Parts of the results of a call, as they come; `cancel` ends the requests.

    `on_end` is called once, when the engine has ended all of them.
    """

    on_end: Callable[[], None] | None = None

    def __init__(self, engine: Engine):
        self._engine = engine
        self._parts: asyncio.Queue[Part] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self.is_cancelled = False
        self._ended = 0

    def put(self, part: Part) -> None:
        """Add a part; by the event loop."""
        self._parts.put_nowait(part)
        self._ended += part[1].reason is not None
        if self._ended == len(self.tickets) and self.on_end is not None:
            self.on_end()
            self.on_end = None

    def cancel(self) -> None:
        """Free the slots of the call within one tick."""
        self.is_cancelled = True
        for ticket in self.tickets:
            self._engine.cancel(ticket)

    async def parts(self) -> AsyncIterator[Part]:
        """Yield each choice's number and the next part of it, until all have ended."""
        left = len(self.tickets)
        while left:
            number, delta = await self._parts.get()
            left -= delta.reason is not None
            yield number, delta


class Bridge:
    """Runs the engine in the thread that calls `run`, for an event loop in another thread.

    All parts of a tick take one call of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.engine: Engine | None = None
        self.is_draining = False
        self.is_failed = False
        self.is_ticking = self.is_stuck = False  # `is_stuck` is set by the watchdog
        self.tick_number = 0
        self._loop = loop
        self._stop = threading.Event()
        self._outgoing: deque[tuple[Results, Part]] = deque()

    @property
    def is_ready(self) -> bool:
        """Return True if requests are accepted."""
        is_well = not (self.is_failed or self.is_stuck)
        return self.engine is not None and not self.is_draining and is_well

    def submit(self, requests: Sequence[Request]) -> Results:
        """Queue the requests of a call. Raises RefusedRequest if there is no room or no engine."""
        if self.engine is None or not self.is_ready:
            reason = "the server is stopping" if self.is_draining else "the model is not ready"
            raise RefusedRequest(503, reason, retry_after="5")
        results = Results(self.engine)
        try:
            for number, request in enumerate(requests):
                deliver = self._deliverer(results, number)
                results.tickets.append(self.engine.submit(request, deliver))
        except QueueFull as full:
            results.cancel()
            seconds = f"{full.seconds:.0f}"
            message = f"the queue is full; try again in {seconds} s"
            raise RefusedRequest(429, message, retry_after=seconds) from None
        return results

    def _deliverer(self, results: Results, number: int) -> Deliver:
        def deliver(delta: Delta) -> None:
            self._outgoing.append((results, (number, delta)))

        return deliver

    def _flush(self) -> None:
        while self._outgoing:
            results, part = self._outgoing.popleft()
            results.put(part)

    def stop(self) -> None:
        """End `run` after its current tick."""
        self._stop.set()
        if self.engine is not None:
            self.engine.wake()

    def run(self) -> None:
        """Tick until `stop`, or until all requests have ended while the server drains."""
        engine = self.engine
        assert engine is not None
        try:
            while not self._stop.is_set():
                if engine.is_idle:
                    if self.is_draining:
                        return
                    engine.wait(IDLE_SECONDS)
                    continue
                self.tick_number += 1
                self.is_ticking = True
                engine.tick()
                self.is_ticking = False
                if self._outgoing:
                    self._loop.call_soon_threadsafe(self._flush)
        except Exception:
            self.is_failed = True
            raise
        finally:
            engine.end_all("error" if self.is_failed else "cancelled")
            self._loop.call_soon_threadsafe(self._flush)
