"""Local launcher of a run of several processes, with restarts."""

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

LAUNCH_FOLDER = "JAXLM_LAUNCH"  # variable with the folder for heartbeats and exit reasons of ranks
ABORTED = 128 + signal.SIGABRT  # exit code of a shell whose command aborted
POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The rank that failed first, the exit code of the job, and the cause."""

    rank: int
    code: int
    cause: str
    is_consequence: bool = False  # probably of the failure of another rank


class WorkerGroup:
    """One attempt of a job: its processes, which are killed when the context ends.

    Args:
      command: command of a rank, without the options of the rendezvous.
      count: number of ranks.
      log: receives the output of the ranks, line by line.
      grace_seconds: time between the first failure and the kill of the other ranks.
      silence_seconds: time without a heartbeat after which a rank is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        log: Log,
        grace_seconds: float = 5.0,
        silence_seconds: float = 120.0,
    ):
        self._command, self._count, self._log = command, count, log
        self._grace, self._silence = grace_seconds, silence_seconds
        self._folder = Path(tempfile.mkdtemp(prefix="jaxlm-launch-"))
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._last: dict[int, str] = {}  # last line of each rank that is not indented
        self._ended: dict[int, int] = {}  # exit codes
        self._failures: list[WorkerFailure] = []  # in the order of their detection
        self._reported: set[int] = set()
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        address = f"127.0.0.1:{free_port()}"
        for rank in range(self._count):
            count = f"--num_processes={self._count}"
            process = subprocess.Popen(
                [*self._command, f"--coordinator={address}", count, f"--process_id={rank}"],
                env=os.environ | {LAUNCH_FOLDER: str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the launcher, which forwards it
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
        """Forward a signal to every running rank."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> WorkerFailure | None:
        """Wait until every rank has ended; return the cause, or None if all ranks finished."""
        beats: dict[int, tuple[str, float]] = {}
        first_failed: float | None = None
        while len(self._ended) < self._count:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            self._take_ends()
            if self._failures and first_failed is None:
                first_failed = now
                self.signal(signal.SIGCONT)  # a suspended rank can then read that the run ends
            for rank in set(range(self._count)) - set(self._ended):
                beat = self._file(rank, "beat")
                if beat != beats.setdefault(rank, (beat, now))[0]:
                    beats[rank] = (beat, now)
                if now - beats[rank][1] > self._silence and rank not in self._killed:
                    self._end_silent(rank)
                if first_failed is not None and now - first_failed > self._grace:
                    self._kill(rank)
        # A rank that lost a peer is not the cause.
        return min(self._failures, key=lambda each: each.is_consequence, default=None)

    def _take_ends(self) -> None:
        """Record ranks that have ended: by a signal, with an exit reason, or with a code alone."""
        ended = {
            rank: code
            for rank, process in enumerate(self.processes)
            if rank not in self._ended and (code := process.poll()) is not None
        }
        self._ended |= ended
        for rank, code in ended.items():
            self._readers[rank].join(1)  # reads the rest of its output
            if rank not in self._killed and (code < 0 or code == ABORTED):
                number = -code if code < 0 else code - 128
                self._failures.append(_by_signal(rank, number, self._last.get(rank, "")))
        for rank in set(range(self._count)) - self._reported:
            with contextlib.suppress(ValueError):
                reason = json.loads(self._file(rank, "end"))
                self._reported.add(rank)
                facts = {name: reason[name] for name in ("rank", "code", "cause")}
                lost = reason["code"] == PeerLost.code
                self._failures.append(WorkerFailure(**facts, is_consequence=lost))
        for rank, code in ended.items():
            if code > 0 and code != ABORTED and rank not in self._reported:
                failure = WorkerFailure(rank=rank, code=code, cause=self._last.get(rank, ""))
                self._failures.append(failure)

    def _end_silent(self, rank: int) -> None:
        """Kill a rank without heartbeat, after a signal whose handler writes stacks.

        The rank's Python is stuck, so its own watchdog is too; the handler runs nevertheless.
        """
        cause = f"no heartbeat for {self._silence:.0f} s"
        self._failures.insert(0, WorkerFailure(rank=rank, code=Stalled.code, cause=cause))
        with contextlib.suppress(ProcessLookupError):
            self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        for line in self._file(rank, "stacks").splitlines():
            self._log(f"[{rank}] {line}")
        self._kill(rank)

    def _kill(self, rank: int) -> None:
        """Kill a rank and its child processes."""
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
                self._log(f"[{rank}] {line.rstrip()}")

    def _file(self, rank: int, name: str) -> str:
        try:
            return (self._folder / f"{rank}.{name}").read_text(errors="replace")
        except OSError:
            return ""


def _by_signal(rank: int, number: int, line: str) -> WorkerFailure:
    """Return the failure of a rank that a signal ended, after its last line of output.

    JAX aborts if a peer is lost. A kill from outside counts as a loss too; other signals are
    crashes.
    """
    lost = number in (signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)
    return WorkerFailure(
        rank=rank,
        code=PeerLost.code if lost else 70,
        cause=f"ended by {signal.Signals(number).name}"
        + (f", after {line[:200]!r}" if line else ""),
        is_consequence=number == signal.SIGABRT,
    )


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


RETRIED_CODES = (PeerLost.code, Preempted.code, Stalled.code, SaveFailed.code)
MAX_TRIES = 3  # without progress
PAUSE_SECONDS = (1.0, 60.0)  # pause before a restart: first and maximum
SPACE_SECONDS = 600.0  # longest wait for free space on the disk


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """Limits of the restarts of a job.

    Args:
      restarts: most restarts.
      silence_seconds: time without a heartbeat after which a rank is killed.
      pause_seconds: pause before the first restart.
    """

    restarts: int
    silence_seconds: float = 120.0
    pause_seconds: float = PAUSE_SECONDS[0]


class ElasticJob:
    """A run of several processes with restarts after failures that a restart may fix.

    A lost, stalled or preempted rank causes a restart from the newest checkpoint, after a pause
    that doubles. Three failures in a row at the same checkpoint are a crash loop. Other failures,
    such as a wrong config or bad data, cause no restart.

    Args:
      command: command of a rank, without the options of the rendezvous.
      count: number of ranks.
      workdir: the run directory.
      policy: limits of the restarts.
      log: receives the output of the ranks and a line about each restart.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        workdir: Path | None,
        policy: RestartPolicy,
        log: Log,
    ):
        self._command, self._count, self._workdir = command, count, workdir
        self._policy, self._log = policy, log
        self._ranks: WorkerGroup | None = None
        self._stopped = threading.Event()
        self.started = 0

    def stop(self, number: int, _: object = None) -> None:
        """Forward a signal to the ranks; the job does not restart."""
        self._stopped.set()
        if self._ranks:
            self._ranks.signal(number)

    def run(self) -> WorkerFailure | None:
        """Run the job; return the last failure, or None if the run finished.

        Writes exit.json if the killed processes could not.

        Raises:
          JaxlmError: in a crash loop without progress.
        """
        try:
            failure = self._attempts()
        except JaxlmError as error:
            self._write_exit(error.code, rundir.cause(error))
            raise
        if failure:
            self._write_exit(failure.code, failure.cause)
        return failure

    def _attempts(self) -> WorkerFailure | None:
        previous, tries = self._latest_step(), 0
        while True:
            silence = self._policy.silence_seconds
            with WorkerGroup(
                self._command, self._count, log=self._log, silence_seconds=silence
            ) as self._ranks:
                self.started += 1
                if self._stopped.is_set():
                    self._ranks.signal(signal.SIGTERM)
                failure = self._ranks.wait()
            self._ranks = None
            if failure is None:
                return None
            self._log(
                f"rank {failure.rank} failed first, exit code {failure.code}: {failure.cause}"
            )
            if failure.code not in RETRIED_CODES or self._stopped.is_set():
                return failure
            step = self._latest_step()
            tries = tries + 1 if step == previous or tries == 0 else 1
            previous = step
            if tries >= MAX_TRIES:
                raise JaxlmError(
                    f"the run ended {tries} times in a row without a step past {previous}",
                    where=str(self._workdir or ""),
                    why=f"rank {failure.rank}, exit code {failure.code}: {failure.cause}",
                    fix="repair the cause; then the same command resumes the run",
                )
            if self.started > self._policy.restarts or not self._wait(failure, tries):
                return failure

    def _wait(self, failure: WorkerFailure, tries: int) -> bool:
        """Pause; return whether a restart is sensible."""
        pause = min(self._policy.pause_seconds * 2 ** (tries - 1), PAUSE_SECONDS[1])
        self._log(f"starting again in {pause:g} s")
        if failure.code != SaveFailed.code or self._workdir is None:
            return not self._stopped.wait(pause)
        free = shutil.disk_usage(self._workdir).free
        deadline = time.monotonic() + SPACE_SECONDS
        while not self._stopped.wait(pause) and time.monotonic() < deadline:
            if shutil.disk_usage(self._workdir).free > free:
                return True
        return False

    def _write_exit(self, code: int, cause: str) -> None:
        if self._workdir is None:
            return
        directory = RunDir(self._workdir)
        if directory.is_new or (self._workdir / "exit.json").exists():
            return
        directory.step = self._latest_step()
        with contextlib.suppress(JaxlmError, OSError):  # another run may use the directory
            directory.lock.acquire()
            try:
                directory.begin()
                directory.write_exit(code, cause)
            finally:
                directory.lock.release()

    def _latest_step(self) -> int:
        """Return the step of the newest checkpoint."""
        folder = self._workdir and self._workdir / "checkpoints"
        if not folder or not folder.is_dir():
            return 0
        return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
