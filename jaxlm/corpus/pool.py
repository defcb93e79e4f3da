"""A pool of processes that run units of work. A process that dies is replaced, its unit retried."""

import contextlib
import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxlm.core.errors import JaxlmError
from jaxlm.corpus.task import MAX_DEATHS, MakeTask, Worker, done, error_of, units_failed


def run_units(
    make_task: MakeTask, units: Sequence[int], workers: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Run each unit; yield its number and the seconds by stage, in order of completion.

    Raises:
      NotWritable: the output cannot be written, for example on a full disk.
      PeerLost: a unit killed several processes; raised once all others are done.
    """
    if not units:
        return
    if min(workers, len(units)) <= 1:
        task = make_task()
        for number in units:
            yield number, done(task, number)
    else:
        yield from _ProcessPool(make_task, units, min(workers, len(units))).run()


class _ProcessPool:
    """The parent's side: a pipe to each worker carries unit numbers there and JSON back."""

    def __init__(self, make_task: MakeTask, units: Sequence[int], size: int):
        self._make_task, self._size = make_task, size
        self._waiting = deque(units)
        self._busy: dict[Connection, tuple[Any, int]] = {}  # process and unit by pipe
        self._deaths: dict[int, int] = {}
        self._lost: list[str] = []

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Run until every unit is done, or until one failed and the running ones are done."""
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
                        ConnectionResetError,  # if the worker left a message unread
                    ):
                        self._on_worker_death(process, number)
                        continue
                    if "error" in answer:
                        failure = failure or error_of(answer["error"])
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
            raise units_failed(self._lost)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._make_task), daemon=True)
        process.start()
        theirs.close()
        self._give(ours, process)

    def _give(self, pipe: Connection, process: Any) -> None:
        number = self._waiting.popleft()
        self._busy[pipe] = process, number
        with contextlib.suppress(ConnectionError):  # `run` notices that the worker died
            pipe.send_bytes(str(number).encode())

    def _on_worker_death(self, process: Any, number: int) -> None:
        process.join()
        self._deaths[number] = self._deaths.get(number, 0) + 1
        if self._deaths[number] < MAX_DEATHS:
            self._waiting.appendleft(number)
        else:
            self._lost.append(f"unit {number}, exit code {process.exitcode}")

    def _end(self, pipe: Any, process: Any) -> None:
        pipe.close()
        process.join()


def _serve(pipe: Connection, make_task: MakeTask) -> None:
    """Run units from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    worker = Worker(make_task)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number = int(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(worker.answer(number)).encode())
