"""Notices that nothing moves any more."""

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

MEASURED = 3  # steps before their median says how long one takes
VERIFY = "verify"  # the phase whose limit counts from the last byte read, see `Watch.moved`


class Watch:
    """A thread that knows what the run is doing, since when, and how long that may take.

    Time is counted by a monotonic clock, and only while the process runs: a run that was stopped with Ctrl-Z and goes on
    an hour later is not overdue.

    Args:
      config: the limit of each phase.
      overdue: called once, in the watch's thread, with what is to be said.
      is_excused: whether a peer is busy with something that may take longer than a step; while it is, the time of a step
        and of a verification stands still, as this process waits for the other's part in it.
      beat: a file whose content changes as long as this process runs Python, for the parent that watches it from outside.
        Where that parent is gone, this process is told to stop.
    """

    def __init__(
        self,
        config: WatchConfig,
        *,
        overdue: Callable[[str], None],
        is_excused: Callable[[], bool] = lambda: False,
        beat: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._config, self._overdue, self._beat, self._now = config, overdue, beat, now
        self._is_excused = is_excused
        self.about: dict[str, str] = {}  # what a phase is busy with, in words, where it is known
        self._lock = threading.Lock()
        self._phases: list[
            tuple[str, float]
        ] = []  # each with the time it would have begun without the inner ones
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
        """The phase before is over; this one begins."""
        with self._lock:
            now = self._now()
            if self._phases:
                before, begun = self._phases.pop()
                if before == "step":
                    self._steps.append(now - begun)
            self._phases.append((phase, now))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within the present one, whose time stands still meanwhile."""
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

    def moved(self) -> None:
        """Restart the limit of a verification: bytes were read. Any thread may call it."""
        with self._lock:
            self._moved = self._now()

    def limit(self, phase: str) -> float:
        """Seconds that a phase may take. Until a few steps are measured, one may take as long as compiling."""
        limits = self._config.limits()
        if phase != "step":
            return limits[phase]
        if len(self._steps) < MEASURED:
            return max(limits["compile"], limits["step"])
        return max(self._config.factor * statistics.median(self._steps), limits["step"])

    def slow(self) -> tuple[str, float] | tuple[str, float, int] | None:
        """The phase, where it lasts long enough that peers may wonder, and the seconds that it may take.

        For a verification also a number that grows while bytes are read, about ten times within the limit.
        """
        with self._lock:
            if not self._phases:
                return None
            name, begun = self._phases[-1]
            limit = self.limit(name)
            if name == VERIFY:  # at once: while bytes are read, it never seems long
                return name, limit, int(self._moved * 10 / limit)
            return (name, limit) if self._now() - begun > self._tick else None

    def look(self) -> str:
        """What is overdue, in words; empty where nothing is."""
        with self._lock:
            now = self._now()
            if self._phases and self._phases[-1][0] == VERIFY:
                self._phases[-1] = (VERIFY, max(self._phases[-1][1], self._moved))
            gap = now - self._seen - self._tick
            if gap > 10 * self._tick:  # it was this process that stood still
                self._phases = [(name, begun + gap) for name, begun in self._phases]
            since, self._seen = now - self._seen, now
            if not self._phases:
                return ""
            name, begun = self._phases[-1]
            if name in ("step", VERIFY) and self._is_excused():
                begun += since
                self._phases[-1] = (name, begun)
            limit = self.limit(name)
            if now - begun <= limit:
                return ""
            about = f", {self.about[name]}," if name in self.about else ""
            return (
                f"nothing has moved in {name!r}{about} for {now - begun:.0f} s; "
                f"its limit is {limit:.0f} s"
            )

    def _run(self) -> None:
        beats, parent = 0, os.getppid()
        while not self._ending.wait(self._tick):
            if self._beat:
                beats += 1
                with contextlib.suppress(OSError):
                    self._beat.write_text(str(beats))
                if os.getppid() != parent:  # nobody reads it any more, nor what this process says
                    parent = os.getppid()
                    os.kill(os.getpid(), signal.SIGTERM)
            if said := self.look():
                self._overdue(said)
                return


def dump_stacks(path: Path | None) -> None:
    """Writes where each thread is to stderr, and to a file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback(sys.__stderr__.fileno())  # type: ignore[union-attr]
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"pid {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file)
