"""Graceful stop on SIGTERM and SIGINT, after the same step on every rank."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from jaxlm.parallel.peers import Peers

CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


class Interrupted(BaseException):
    """A stop was requested while the process only waited.

    It may be raised anywhere, as KeyboardInterrupt, and is no error of the file that is read.
    """


class StopRequest:
    """Handler of SIGTERM and SIGINT, whose stop request the loop reads between steps.

    The first signal requests a save and an orderly end. The second ends the process at once, with
    75 after a SIGTERM and 130 after a SIGINT, also while JAX computes or compiles; committed
    checkpoints stay.

    Several ranks stop after the same step. A rank that receives a signal sets the sign `stop`.
    Every rank that reads this sign publishes its iteration as `at/RANK`, and enters no further step
    until all ranks have published theirs. All stop after the iteration that follows the largest of
    them, which no rank has entered. The thread that polls the signs publishes the iteration, so a
    rank that waits in a step for the others delays no rank.

    `exit_now` ends the process on the second signal; it receives the exit code and the cause.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        exit_now: Callable[[int, str], Any] = lambda code, _: os._exit(code),
    ) -> None:
        self.reason = ""
        self._peers = peers if peers and peers.count > 1 else None
        self._exit_now = exit_now
        self._before: dict[int, Any] = {}
        self._is_waiting = False
        self._changed = threading.Condition()
        self._entered = 0  # iterations of the loop, not steps: a rewind repeats steps
        self._published: int | None = None  # the iteration that this rank has published
        self._last: int | None = None  # the iteration after which all ranks stop

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._count, name="signals", daemon=True)
        self._thread.start()
        for number in CODES:
            self._before[number] = signal.signal(number, self._take)
        # Python runs a handler only between two instructions of the main thread, which may be
        # minutes apart.
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
        """Wait until the loop may begin a step."""
        with self._changed:
            self._changed.wait_for(lambda: self._published is None or self._last is not None)
            self._entered += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the first signal raises Interrupted, since the wait may never end.

        With several ranks it does not, because they stop together.
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
        """True if this iteration of the loop is the last."""
        if self._peers is None:
            return bool(self.reason)
        return self._last is not None and self._entered >= self._last

    def on_signs(self, signs: dict[str, str]) -> None:
        """Process the signs of the ranks; the thread that polls them calls this repeatedly."""
        if self._peers is None or self._last is not None:
            return
        if self.reason and "stop" not in signs:
            self._peers.sign("stop", self.reason)
        if "stop" not in signs or not self._entered:
            return
        self.reason = self.reason or signs["stop"]
        with self._changed:
            self._published = self._entered if self._published is None else self._published
        if f"at/{self._peers.rank}" not in signs:
            self._peers.sign(f"at/{self._peers.rank}", str(self._published))
        iterations = [int(text) for name, text in signs.items() if name.startswith("at/")]
        if len(iterations) == self._peers.count:
            with self._changed:
                self._last = max(iterations) + 1
                self._changed.notify_all()

    def _take(self, number: int, _: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if self._is_waiting:
            self._is_waiting = False
            raise Interrupted(self.reason)

    def _count(self) -> None:
        """Read the number of each signal when it arrives."""
        count = 0
        while numbers := self._reader.recv(16):
            for number in numbers:
                if number not in CODES:
                    continue
                count += 1
                name = signal.Signals(number).name
                self.reason = self.reason or name
                if count > 1:
                    self._exit_now(CODES[signal.Signals(number)], f"{name} came twice")
