"""Watchdog: ends a run in which a phase exceeds its time limit."""

import contextlib
import faulthandler
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from jaxlm.monitor.config import WatchConfig

MEASURED = 3  # steps measured before their median sets the limit of a step
VERIFY = "verify"  # phase whose limit restarts at each byte read, see `Watchdog.bytes_read`


class Watchdog:
    """A watchdog thread that tracks the current phase of the run, its start and its limit.

    Time is counted by a monotonic clock and only while the process runs: a process suspended with
    Ctrl-Z for an hour does not exceed a limit.

    Args:
      config, on_overdue: time limits; called once, in the watchdog's thread, with the message.
      is_peer_busy: returns whether a peer is in a phase that may take longer than a step; the time
        of a step or verification, which waits for that peer, then stands still.
      heartbeat: a file whose content changes while this process runs Python, for the parent that
        watches it. If the parent has died, this process gets SIGTERM.
      now: a monotonic clock.
    """

    def __init__(
        self,
        config: WatchConfig,
        *,
        on_overdue: Callable[[str], None],
        is_peer_busy: Callable[[], bool] = lambda: False,
        heartbeat: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._config, self._heartbeat, self._now = config, heartbeat, now
        self._on_overdue, self._is_peer_busy = on_overdue, is_peer_busy
        self.details: dict[str, str] = {}  # detail of a phase for the message, if known
        self._lock = threading.Lock()
        # Name of each nested phase, and its start without the time of inner phases.
        self._phases: list[tuple[str, float]] = []
        self._steps: deque[float] = deque(maxlen=100)
        self._moved = self._seen = now()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._tick = max(min(1.0, min(config.limits().values()) / 20), 0.05)

    def __enter__(self) -> Self:
        self.enter("start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def enter(self, phase: str) -> None:
        """End the current phase and start another."""
        with self._lock:
            now = self._now()
            if self._phases:
                before, begun = self._phases.pop()
                if before == "step":
                    self._steps.append(now - begun)
            self._phases.append((phase, now))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase within the current one, whose time stands still meanwhile."""
        with self._lock:
            begun = self._now()
            self._phases.append((name, begun))
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop()
                inner = self._now() - begun
                if self._phases:
                    outer, since = self._phases[-1]
                    self._phases[-1] = (outer, since + inner)

    def bytes_read(self) -> None:
        """Restart the limit of a verification: bytes were read. Any thread may call this."""
        with self._lock:
            self._moved = self._now()

    def limit(self, phase: str) -> float:
        """Return a phase's limit in seconds; the first steps may take as long as compiling."""
        limits = self._config.limits()
        if phase != "step":
            return limits[phase]
        if len(self._steps) < MEASURED:
            return max(limits["compile"], limits["step"])
        return max(self._config.factor * statistics.median(self._steps), limits["step"])

    def long_phase(self) -> tuple[str, float] | tuple[str, float, int] | None:
        """Return the current phase and its limit in seconds, if peers may have to wait for it.

        A verification has a counter too: while bytes are read, it grows ten times in the limit.
        """
        with self._lock:
            if not self._phases:
                return None
            name, begun = self._phases[-1]
            limit = self.limit(name)
            if name == VERIFY:  # reported from its start: while bytes are read it is never long
                return name, limit, int(self._moved * 10 / limit)
            return (name, limit) if self._now() - begun > self._tick else None

    def overdue_message(self) -> str:
        """Return a message if the current phase exceeds its limit, else an empty string."""
        with self._lock:
            now = self._now()
            if self._phases and self._phases[-1][0] == VERIFY:
                self._phases[-1] = (VERIFY, max(self._phases[-1][1], self._moved))
            gap = now - self._seen - self._tick
            if gap > 10 * self._tick:  # this process was suspended
                self._phases = [(name, begun + gap) for name, begun in self._phases]
            since, self._seen = now - self._seen, now
            if not self._phases:
                return ""
            name, begun = self._phases[-1]
            if name in ("step", VERIFY) and self._is_peer_busy():
                begun += since
                self._phases[-1] = (name, begun)
            limit = self.limit(name)
            if now - begun <= limit:
                return ""
            where = f"{name!r}, {self.details[name]}," if name in self.details else repr(name)
            limits = f"its limit is {limit:.0f} s"
            return f"nothing has moved in {where} for {now - begun:.0f} s; {limits}"

    def _run(self) -> None:
        beats, parent = 0, os.getppid()
        while not self._ending.wait(self._tick):
            if self._heartbeat:
                beats += 1
                with contextlib.suppress(OSError):
                    self._heartbeat.write_text(str(beats))
                if os.getppid() != parent:  # the parent has died: the heartbeat is not read
                    parent = os.getppid()
                    os.kill(os.getpid(), signal.SIGTERM)
            if message := self.overdue_message():
                self._on_overdue(message)
                return


def dump_stacks(path: Path | None) -> None:
    """Write the stack of each thread to stderr, and append it to a file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback(sys.__stderr__.fileno())  # type: ignore[union-attr]
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"pid {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file)
