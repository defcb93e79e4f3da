"""A run of several processes, started again as long as that helps."""

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxlm.core.errors import JaxlmError, PeerLost, Preempted, SaveFailed, Stalled
from jaxlm.recipes.ranks import Failure, Ranks
from jaxlm.train import rundir
from jaxlm.train.rundir import RunDir

AGAIN = (PeerLost.code, Preempted.code, Stalled.code, SaveFailed.code)
TRIES = 3  # without progress
PAUSE_SECONDS = (1.0, 60.0)  # before a restart, at first and at most
SPACE_SECONDS = 600.0  # to wait for a disk to have space again


class Job:
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
        say: Callable[[str], None],
        silence_seconds: float = 120.0,
        pause_seconds: float = PAUSE_SECONDS[0],
    ):
        self._command, self._count, self._workdir = command, count, workdir
        self._restarts, self._say, self._silence = restarts, say, silence_seconds
        self._pause = pause_seconds
        self._ranks: Ranks | None = None
        self._told = threading.Event()
        self.started = 0

    def stop(self, number: int, _: object = None) -> None:
        """Passes a signal on; the job is not started again."""
        self._told.set()
        if self._ranks:
            self._ranks.signal(number)

    def run(self) -> Failure | None:
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

    def _attempts(self) -> Failure | None:
        here, tries = self._newest(), 0
        while True:
            with Ranks(
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
            if failure.code not in AGAIN or self._told.is_set():
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

    def _wait(self, failure: Failure, tries: int) -> bool:
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
