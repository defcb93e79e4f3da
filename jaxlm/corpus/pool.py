"""Several processes of this machine that do units of work. One that dies is replaced, and its unit done again."""

import contextlib
import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxlm.core.errors import JaxlmError
from jaxlm.corpus.task import DEATHS, Opens, Worker, done, given_up, raised


def each(
    opens: Opens, units: Sequence[int], workers: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Does each unit and tells which is done, with the seconds of its stages, in the order in which they end.

    Raises:
      NotWritable: where the output cannot be written, as on a full disk.
      PeerLost: once all others are done, where a unit ended more than one process.
    """
    if not units:
        return
    if min(workers, len(units)) <= 1:
        task = opens()
        for number in units:
            yield number, done(task, number)
    else:
        yield from _Crew(opens, units, min(workers, len(units))).run()


class _Crew:
    """The parent's side: a pipe to each process, over which numbers of units go and JSON comes back."""

    def __init__(self, opens: Opens, units: Sequence[int], size: int):
        self._opens, self._size = opens, size
        self._waiting = deque(units)
        self._busy: dict[Connection, tuple[Any, int]] = {}  # its process and unit
        self._deaths: dict[int, int] = {}
        self._lost: list[str] = []

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Until every unit is done, or one failed and the others that were begun are done."""
        failure: JaxlmError | None = None
        try:
            while self._busy or (self._waiting and failure is None):
                while len(self._busy) < self._size and self._waiting and failure is None:
                    self._start()
                for pipe in wait(list(self._busy)):
                    process, number = self._busy.pop(pipe)  # type: ignore[call-overload]
                    try:
                        answer = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    except (
                        EOFError,
                        ConnectionResetError,
                    ):  # the latter where it left a word unread
                        self._mourn(process, number)
                        continue
                    if "error" in answer:
                        failure = failure or raised(answer["error"])
                        self._end(pipe, process)
                        continue
                    yield number, answer["seconds"]
                    if self._waiting and failure is None:
                        self._give(pipe, process)  # type: ignore[arg-type]
                    else:
                        self._end(pipe, process)
        finally:
            for pipe, (process, _) in self._busy.items():
                process.terminate()
                self._end(pipe, process)
        if failure is not None:
            raise failure
        if self._lost:
            raise given_up(self._lost)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._opens), daemon=True)
        process.start()
        theirs.close()
        self._give(ours, process)

    def _give(self, pipe: Connection, process: Any) -> None:
        number = self._waiting.popleft()
        self._busy[pipe] = process, number
        with contextlib.suppress(ConnectionError):  # the answer will be that it is gone
            pipe.send_bytes(str(number).encode())

    def _mourn(self, process: Any, number: int) -> None:
        process.join()
        self._deaths[number] = self._deaths.get(number, 0) + 1
        if self._deaths[number] < DEATHS:
            self._waiting.appendleft(number)
        else:
            self._lost.append(f"unit {number}, exit code {process.exitcode}")

    def _end(self, pipe: Any, process: Any) -> None:
        pipe.close()
        process.join()


def _serve(pipe: Connection, opens: Opens) -> None:
    """The life of a process: units from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    worker = Worker(opens)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number = int(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(worker.answer(number)).encode())
