"""Several processes of one run on this machine: started, watched, and ended together."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import JaxlmError, PeerLost, Preempted, SaveFailed, Stalled
from jaxlm.training import rundir
from jaxlm.training.rundir import RunDir

FOLDER = "JAXLM_LAUNCH"  # tells a rank where to leave its heartbeat and its last word
ABORTED = 128 + signal.SIGABRT  # how a shell says it
POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The rank that failed first, the exit code that the job has from it, and why."""

    rank: int
    code: int
    cause: str
    is_consequence: bool = False  # of another's failure, most likely


class WorkerGroup:
    """One attempt: the processes of a job from their start to their end. None outlives the context."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        say: Log,
        grace_seconds: float = 5.0,
        silence_seconds: float = 120.0,
    ):
        self._command, self._count, self._say = command, count, say
        self._grace, self._silence = grace_seconds, silence_seconds
        self._folder = Path(tempfile.mkdtemp(prefix="jaxlm-launch-"))
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._last: dict[int, str] = {}  # line of each rank that is no explanation of the one above
        self._ended: dict[int, int] = {}  # exit codes
        self._failures: list[WorkerFailure] = []  # in the order in which they were seen
        self._reported: set[int] = set()
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        address = f"127.0.0.1:{free_port()}"
        for rank in range(self._count):
            words = [
                f"--coordinator={address}",
                f"--num_processes={self._count}",
                f"--process_id={rank}",
            ]
            process = subprocess.Popen(
                [*self._command, *words],
                env=os.environ | {FOLDER: str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C comes to us, and to them through us
            )
            self.processes.append(process)
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self.processes)):
            self._kill(rank)
        for process in self.processes:
            process.wait()
        for reader in self._readers:
            reader.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)

    def signal(self, number: int) -> None:
        """Passes a signal on to every rank that runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> WorkerFailure | None:
        """Returns once every rank has ended; None where all finished."""
        beats: dict[int, tuple[str, float]] = {}
        first_failed: float | None = None
        while len(self._ended) < self._count:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            self._take_ends()
            if self._failures and first_failed is None:
                first_failed = now
                self.signal(signal.SIGCONT)  # one that was stopped can hear that all end
            for rank in set(range(self._count)) - set(self._ended):
                beat = self._file(rank, "beat")
                if beat != beats.setdefault(rank, (beat, now))[0]:
                    beats[rank] = (beat, now)
                if now - beats[rank][1] > self._silence and rank not in self._killed:
                    self._end_silent(rank)
                if first_failed is not None and now - first_failed > self._grace:
                    self._kill(rank)
        # One that lost a peer is not the cause.
        return min(self._failures, key=lambda each: each.is_consequence, default=None)

    def _take_ends(self) -> None:
        """Notes who has ended since the last look, and how: by a signal, with a last word, or with an exit code alone."""
        ended = {
            rank: code
            for rank, process in enumerate(self.processes)
            if rank not in self._ended and (code := process.poll()) is not None
        }
        self._ended |= ended
        for rank, code in ended.items():
            self._readers[rank].join(1)  # its last words
            if rank not in self._killed and (code < 0 or code == ABORTED):
                number = -code if code < 0 else code - 128
                self._failures.append(_by_signal(rank, number, self._last.get(rank, "")))
        for rank in set(range(self._count)) - self._reported:
            with contextlib.suppress(ValueError):
                word = json.loads(self._file(rank, "end"))
                self._reported.add(rank)
                failure = WorkerFailure(
                    rank=word["rank"],
                    code=word["code"],
                    cause=word["cause"],
                    is_consequence=word["code"] == PeerLost.code,
                )
                self._failures.append(failure)
        for rank, code in ended.items():
            if code > 0 and code != ABORTED and rank not in self._reported:
                failure = WorkerFailure(rank=rank, code=code, cause=self._last.get(rank, ""))
                self._failures.append(failure)

    def _end_silent(self, rank: int) -> None:
        """Its Python does not run, so neither does its watch. The signal's handler runs even then, and writes stacks."""
        cause = f"no sign of life for {self._silence:.0f} s"
        self._failures.insert(0, WorkerFailure(rank=rank, code=Stalled.code, cause=cause))
        with contextlib.suppress(ProcessLookupError):
            self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        for line in self._file(rank, "stacks").splitlines():
            self._say(f"[{rank}] {line}")
        self._kill(rank)

    def _kill(self, rank: int) -> None:
        """Ends a rank and all that it started."""
        if self.processes[rank].poll() is None:
            self._killed.add(rank)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.processes[rank].pid, signal.SIGKILL)

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.strip() and not line[0].isspace():
                    self._last[rank] = line.rstrip()
                self._say(f"[{rank}] {line.rstrip()}")

    def _file(self, rank: int, name: str) -> str:
        try:
            return (self._folder / f"{rank}.{name}").read_text(errors="replace")
        except OSError:
            return ""


