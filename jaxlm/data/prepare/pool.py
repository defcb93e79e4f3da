"""Several processes that do units of work. One that dies is replaced, and its unit done again."""

import contextlib
import json
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from jaxlm.core import errors
from jaxlm.core.errors import JaxlmError, NotWritable, PeerLost
from jaxlm.data.prepare.job import Job
from jaxlm.data.prepare.unit import Worker

Half = Literal["clean", "finish"]
DEATHS = 2  # of processes over one unit, after which it is the unit's fault


def each(
    job: Job, half: Half, units: Sequence[int], workers: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Does one half of each unit and tells which is done, with the seconds of its stages, in the order in which they end.

    Raises:
      NotWritable: where the output cannot be written, as on a full disk.
      PeerLost: once all others are done, where a unit ended more than one process.
    """
    if min(workers, len(units)) <= 1:
        worker = Worker(job)
        for number in units:
            yield number, _done(worker, half, number)
    elif units:
        yield from _Crew(job.out, half, units, min(workers, len(units))).run()


def _done(worker: Worker, half: Half, number: int) -> dict[str, float]:
    try:
        return getattr(worker, half)(number)
    except OSError as error:
        raise NotWritable(
            "a unit of work cannot be written",
            where=str(error.filename or f"unit {number}"),
            why=f"{type(error).__name__}: {error.strerror}",
            fix="make room, then the same command again: it goes on where it stopped",
        ) from error


class _Crew:
    """The parent's side: a pipe to each process, over which numbers of units go and JSON comes back."""

    def __init__(self, out: Path, half: Half, units: Sequence[int], size: int):
        self._out, self._half, self._size = str(out), half, size
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
                        failure = failure or _raised(answer["error"])
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
            raise PeerLost(
                f"{DEATHS} processes ended over one unit of work",
                where=self._lost[0],
                why=f"all other units are done; {len(self._lost)} of them ended so, as for want of memory",
                fix="the same command with --workers=1, which needs less memory",
            )

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._out, self._half), daemon=True)
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


def _serve(pipe: Connection, out: str, half: Half) -> None:
    """The life of a process: units from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            worker = Worker(Job.read(Path(out)))
            while True:
                number = int(pipe.recv_bytes())
                pipe.send_bytes(json.dumps({"seconds": _done(worker, half, number)}).encode())
        except (EOFError, ConnectionError):
            raise
        except JaxlmError as error:
            parts = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
            pipe.send_bytes(
                json.dumps({"error": {"class": type(error).__name__, **parts}}).encode()
            )
        except Exception as error:
            parts = {
                "what": f"{type(error).__name__}: {error}",
                "why": traceback.format_exc()[-1500:],
            }
            pipe.send_bytes(json.dumps({"error": {"class": "JaxlmError", **parts}}).encode())


def _raised(parts: dict[str, str]) -> JaxlmError:
    """The error that a process sent, as what it was."""
    kind = getattr(errors, parts.pop("class"), JaxlmError)
    return kind(parts.pop("what"), **parts)
