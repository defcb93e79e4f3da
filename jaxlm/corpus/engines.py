"""Engines that run the units of a job: processes of this machine, or a Ray cluster.

All write the same bytes. A process that dies is replaced, its unit retried. The pool is not
`ProcessPoolExecutor`, which cannot name the unit on which a process died.

The machines of a Ray cluster see the output and sources under the same paths. Ray places the units.
Every machine must have the same versions of jaxlm and its packages as the machine that starts the
job: other versions could write other bytes.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import traceback
import unicodedata
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

from jaxlm.core import errors
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import DataError, InputMissing, JaxlmError, NotWritable, PeerLost

Task = Callable[[int], dict[str, float]]  # runs a unit, by number; returns CPU seconds by stage
MakeTask = Callable[[], Task]  # called in the worker process: pickled, hashed by value
Finished = Iterator[tuple[int, dict[str, float]]]  # a unit and its CPU seconds by stage
MAX_DEATHS = 2  # worker processes that may die on a unit before the unit counts as the cause


def run_unit(task: Task, number: int) -> dict[str, float]:
    """Run a unit. Raises NotWritable if its output cannot be written, as on a full disk."""
    try:
        return task(number)
    except OSError as error:
        raise NotWritable(
            "a unit of work could not be written",
            where=str(error.filename or f"unit {number}"),
            why=f"{type(error).__name__}: {error.strerror}",
            fix="free disk space, then run the same command again: finished work is kept",
        ) from error


def answer(open_task: Callable[[], Task], number: int) -> dict[str, Any]:
    """Run a unit in a worker; return its `seconds`, or `error`, as JSON."""
    try:
        return {"seconds": run_unit(open_task(), number)}
    except JaxlmError as error:
        return {"error": {"kind": type(error).__name__, **error.parts}}
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        why = traceback.format_exc()[-1500:]
        return {"error": {"kind": "JaxlmError", "what": what, "why": why}}


class _Queue:
    """The units that wait for a worker, and the failures so far."""

    def __init__(self, units: Sequence[int]):
        self._waiting = deque(units)
        self._deaths = Counter[int]()
        self._failed_units: list[str] = []  # each with its cause
        self._failure: JaxlmError | None = None

    @property
    def has_more(self) -> bool:
        """Return True to start another unit; after a failure only running ones are finished."""
        return bool(self._waiting) and self._failure is None

    def take(self) -> int:
        return self._waiting.popleft()

    def died(self, number: int, cause: str) -> None:
        """Retry a unit whose worker died, unless it died MAX_DEATHS times."""
        self._deaths[number] += 1
        if self._deaths[number] < MAX_DEATHS:
            self._waiting.appendleft(number)
        else:
            self._failed_units.append(f"unit {number}, {cause}")

    def failed(self, parts: dict[str, str]) -> None:
        """Rebuild the error that a worker answered; the first is raised at the end."""
        kind, what = getattr(errors, parts["kind"], JaxlmError), parts["what"]
        error = kind(what, **{name: parts.get(name, "") for name in ("where", "why", "fix")})
        self._failure = self._failure or error

    def finish(self) -> None:
        """Raise the failure of the units, if there is one."""
        if self._failure is not None:
            raise self._failure
        if lost := self._failed_units:
            raise PeerLost(
                f"{MAX_DEATHS} worker processes died on the same unit of work",
                where=lost[0],
                why=f"all other units are done; {len(lost)} failed like this, e.g. out of memory",
                fix="the same command with --workers=1, which needs less memory",
            )


def run_in_pool(make_task: MakeTask, units: Sequence[int], workers: int) -> Finished:
    """Run each unit; yield its number and the seconds by stage, in order of completion.

    Raises NotWritable if the output cannot be written, for example on a full disk; PeerLost, once
    all others are done, if a unit killed several processes.
    """
    if not units:
        return
    size = min(workers, len(units))
    if size <= 1:
        task = make_task()
        for number in units:
            yield number, run_unit(task, number)
        return
    queue, context = _Queue(units), multiprocessing.get_context("spawn")
    busy: dict[Connection, tuple[Any, int]] = {}  # process and unit; pipes carry numbers and JSON

    def assign(pipe: Connection, process: Any) -> None:
        number = queue.take()
        busy[pipe] = process, number
        with contextlib.suppress(ConnectionError):  # reading the answer reveals that it died
            pipe.send_bytes(str(number).encode())

    def end(pipe: Connection, process: Any) -> None:
        pipe.close()
        process.join()

    try:
        while busy or queue.has_more:
            while len(busy) < size and queue.has_more:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make_task), daemon=True)
                process.start()
                theirs.close()
                assign(ours, process)
            for pipe in cast(list[Connection], wait(list(busy))):
                process, number = busy.pop(pipe)
                try:
                    reply = json.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):  # reset: it left a message unread
                    process.join()
                    queue.died(number, f"exit code {process.exitcode}")
                    continue
                if "error" in reply:
                    queue.failed(reply["error"])
                else:
                    yield number, reply["seconds"]
                if queue.has_more and "error" not in reply:
                    assign(pipe, process)
                else:
                    end(pipe, process)
    finally:
        for pipe, (process, _) in busy.items():
            process.terminate()
            end(pipe, process)
    queue.finish()


def _serve(pipe: Connection, make_task: MakeTask) -> None:
    """Run units from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    open_task = functools.cache(make_task)  # at the first unit
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number = int(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(answer(open_task, number)).encode())


