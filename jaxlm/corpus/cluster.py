"""Units of work on a Ray cluster whose machines see the output and sources under the same paths.

Ray places the units; a unit whose process or machine dies is retried. Every machine must have the
versions of jaxlm and its packages of the machine that starts: others could write other bytes.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import socket
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing, JaxlmError, not_installed
from jaxlm.corpus.task import MAX_DEATHS, MakeTask, Task, Worker, error_of, units_failed

PACKAGES = "numpy", "ftfy", "py3langid", "pyarrow", "zstandard", "tokenizers", "sentencepiece"


@contextlib.contextmanager
def connected(workers: int, log: Callable[[str], None]) -> Iterator[Any]:
    """Connect to the cluster of RAY_ADDRESS or of this machine, else start a local one.

    A local one has `workers` processes and is shut down at the end of the block.

    Raises:
      InputMissing: Ray is not installed, or does not answer at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise not_installed("the engine ray", "ray", "ray", where="--engine=ray") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_reachable(address)
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


def _check_reachable(address: str) -> None:
    """Raise InputMissing if HOST:PORT does not answer: Ray tries for minutes, then exits."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise _no_answer(address, error) from error


def _no_answer(address: str, error: Exception) -> InputMissing:
    return InputMissing(
        "no Ray cluster answered",
        where=f"RAY_ADDRESS = {address}",
        why=str(error).partition("\n")[0],
        fix="ray start --head on one machine, ray start --address=THAT_MACHINE:6379 on the others",
    )


def run_units(
    make_task: MakeTask, units: Sequence[int], workers: int, ray: Any
) -> Iterator[tuple[int, dict[str, float]]]:
    """Run units as `pool.run_units` does, at most `workers` at a time.

    Raises:
      DataError: a machine has other versions.
      InputMissing: a machine does not see the current folder.
      NotWritable, PeerLost: as in `pool.run_units`.
    """
    # Ray would retry without end if memory is short, so deaths are counted here.
    answer_remotely = ray.remote(num_cpus=1, max_retries=0)(_answer)
    here = os.getcwd(), versions()
    waiting, running = deque(units), dict[Any, int]()
    deaths: dict[int, int] = {}
    failed_units: list[str] = []
    failure: JaxlmError | None = None
    while running or (waiting and failure is None):
        while waiting and len(running) < workers and failure is None:
            number = waiting.popleft()
            running[answer_remotely.remote(make_task, number, *here)] = number
        (ready,), _ = ray.wait(list(running), num_returns=1)
        number = running.pop(ready)
        try:
            answer = ray.get(ready)
        except ray.exceptions.RayTaskError as error:  # before our code could answer
            failure = failure or InputMissing(
                "a machine of the cluster cannot run units",
                where="--engine=ray",
                why=str(getattr(error, "cause", error)),
                fix="pip install 'jaxlm[prepare,ray]'    # of this version, on every machine",
            )
            continue
        except ray.exceptions.RayError as error:
            deaths[number] = deaths.get(number, 0) + 1
            if deaths[number] < MAX_DEATHS:
                waiting.appendleft(number)
            else:
                failed_units.append(f"unit {number}, {type(error).__name__}")
            continue
        if "error" in answer:
            failure = failure or error_of(answer["error"])
        else:
            yield number, answer["seconds"]
    if failure is not None:
        raise failure
    if failed_units:
        raise units_failed(failed_units)


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


def _answer(
    make_task: MakeTask, number: int, folder: str, expected: tuple[str, ...]
) -> dict[str, Any]:
    return _worker(make_task, folder, expected).answer(number)


@functools.lru_cache(1)
def _worker(make_task: MakeTask, folder: str, expected: tuple[str, ...]) -> Worker:
    """Return the worker of this Ray process, which runs many units."""
    return Worker(functools.partial(_opened, make_task, folder, expected))


def _opened(make_task: MakeTask, folder: str, expected: tuple[str, ...]) -> Task:
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
