"""Units of work on the machines of a Ray cluster, which all see the output folder and the sources under the same paths.

Ray places them; a unit whose process or machine dies is done again. Every machine needs the same jaxlm and packages as the
one that begins: another version could write other bytes, so it is refused.
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
from jaxlm.corpus.task import DEATHS, Opens, Task, Worker, given_up, raised

PACKAGES = "numpy", "ftfy", "py3langid", "pyarrow", "zstandard", "tokenizers", "sentencepiece"


@contextlib.contextmanager
def connected(workers: int, say: Callable[[str], None]) -> Iterator[Any]:
    """Ray, connected to the cluster of RAY_ADDRESS or of this machine, or to one of `workers` processes that ends with the block.

    Raises:
      InputMissing: where Ray is not installed, or does not answer at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise not_installed("the engine ray", "ray", "ray", where="--engine=ray") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if named := os.environ.get("RAY_ADDRESS"):
        _reach(named)
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError as error:
        if named:
            raise _silent(named, error) from error
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    try:
        machines = [node for node in ray.nodes() if node["Alive"]]
        cores = int(ray.cluster_resources().get("CPU", 0))
        say(f"ray: {len(machines)} machine{'s' * (len(machines) > 1)}, {cores} cores")
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises InputMissing where nothing answers at HOST:PORT: Ray tries for minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise _silent(address, error) from error


def _silent(address: str, error: Exception) -> InputMissing:
    return InputMissing(
        "no Ray cluster answers",
        where=f"RAY_ADDRESS = {address}",
        why=str(error).partition("\n")[0],
        fix="ray start --head on one machine, ray start --address=THAT_MACHINE:6379 on the others",
    )


def each(
    opens: Opens, units: Sequence[int], workers: int, ray: Any
) -> Iterator[tuple[int, dict[str, float]]]:
    """What `pool.each` does, at most `workers` units at a time.

    Raises:
      DataError: where a machine has other versions.
      InputMissing: where it does not see the current folder.
      NotWritable, PeerLost: as there.
    """
    # Ray would try again without end where memory is short, so that deaths are counted here.
    remote = ray.remote(num_cpus=1, max_retries=0)(_answer)
    here = os.getcwd(), versions()
    waiting, running = deque(units), dict[Any, int]()
    deaths: dict[int, int] = {}
    lost: list[str] = []
    failure: JaxlmError | None = None
    while running or (waiting and failure is None):
        while waiting and len(running) < workers and failure is None:
            number = waiting.popleft()
            running[remote.remote(opens, number, *here)] = number
        (ready,), _ = ray.wait(list(running), num_returns=1)
        number = running.pop(ready)
        try:
            answer = ray.get(ready)
        except ray.exceptions.RayTaskError as error:  # before anything of ours could answer
            failure = failure or InputMissing(
                "a machine of the cluster cannot begin a unit",
                where="--engine=ray",
                why=str(getattr(error, "cause", error)),
                fix="pip install 'jaxlm[prepare,ray]'    # of this version, on every machine",
            )
            continue
        except ray.exceptions.RayError as error:
            deaths[number] = deaths.get(number, 0) + 1
            if deaths[number] < DEATHS:
                waiting.appendleft(number)
            else:
                lost.append(f"unit {number}, {type(error).__name__}")
            continue
        if "error" in answer:
            failure = failure or raised(answer["error"])
        else:
            yield number, answer["seconds"]
    if failure is not None:
        raise failure
    if lost:
        raise given_up(lost)


def versions() -> tuple[str, ...]:
    """Whatever of a machine the bytes of a corpus depend on: its interpreter, packages, and the source of this one."""
    found = [f"python {sys.version.split()[0]}", f"unicode {unicodedata.unidata_version}"]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return (*found, f"the source of jaxlm {digest.hexdigest()[:12]}")


def _answer(opens: Opens, number: int, folder: str, expected: tuple[str, ...]) -> dict[str, Any]:
    return _worker(opens, folder, expected).answer(number)


@functools.lru_cache(1)
def _worker(opens: Opens, folder: str, expected: tuple[str, ...]) -> Worker:
    """The one of a process of Ray, which does many units."""
    return Worker(functools.partial(_opened, opens, folder, expected))


def _opened(opens: Opens, folder: str, expected: tuple[str, ...]) -> Task:
    machine = socket.gethostname()
    if differ := sorted(set(expected) ^ set(versions())):
        raise DataError(
            "a machine of the cluster has other versions",
            where=machine,
            why=f"these are not on both: {', '.join(differ[:6])}",
            fix="install the same Python, jaxlm and packages on every machine",
        )
    try:
        os.chdir(folder)
        return opens()
    except FileNotFoundError as error:
        raise InputMissing(
            "a machine of the cluster does not see a file",
            where=f"{machine}: {error.filename}",
            why="its work is read from and written to the folders of the machine that began it",
            fix="mount the folder on every machine under this path",
        ) from error
