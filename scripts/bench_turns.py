"""Who runs when in scripts/bench_torch.py: processes that are asked for steps, all alive together or one after the other."""

import contextlib
import dataclasses
import json
import math
import os
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

WINDOWS = 3  # of an arm that runs alone, in each round
TRACED = 5  # steps of a trace
LATE = "not measured: the time was up"
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")  # how the last line of a traceback begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, how often, and by when."""

    command: Sequence[str]  # of an arm's process; its size and name are added
    on: Literal["cpu", "gpu"]
    rounds: int
    seconds: float
    steps: int | None
    deadline: float  # of time.monotonic()


@dataclasses.dataclass
class Measured:
    """What is known of an arm so far; `speeds` are tokens a second, one for each window."""

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


class Ended(Exception):
    """An arm is gone, or is not the model that it should be."""


@contextlib.contextmanager
def working(plan: Plan, size: str, arm: str, found: Measured) -> Iterator["Worker"]:
    """An arm's process, warmed up. It ends with the `with` block, or at the deadline.

    Raises:
      Ended: where the process ends, or starts with a loss that is not near ln V.
    """
    # Threads that wait for work in a loop would take the others' turn from them.
    quiet = {"OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*plan.command, f"--size={size}", f"--arm={arm}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=os.environ | (quiet if plan.on == "cpu" else {"JAX_PLATFORMS": "cuda"}),
        )
        left = min(plan.deadline - time.monotonic(), threading.TIMEOUT_MAX)
        timer = threading.Timer(left, process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield Worker(plan, size, found, process, said)
        finally:
            timer.cancel()
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(timeout=30)  # it ends with its input
            process.kill()
            process.wait()


class Worker:
    """What `working` gives: a process that takes steps when it is asked."""

    def __init__(
        self, plan: Plan, size: str, found: Measured, process: subprocess.Popen[str], said: Any
    ):
        self._deadline, self._found = plan.deadline, found
        self._process, self._said = process, said
        first = self._read()
        found.loss, found.start_seconds = first["loss_nats"], first["seconds"]
        if not abs(found.loss - math.log(SIZES[size].vocab)) < 1:
            raise Ended(f"starts with a loss of {found.loss}")
        self.ask(steps=1)  # the second one is not like the others either
        self._count = plan.steps or max(1, round(2 * plan.seconds / self.ask(steps=2)["seconds"]))
        self._tokens = self._count * SIZES[size].tokens_per_step

    def ask(self, **wish: Any) -> dict[str, Any]:
        """What the process answers."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(wish) + "\n")
            self._process.stdin.flush()
        return self._read()

    def window(self) -> None:
        """Takes steps, and notes how fast."""
        answer, found = self.ask(steps=self._count), self._found
        if not math.isfinite(answer["loss_nats"]):
            raise Ended(f"comes to a loss of {answer['loss_nats']}")
        found.speeds.append(self._tokens / answer["seconds"])
        found.device, found.library = answer["device"], answer["library"]
        found.peak_bytes = answer["peak_bytes"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        if time.monotonic() >= self._deadline:
            raise Ended(LATE)
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.strip()] or ["no word"]
        told = ([line for line in said if ERROR.match(line)] or said)[-1]
        raise Ended(f"exit code {code}: {told.strip()[:300].replace('|', '/')}")


Found = dict[str, dict[str, Measured]]


def together(plan: Plan, sizes: Sequence[str], arms: Sequence[str]) -> Iterator[Found]:
    """Size by size, all arms alive, a window of each in turn.

    Yields what is known after each round.
    """
    found: Found = {}
    for size in sizes:
        of = found[size] = {arm: Measured() for arm in arms}
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
                yield found


def alone(plan: Plan, sizes: Sequence[str], arms: Sequence[str]) -> Iterator[Found]:
    """Round by round one process at a time, an arm through all sizes and then the next.

    Yields what is known after each.

    So where time is short it is the last arm that lacks sizes, not the last size its ratio. No arm
    is begun that would not be done in time, by how long it took before, or else by the longest of
    all.
    """
    found: Found = {size: {arm: Measured() for arm in arms} for size in sizes}
    took: dict[tuple[str, str], float] = {}
    for turn in range(plan.rounds):
        for arm in _ordered(arms, turn):
            for size in sizes:
                of = found[size][arm]
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
                yield found
    yield found


def trace(plan: Plan, size: str, arm: str, folder: Path) -> dict[str, Any]:
    """Where the time of an arm's steps went."""
    with working(plan, size, arm, Measured()) as worker:
        return worker.ask(trace=str(folder), steps=plan.steps or TRACED)["trace"]


def _ordered(arms: Sequence[str], turn: int) -> Sequence[str]:
    return arms if turn % 2 == 0 else arms[::-1]


@contextlib.contextmanager
def _noted(found: Measured) -> Iterator[None]:
    """An arm that ends does not end the others."""
    try:
        yield
    except Ended as ended:
        # What came before its end by the clock stands.
        if not (str(ended) == LATE and found.speeds):
            found.error = str(ended)
