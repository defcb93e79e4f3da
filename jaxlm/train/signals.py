"""Being told to stop."""

import os
import signal
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Turns SIGTERM and SIGINT into a flag that the loop reads between steps.

    The first asks for a save and an orderly end. The second ends the process at once, with 75 after a SIGTERM and 130
    after a SIGINT; what is committed stays committed.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return bool(self.reason)

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            os._exit(75 if number == signal.SIGTERM else 130)
        self.reason = signal.Signals(number).name
