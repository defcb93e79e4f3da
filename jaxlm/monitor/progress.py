"""Progress of long reads and writes, as log lines."""

import threading
import time
from collections.abc import Callable

from jaxlm.monitor import formatting

SECONDS = 10.0  # between two lines

Progress = Callable[[str, int, int], None]  # name, bytes done, bytes in total


class Lines:
    """Prints bytes done, rate and time left, at most once in `seconds`; short work prints nothing.

    May be called from any thread.
    """

    def __init__(self, say: Callable[[str], None], doing: str = "", seconds: float | None = None):
        self._say, self._doing = say, doing
        self._seconds = SECONDS if seconds is None else seconds
        self._last = time.monotonic()
        self._begun: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            since, before = self._begun.setdefault(what, (now, done))
            if now - self._last < self._seconds or done >= total:
                return
            self._last = now
            line = f"{self._doing}{what}: {formatting.size(done)} of {formatting.size(total)}"
            if done > before:
                rate = (done - before) / (now - since)
                left = formatting.duration((total - done) / rate)
                line += f", {formatting.size(rate)} a second, {left} left"
            self._say(line)
