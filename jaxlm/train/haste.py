"""What a process that ends still tries: it may hang or fail, and must not hold up the end."""

import contextlib
import threading
from collections.abc import Callable

STEP_SECONDS = 0.6  # for each thing that is done on the way out; a disk or a peer may not answer


def within(act: Callable[[], object], seconds: float = STEP_SECONDS) -> None:
    """Does something that may hang or fail, and goes on without it then."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            act()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
