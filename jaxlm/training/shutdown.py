"""Immediate exit of a process of a run: print the reason, write exit.json, signal the peers, exit.

An exception would deadlock runs of several processes: the process that raises waits in JAX for the
others, and they wait for it.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxlm.core.errors import Diverged, JaxlmError, PeerLost, Stalled
from jaxlm.core.quoting import printable, safe
from jaxlm.monitor import watchdog
from jaxlm.parallel.peers import RERUN_FIX, Peers, is_loss

STEP_SECONDS = 0.6  # timeout of each action during the exit: a disk or a peer may not answer


def run_with_timeout(action: Callable[[], object], seconds: float = STEP_SECONDS) -> None:
    """Run an action; ignore that it fails or exceeds the timeout."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


MAX_SIGN_CHARACTERS = 16_000  # of a traceback that the peers receive
POLL_SECONDS = 0.2
REPORTED_CODES = (Stalled.code, Diverged.code)  # exit codes with a report
REPORT_SECONDS = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitReason:
    """Reason why a rank exits: its exit code, the cause in a line, and its error text."""

    rank: int
    code: int
    cause: str
    text: str = ""


class Shutdown:
    """Immediate exit of this process. The first caller determines the reason; later callers block.

    As a context manager it polls the signs of the peers in a thread; with peers, an exception in
    the body causes the immediate exit.

    `stacks` is the file for the stack of each thread if the run stalls, `report` the file with the
    exit reason for the launcher that started this process.

    Attributes:
      write_exit: writes exit.json; set once this process owns a run directory.
      write_report: writes the report of the run; set together with `write_exit`, and called for
        the exit codes in REPORTED_CODES.
      on_signs: receives all signs of the peers whenever they are read.
    """

    def __init__(self, peers: Peers, *, stacks: Path | None = None, report: Path | None = None):
        self.peers, self._stacks, self._report = peers, stacks, report
        self.write_exit: Callable[[int, str], None] | None = None
        self.write_report: Callable[[], None] = lambda: None
        self.on_signs: Callable[[dict[str, str]], None] = lambda _: None
        self._first = threading.Lock()
        self._over = threading.Event()
        self._listener: threading.Thread | None = None

    def __enter__(self) -> "Shutdown":
        if self.peers.count > 1:
            self._listener = threading.Thread(target=self._listen, name="peers", daemon=True)
            self._listener.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.peers.count > 1:
            self.exit_failed(error)
        self.close()

    def finish(self, seconds: float) -> None:
        """Finish in order: wait for every rank, so that no exit counts as the loss of a peer."""
        self.peers.barrier("end", seconds)
        self.close()
        self.peers.close()

    def close(self) -> None:
        """Stop polling the peers."""
        self._over.set()
        if self._listener:
            self._listener.join()

    def exit_failed(self, error: BaseException) -> NoReturn:
        """Exit with the code of an exception, or of the peer that ended the run before."""
        if self.peers.count > 1 and not isinstance(error, PeerLost):
            run_with_timeout(self._read_signs)
        if is_loss(error):
            why = str(error).partition("\n")[0]
            error = PeerLost(
                "another process was lost during a computation",
                where=f"rank {self.peers.rank}",
                why=why,
                fix=RERUN_FIX,
            )
        if isinstance(error, JaxlmError):
            self.exit(error.code, f"{type(error).__name__}: {error.what}", str(error))
        code = 130 if isinstance(error, KeyboardInterrupt) else 70
        text = "".join(traceback.format_exception(error))
        self.exit(code, f"{type(error).__name__}: {safe(str(error))}", text)

    def exit_stalled(self, message: str) -> NoReturn:
        """Exit because a phase exceeded its limit; dump the stacks of every thread."""
        watchdog.dump_stacks(self._stacks)
        error = Stalled(
            message,
            where=f"rank {self.peers.rank}",
            why="the stacks of all threads are above"
            + (f" and in {self._stacks}" if self._stacks else ""),
            fix=f"{RERUN_FIX}\njaxlm config explain watch    # limits, if this is no stall",
        )
        self.exit(error.code, f"Stalled: {message}", str(error))

    def exit(self, code: int, cause: str, text: str = "") -> NoReturn:
        """Exit with a code that the peers exit with too."""
        text = text[-MAX_SIGN_CHARACTERS:]
        self._end(ExitReason(rank=self.peers.rank, code=code, cause=cause, text=text))

    def _listen(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                signs = self._read_signs()
            except PeerLost as error:
                if not self._over.is_set():
                    self.exit_failed(error)
                return
            self.on_signs(signs)

    def _read_signs(self) -> dict[str, str]:
        """Return the signs; exit if a peer has ended the run."""
        signs = self.peers.signs()
        if "abort" in signs:
            reason = ExitReason(**json.loads(signs["abort"]))
            if reason.rank != self.peers.rank:
                if reason.code == Stalled.code:
                    watchdog.dump_stacks(self._stacks)
                self._end(reason)
        return signs

    def _end(self, reason: ExitReason) -> NoReturn:
        if not self._first.acquire(blocking=False):
            while True:
                time.sleep(60)
        peers, is_from_peer = self.peers, reason.rank != self.peers.rank
        text = reason.text or reason.cause
        if is_from_peer:
            text = f"rank {reason.rank} has ended this run with exit code {reason.code}:\n{text}"
        run_with_timeout(lambda: _write(text))
        written = json.dumps(dataclasses.asdict(reason))
        if write_exit := self.write_exit:
            run_with_timeout(lambda: write_exit(reason.code, reason.cause))
        if report := self._report:
            run_with_timeout(lambda: report.write_text(written))
        if peers.count > 1:
            if not is_from_peer:
                run_with_timeout(lambda: peers.sign("abort", written))
            run_with_timeout(lambda: peers.sign(f"gone/{peers.rank}", ""))
        if reason.code in REPORTED_CODES:
            run_with_timeout(self.write_report, REPORT_SECONDS)
        if peers.count > 1 and peers.is_first:
            run_with_timeout(lambda: _await_others(peers), 2 * STEP_SECONDS)
        run_with_timeout(lambda: (sys.stdout.flush(), sys.stderr.flush()))
        os._exit(reason.code)


def _await_others(peers: Peers) -> None:
    """Wait for the other ranks: the first process serves the signs, so it exits last."""
    while sum(name.startswith("gone/") for name in peers.signs()) < peers.count:
        time.sleep(0.05)


def _write(text: str) -> None:
    """Write to standard error without the stream's lock, which a stuck thread may hold."""
    for line in text.splitlines():
        os.write(2, printable(line).encode() + b"\n")