PACKAGES = "numpy", "ftfy", "py3langid", "pyarrow", "zstandard", "tokenizers", "sentencepiece"


@contextlib.contextmanager
def connected(workers: int, log: Log) -> Iterator[Any]:
    """Connect to the cluster of RAY_ADDRESS or of this machine, else to `workers` processes here.

    Raises InputMissing if Ray is not installed, or does not answer at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise errors.not_installed("the engine ray", "ray", "ray", where="--engine=ray") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := os.environ.get("RAY_ADDRESS"):
        host, _, port = address.rpartition(":")
        try:  # Ray itself tries for minutes, then exits
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise _no_answer(address, error) from error
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError as error:
        if address:
            raise _no_answer(address, error) from error
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    try:
        machines = [node for node in ray.nodes() if node["Alive"]]
        cores = int(ray.cluster_resources().get("CPU", 0))
        log(f"ray: {len(machines)} machine{'s' * (len(machines) > 1)}, {cores} cores")
        yield ray
    finally:
        ray.shutdown()


def _no_answer(address: str, error: Exception) -> InputMissing:
    return InputMissing(
        "no Ray cluster answered",
        where=f"RAY_ADDRESS = {address}",
        why=str(error).partition("\n")[0],
        fix="ray start --head on one machine, ray start --address=THAT_MACHINE:6379 on the others",
    )


def run_on_ray(make_task: MakeTask, units: Sequence[int], workers: int, ray: Any) -> Finished:
    """Run units as `run_in_pool` does, at most `workers` at a time.

    Raises DataError if a machine has other versions, InputMissing if it does not see the current
    folder, and what `run_in_pool` raises.
    """
    # Ray would retry without end if memory is short, so deaths are counted here.
    answer_remotely = ray.remote(num_cpus=1, max_retries=0)(_run_remotely)
    here = os.getcwd(), versions()
    queue, running = _Queue(units), dict[Any, int]()
    while running or queue.has_more:
        while queue.has_more and len(running) < workers:
            number = queue.take()
            running[answer_remotely.remote(make_task, number, *here)] = number
        (ready,), _ = ray.wait(list(running), num_returns=1)
        number = running.pop(ready)
        try:
            reply = ray.get(ready)
        except ray.exceptions.RayTaskError as error:  # before our code could answer
            failure = dict(
                kind="InputMissing",
                what="a machine of the cluster cannot run units",
                where="--engine=ray",
                why=str(getattr(error, "cause", error)),
                fix="pip install 'jaxlm[prepare,ray]'    # of this version, on every machine",
            )
            queue.failed(failure)
        except ray.exceptions.RayError as error:
            queue.died(number, type(error).__name__)
        else:
            if "error" in reply:
                queue.failed(reply["error"])
            else:
                yield number, reply["seconds"]
    queue.finish()


def versions() -> tuple[str, ...]:
    """Return the versions that determine the output: interpreter, packages, source of jaxlm."""
    parts = [f"python {sys.version.split()[0]}", f"unicode {unicodedata.unidata_version}"]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{name} {importlib.metadata.version(name)}")
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return (*parts, f"the source of jaxlm {digest.hexdigest()[:12]}")


def _run_remotely(
    make_task: MakeTask, number: int, folder: str, expected: tuple[str, ...]
) -> dict[str, Any]:
    return answer(functools.partial(_task_if_equal, make_task, folder, expected), number)


@functools.lru_cache(1)  # a Ray process runs many units
def _task_if_equal(make_task: MakeTask, folder: str, expected: tuple[str, ...]) -> Task:
    machine = socket.gethostname()
    if differ := sorted(set(expected) ^ set(versions())):
        raise DataError(
            "a machine of the cluster has other versions",
            where=machine,
            why=f"not on both: {', '.join(differ[:6])}",
            fix="install the same Python, jaxlm and packages on every machine",
        )
    try:
        os.chdir(folder)
        return make_task()
    except FileNotFoundError as error:
        raise InputMissing(
            "a machine of the cluster does not see a file",
            where=f"{machine}: {error.filename}",
            why="work reads and writes the folders of the machine that started it",
            fix="mount the folder on every machine under this path",
        ) from error


EngineName = Literal["processes", "ray"]
# Runs a task on the remaining units, given the sizes of all units in bytes and a label of the
# progress; returns CPU seconds by stage.
RunUnits = Callable[[MakeTask, Sequence[int], Sequence[int], str], dict[str, float]]


@contextlib.contextmanager
def opened(name: EngineName, workers: int, log: Log, progress: OnProgress) -> Iterator[RunUnits]:
    """Open an engine that runs at most `workers` units at a time.

    Raises InputMissing if its package is not installed, or its cluster does not answer.
    """
    with contextlib.ExitStack() as stack:
        run = functools.partial(run_in_pool, workers=workers)
        if name == "ray":
            ray = stack.enter_context(connected(workers, log))
            run = functools.partial(run_on_ray, workers=workers, ray=ray)

        def run_left(
            make_task: MakeTask, left: Sequence[int], sizes: Sequence[int], label: str
        ) -> dict[str, float]:
            seconds = defaultdict[str, float](float)
            done = sum(sizes) - sum(sizes[number] for number in left)
            for number, spent in run(make_task, left):
                for stage, more in spent.items():
                    seconds[stage] += more
                done += sizes[number]
                progress(label, done, sum(sizes))
            return seconds

        yield run_left
