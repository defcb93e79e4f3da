"""How a process of a run ends at once: it says why, leaves its mark, tells its peers, and is gone.

Not by an exception: where there are several processes, one that raises waits in JAX for the others, which wait for it.
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

# What a process that ends still tries: it may hang or fail, and must not hold up the end.


STEP_SECONDS = 0.6  # for each thing that is done on the way out; a disk or a peer may not answer


def run_with_timeout(action: Callable[[], object], seconds: float = STEP_SECONDS) -> None:
    """Does something that may hang or fail, and goes on without it then."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


MAX_SIGN_BYTES = 16_000  # characters of a traceback that the peers are told
POLL_SECONDS = 0.2
EXPLANATION_FILE = (Stalled.code, Diverged.code)  # ends that a report helps with
EXPLAIN_SECONDS = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitReason:
    """Why a rank ends: its exit code, the cause in a line, and all that it said."""

    rank: int
    code: int
    cause: str
    text: str = ""


class Shutdown:
    """The one way out in a hurry. Whoever comes first decides how it ends; later callers wait for the end.

    Used as a context manager it listens to the peers meanwhile, and an exception in its body is such an end, where
    there are peers.

    Args:
      leave: writes exit.json; set once this process owns a run directory.
      conclude: leaves what else tells how the run ended; set then too, and called for ends that a report helps with.
      stacks: where to write what each thread was doing, if the run stalled.
      report: a file for the launcher that started this process.
    """

    def __init__(self, peers: Peers, *, stacks: Path | None = None, report: Path | None = None):
        self.peers, self._stacks, self._report = peers, stacks, report
        self.leave: Callable[[int, str], None] | None = None
        self.conclude: Callable[[], None] = lambda: None
        self.hear: Callable[[dict[str, str]], None] = lambda _: (
            None
        )  # all signs, whenever they are read
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
            self.failed(error)
        self.close()

    def depart(self, seconds: float) -> None:
        """The orderly end: returns once every rank is here, and none takes the others' end for a failure."""
        self.peers.barrier("end", seconds)
        self.close()
        self.peers.close()

    def close(self) -> None:
        """Listens no longer."""
        self._over.set()
        if self._listener:
            self._listener.join()

    def failed(self, error: BaseException) -> NoReturn:
        """Ends with an exception, in its own code, unless a peer has ended the run before and this only follows from it."""
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
            self.now(error.code, f"{type(error).__name__}: {error.what}", str(error))
        code = 130 if isinstance(error, KeyboardInterrupt) else 70
        text = "".join(traceback.format_exception(error))
        self.now(code, f"{type(error).__name__}: {safe(str(error))}", text)

    def overdue(self, said: str) -> NoReturn:
        """Ends because nothing moves, with the stacks of every thread."""
        watchdog.dump_stacks(self._stacks)
        error = Stalled(
            said,
            where=f"rank {self.peers.rank}",
            why="the stacks of all threads are above"
            + (f" and in {self._stacks}" if self._stacks else ""),
            fix=f"{RERUN_FIX}\njaxlm config explain watch    # if this is no stall: the limits",
        )
        self.now(error.code, f"Stalled: {said}", str(error))

    def now(self, code: int, cause: str, text: str = "") -> NoReturn:
        """Ends with a code that the peers end with too."""
        self._end(
            ExitReason(rank=self.peers.rank, code=code, cause=cause, text=text[-MAX_SIGN_BYTES:])
        )

    def _listen(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                signs = self._read_signs()
            except PeerLost as error:
                if not self._over.is_set():
                    self.failed(error)
                return
            self.hear(signs)

    def _read_signs(self) -> dict[str, str]:
        """The signs, if no peer has ended the run."""
        signs = self.peers.signs()
        if "abort" in signs:
            notice = ExitReason(**json.loads(signs["abort"]))
            if notice.rank != self.peers.rank:
                if notice.code == Stalled.code:
                    watchdog.dump_stacks(self._stacks)
                self._end(notice)
        return signs

    def _end(self, notice: ExitReason) -> NoReturn:
        if not self._first.acquire(blocking=False):
            while True:
                time.sleep(60)
        peers, heard = self.peers, notice.rank != self.peers.rank
        text = notice.text or notice.cause
        if heard:
            text = f"rank {notice.rank} has ended this run with exit code {notice.code}:\n{text}"
        run_with_timeout(lambda: _write(text))
        if self.leave:
            leave = self.leave
            run_with_timeout(lambda: leave(notice.code, notice.cause))
        if self._report:
            report = self._report
            run_with_timeout(lambda: report.write_text(json.dumps(dataclasses.asdict(notice))))
        if peers.count > 1:
            if not heard:
                run_with_timeout(
                    lambda: peers.sign("abort", json.dumps(dataclasses.asdict(notice)))
                )
            run_with_timeout(lambda: peers.sign(f"gone/{peers.rank}", ""))
        if notice.code in EXPLANATION_FILE:
            run_with_timeout(self.conclude, EXPLAIN_SECONDS)
        if peers.count > 1 and peers.is_first:
            run_with_timeout(lambda: _await_others(peers), 2 * STEP_SECONDS)
        run_with_timeout(lambda: (sys.stdout.flush(), sys.stderr.flush()))
        os._exit(notice.code)


def _await_others(peers: Peers) -> None:
    """The first process keeps the signs: it goes last."""
    while sum(name.startswith("gone/") for name in peers.signs()) < peers.count:
        time.sleep(0.05)


def _write(text: str) -> None:
    """Past the locks of a stream that the stuck thread may hold."""
    for line in text.splitlines():
        os.write(2, printable(line).encode() + b"\n")