def _by_signal(rank: int, number: int, said: str) -> WorkerFailure:
    """JAX aborts where a peer is lost. Killed from outside is a loss too; any other signal is a crash."""
    lost = number in (signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)
    return WorkerFailure(
        rank=rank,
        code=PeerLost.code if lost else 70,
        cause=f"ended by {signal.Signals(number).name}"
        + (f", after {said[:200]!r}" if said else ""),
        is_consequence=number == signal.SIGABRT,
    )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


# A run of several processes, started again as long as that helps.


RETRIED_CODES = (PeerLost.code, Preempted.code, Stalled.code, SaveFailed.code)
TRIES = 3  # without progress
PAUSE_SECONDS = (1.0, 60.0)  # before a restart, at first and at most
SPACE_SECONDS = 600.0  # to wait for a disk to have space again


class ElasticJob:
    """A run of several processes, started again as long as that helps.

    A rank that is lost, stalled or preempted is worth another start, from the newest checkpoint, after a pause that
    doubles. Three ends in a row at the same checkpoint are a crash loop. A wrong config or bad data stays wrong.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        workdir: Path | None,
        restarts: int,
        say: Log,
        silence_seconds: float = 120.0,
        pause_seconds: float = PAUSE_SECONDS[0],
    ):
        self._command, self._count, self._workdir = command, count, workdir
        self._restarts, self._say, self._silence = restarts, say, silence_seconds
        self._pause = pause_seconds
        self._ranks: WorkerGroup | None = None
        self._told = threading.Event()
        self.started = 0

    def stop(self, number: int, _: object = None) -> None:
        """Passes a signal on; the job is not started again."""
        self._told.set()
        if self._ranks:
            self._ranks.signal(number)

    def run(self) -> WorkerFailure | None:
        """The last failure; None where the run finished. What killed processes could not, it writes into exit.json.

        Raises:
          JaxlmError: where it crashes again and again without progress.
        """
        try:
            failure = self._attempts()
        except JaxlmError as error:
            self._write_down(error.code, rundir.cause(error))
            raise
        if failure:
            self._write_down(failure.code, failure.cause)
        return failure

    def _attempts(self) -> WorkerFailure | None:
        here, tries = self._newest(), 0
        while True:
            with WorkerGroup(
                self._command, self._count, say=self._say, silence_seconds=self._silence
            ) as self._ranks:
                self.started += 1
                if self._told.is_set():
                    self._ranks.signal(signal.SIGTERM)
                failure = self._ranks.wait()
            self._ranks = None
            if failure is None:
                return None
            self._say(
                f"rank {failure.rank} failed first, exit code {failure.code}: {failure.cause}"
            )
            if failure.code not in RETRIED_CODES or self._told.is_set():
                return failure
            reached = self._newest()
            tries = tries + 1 if reached == here or tries == 0 else 1
            here = reached
            if tries >= TRIES:
                raise JaxlmError(
                    f"the run ended {tries} times in a row without a step past {here}",
                    where=str(self._workdir or ""),
                    why=f"rank {failure.rank}, exit code {failure.code}: {failure.cause}",
                    fix="mend that first; then the same command goes on",
                )
            if self.started > self._restarts:
                return failure
            if not self._wait(failure, tries):
                return failure

    def _wait(self, failure: WorkerFailure, tries: int) -> bool:
        """Pauses; whether a start is worth while."""
        pause = min(self._pause * 2 ** (tries - 1), PAUSE_SECONDS[1])
        self._say(f"starting again in {pause:g} s")
        if failure.code != SaveFailed.code or self._workdir is None:
            return not self._told.wait(pause)
        had = shutil.disk_usage(self._workdir).free
        until = time.monotonic() + SPACE_SECONDS
        while not self._told.wait(pause) and time.monotonic() < until:
            if shutil.disk_usage(self._workdir).free > had:
                return True
        return False

    def _write_down(self, code: int, cause: str) -> None:
        if self._workdir is None:
            return
        directory = RunDir(self._workdir)
        if directory.is_new or (self._workdir / "exit.json").exists():
            return
        directory.step = self._newest()
        with contextlib.suppress(JaxlmError, OSError):  # another run is there by now
            directory.lock.acquire()
            try:
                directory.begin()
                directory.leave(code, cause)
            finally:
                directory.lock.release()

    def _newest(self) -> int:
        """The newest checkpoint."""
        folder = self._workdir and self._workdir / "checkpoints"
        if not folder or not folder.is_dir():
            return 0
        return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
