"""Verification of checkpoints by all processes of a run; each hashes a part of the files.

The first process decides which step is verified and what follows from the result. The others wait
for a step, hash their part, send its problems, and wait for the next step, until the first process
sends its decision.
"""

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.record import FileDigests, Place
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.monitor.formatting import ProgressLines
from jaxlm.parallel.peers import Peers

# Timeout of a wait for another process. `watch.verify` ends a stalled wait much earlier, but not
# while any process still reads.
WAIT_SECONDS = 30 * 24 * 3600


class Verifier:
    """Compares size and sha256 of a step's files with its record.

    `peers` are the processes that share the work, by default this process alone. `phase` is a
    context manager entered while `decide` runs, and `moved` is called from any thread whenever
    bytes were read. If hashing takes long, `say` prints lines of progress.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        *,
        phase: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        moved: Callable[[], None] = lambda: None,
        say: Log = lambda text: None,
    ):
        self._peers = peers or Peers()
        self._phase, self.moved, self._say = phase, moved, say

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Return the result of `choose`, called by the first process, on all processes, as JSON.

        In `choose` every call of `problems` is shared by all processes. Every process must call
        `decide` equally often.
        """
        with self._phase():
            if self._peers.is_first:
                return self._share({"answer": choose()})["answer"]
            while "answer" not in (order := self._share(None)):
                directory = records.place(order["verify"])
                self._peers.gather("verified", self._part(directory), WAIT_SECONDS)
            return order["answer"]

    def problems(self, directory: Place) -> list[str]:
        """Return the problems of a step, one line each; empty if every byte is as written.

        In a run of several processes only the first may call it, inside `decide`. Raises DataError
        if the record itself is missing or damaged.
        """
        files = records.read(directory).files
        self._share({"verify": str(directory)})
        parts = self._peers.gather("verified", self._part(directory), WAIT_SECONDS)
        wrong = {path: line for part in parts for path, line in part.items()}
        return [wrong[path] for path in (records.NAME, *files) if path in wrong]

    def _share(self, order: Any) -> Any:
        return self._peers.share("verification", order, WAIT_SECONDS)

    def _part(self, directory: Place) -> dict[str, str]:
        """Return the problems of this process's part of a step, by path."""
        peers = self._peers
        try:
            files = records.read(directory).files
        except DataError as error:  # the first process could read it
            return {records.NAME: f"process {peers.rank} cannot read it: {error.why}"}
        part = records.divide_files(files, peers.count)[peers.rank]
        expected = {path: files[path] for path in part}
        return records.problems(directory, expected, self._progress(directory, expected))

    def _progress(self, directory: Place, expected: FileDigests) -> Callable[[int], None]:
        """Return a function that counts bytes read and prints progress."""
        total, count = sum(size for size, _ in expected.values()), self._peers.count
        what = f"verifying checkpoint {directory.name}"
        if count > 1:
            what += f", part {self._peers.rank + 1} of {count}"
        lines, lock, read = ProgressLines(self._say), threading.Lock(), 0

        def moved(size: int) -> None:
            nonlocal read
            with lock:
                read += size
                now = read
            self.moved()
            lines(what, now, total)

        moved(0)
        return moved
