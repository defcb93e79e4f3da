"""Turns of the processes in scripts/bench_torch.py: all alive together, or one by one."""

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from bench_sizes import SIZES

from jaxlm.core import backend

WINDOWS = 3  # of an arm that runs alone, in each round
TRACED = 5  # steps of a trace
LATE = "not measured: the time was up"
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")  # how the last line of a traceback begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Lengths, rounds and the deadline of a measurement."""

    command: Sequence[str]  # of an arm's process; its size and name are added
    on: Literal["cpu", "gpu"]
    rounds: int
    seconds: float
    steps: int | None
    deadline: float  # of time.monotonic()


@dataclasses.dataclass
class Measured:
    """Measurements of an arm; `speeds` are tokens a second, one for each window."""

    speeds: list[float] = dataclasses.field(default_factory=list)
    loss: float | None = None
    start_seconds: float | None = None
    device: str | None = None
    library: str | None = None
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def median(self) -> float:
        """Tokens a second; 0 where there is no window."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    @property
    def quartiles(self) -> tuple[float, float]:
        """The quarter and the three quarters of the windows, in tokens a second."""
        if len(self.speeds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.speeds, n=4, method="inclusive")
        return low, high


class Ended(Exception):
    """An arm is gone, or is not the model that it should be."""


@contextlib.contextmanager
def working(plan: Plan, size: str, arm: str, measured: Measured) -> Iterator["Worker"]:
    """An arm's process, warmed up. It ends with the `with` block, or at the deadline.

    Raises:
      Ended: where the process ends, or starts with a loss that is not near ln V.
    """
    # Threads that wait for work in a loop would take the others' turn from them.
    quiet = {"OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*plan.command, f"--size={size}", f"--arm={arm}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | (quiet if plan.on == "cpu" else {"JAX_PLATFORMS": "cuda"}),
        )
        left = min(plan.deadline - time.monotonic(), threading.TIMEOUT_MAX)
        timer = threading.Timer(left, process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield Worker(plan, size, measured, process, output)
        finally:
            timer.cancel()
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(timeout=30)  # it ends with its input
            process.kill()
            process.wait()


class Worker:
    """A process, as made by `working`, that takes steps on request."""

    def __init__(
        self, plan: Plan, size: str, measured: Measured, process: subprocess.Popen[str], output: Any
    ):
        self._deadline, self._found = plan.deadline, measured
        self._process, self._said = process, output
        first = self._read()
        measured.loss, measured.start_seconds = first["loss_nats"], first["seconds"]
        if not abs(measured.loss - math.log(SIZES[size].vocab)) < 1:
            raise Ended(f"starts with a loss of {measured.loss}")
        self.ask(steps=1)  # the second one is not like the others either
        self._count = plan.steps or max(1, round(2 * plan.seconds / self.ask(steps=2)["seconds"]))
        self._tokens = self._count * SIZES[size].tokens_per_step

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer of the process to a request."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def window(self) -> None:
        """Takes steps, and notes how fast."""
        answer, measured = self.ask(steps=self._count), self._found
        if not math.isfinite(answer["loss_nats"]):
            raise Ended(f"comes to a loss of {answer['loss_nats']}")
        measured.speeds.append(self._tokens / answer["seconds"])
        measured.device, measured.library = answer["device"], answer["library"]
        measured.peak_bytes = answer["peak_bytes"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        if time.monotonic() >= self._deadline:
            raise Ended(LATE)
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        output = [line for line in lines if line.strip()] or ["no word"]
        reason = ([line for line in output if ERROR.match(line)] or output)[-1]
        raise Ended(f"exit code {code}: {reason.strip()[:300].replace('|', '/')}")


def verdict(ours: Measured, theirs: Measured) -> str:
    """Return "ahead" or "behind" if the quartiles are apart, else "undecided"."""
    if min(len(ours.speeds), len(theirs.speeds)) < 4:
        return "undecided"
    if ours.quartiles[0] > theirs.quartiles[1]:
        return "ahead"
    return "behind" if ours.quartiles[1] < theirs.quartiles[0] else "undecided"


def machine_facts() -> dict[str, Any]:
    """Return the load average of this moment, the number of usable cores and the CPU's units."""
    return {
        "load": list(os.getloadavg()),
        "cores": len(os.sched_getaffinity(0)),
        "units": sorted(backend.cpu_units()),
        "python": platform.python_version(),
    }


Found = dict[str, dict[str, Measured]]


def together(plan: Plan, sizes: Sequence[str], arms: Sequence[str]) -> Iterator[Found]:
    """Size by size, all arms alive, a window of each in turn.

    Yields what is known after each round.
    """
    results: Found = {}
    for size in sizes:
        of = results[size] = {arm: Measured() for arm in arms}
        with contextlib.ExitStack() as stack:
            workers = {}
            for arm in arms:
                with _noted(of[arm]):
                    workers[arm] = stack.enter_context(working(plan, size, arm, of[arm]))
            for turn in range(plan.rounds):
                for arm in _ordered(arms, turn):
                    if of[arm].error is None:
                        with _noted(of[arm]):
                            workers[arm].window()
                yield results


def alone(plan: Plan, sizes: Sequence[str], arms: Sequence[str]) -> Iterator[Found]:
    """Round by round one process at a time, an arm through all sizes and then the next.

    Yields what is known after each.

    So where time is short it is the last arm that lacks sizes, not the last size its ratio. No arm
    is begun that would not be done in time, by how long it took before, or else by the longest of
    all.
    """
    results: Found = {size: {arm: Measured() for arm in arms} for size in sizes}
    took: dict[tuple[str, str], float] = {}
    for turn in range(plan.rounds):
        for arm in _ordered(arms, turn):
            for size in sizes:
                of = results[size][arm]
                expected = took.get((size, arm), max(took.values(), default=0.0))
                begun = time.monotonic()
                if of.error:
                    continue
                if begun + expected > plan.deadline:
                    of.error = None if of.speeds else LATE
                    continue
                with _noted(of), working(plan, size, arm, of) as worker:
                    for _ in range(WINDOWS):
                        worker.window()
                took[size, arm] = time.monotonic() - begun
                yield results
    yield results


def trace(plan: Plan, size: str, arm: str, folder: Path) -> dict[str, Any]:
    """Profile of the steps of an arm."""
    with working(plan, size, arm, Measured()) as worker:
        return worker.ask(trace=str(folder), steps=plan.steps or TRACED)["trace"]


def _ordered(arms: Sequence[str], turn: int) -> Sequence[str]:
    return arms if turn % 2 == 0 else arms[::-1]


@contextlib.contextmanager
def _noted(measured: Measured) -> Iterator[None]:
    """An arm that ends does not end the others."""
    try:
        yield
    except Ended as ended:
        # What came before its end by the clock stands.
        if not (str(ended) == LATE and measured.speeds):
            measured.error = str(ended)
