"""Being told to stop."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol, Self

CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


class Signs(Protocol):
    """What the ranks of a run tell each other."""

    rank: int
    count: int

    def sign(self, name: str, text: str) -> bool:
        """Sets a sign."""


class Interrupted(Exception):
    """The process was told to stop while it only waited."""


class StopRequest:
    """Turns SIGTERM and SIGINT into a request that the loop reads between steps.

    The first asks for a save and an orderly end. The second ends the process at once, with 75 after a SIGTERM and 130
    after a SIGINT, also while JAX computes or compiles; what is committed stays committed.

    With several ranks all stop after the same step. A rank that is told to stop sets a sign. Every rank that hears of it
    says how far it has come, and enters no further step until all have said so; all stop after the step that follows the
    farthest of these, which none has entered. Its listening thread says so for it, so a rank that waits in a step for
    the others holds up nobody.

    Args:
      peers: the ranks of the run; None for one process.
      at_once: ends the process on the second signal, with its exit code and the cause.
    """

    def __init__(
        self,
        peers: Signs | None = None,
        at_once: Callable[[int, str], Any] = lambda code, _: os._exit(code),
    ) -> None:
        self.reason = ""
        self._peers = peers if peers and peers.count > 1 else None
        self._at_once = at_once
        self._before: dict[int, Any] = {}
        self._is_waiting = False
        self._changed = threading.Condition()
        self._entered = 0  # iterations of the loop, not steps: those are run again after a rewind
        self._told: int | None = None  # how far this rank has said that it is
        self._last: int | None = None  # the iteration that all ranks stop after

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._count, name="signals", daemon=True)
        self._thread.start()
        for number in CODES:
            self._before[number] = signal.signal(number, self._take)
        # Python runs a handler only between two of the main thread's instructions, and those may be minutes apart.
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def enter(self) -> None:
        """The loop is about to begin a step; returns once it may."""
        with self._changed:
            self._changed.wait_for(lambda: self._told is None or self._last is not None)
            self._entered += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Here a first signal raises Interrupted at once, as what is waited for may never come.

        With several ranks it does not: those stop together.
        """
        self._is_waiting = self._peers is None
        try:
            if self._is_waiting and self.reason:
                raise Interrupted(self.reason)
            yield
        finally:
            self._is_waiting = False

    @property
    def is_due(self) -> bool:
        """Whether this iteration of the loop is the last."""
        if self._peers is None:
            return bool(self.reason)
        return self._last is not None and self._entered >= self._last

    def hear(self, signs: dict[str, str]) -> None:
        """Takes note of what the ranks have said; called by the thread that listens to them, again and again."""
        if self._peers is None or self._last is not None:
            return
        if self.reason and "stop" not in signs:
            self._peers.sign("stop", self.reason)
        if "stop" not in signs or not self._entered:
            return
        self.reason = self.reason or signs["stop"]
        with self._changed:
            self._told = self._entered if self._told is None else self._told
        if f"at/{self._peers.rank}" not in signs:
            self._peers.sign(f"at/{self._peers.rank}", str(self._told))
        told = [int(text) for name, text in signs.items() if name.startswith("at/")]
        if len(told) == self._peers.count:
            with self._changed:
                self._last = max(told) + 1
                self._changed.notify_all()

    def _take(self, number: int, _: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if self._is_waiting:
            self._is_waiting = False
            raise Interrupted(self.reason)

    def _count(self) -> None:
        """Reads the number of each signal as it comes."""
        came = 0
        while numbers := self._reader.recv(16):
            for number in numbers:
                if number not in CODES:
                    continue
                came += 1
                name = signal.Signals(number).name
                self.reason = self.reason or name
                if came > 1:
                    self._at_once(CODES[signal.Signals(number)], f"{name} came twice")
