"""Watchdog of the server: a tick of the engine that does not end fails /health, then the process.

A stuck device call cannot be canceled from Python, so the process ends, and its supervisor starts
another one.
"""

import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.errors import Stalled
from jaxlm.monitor.watchdog import dump_stacks
from jaxlm.serve.bridge import Bridge

LOOKS = 40  # in the time limit


def end_process(error: Stalled) -> None:
    """Print the stack of each thread and the error, and end the process with its exit code."""
    dump_stacks(None)
    with contextlib.suppress(OSError, ValueError):
        print(error, file=sys.stderr, flush=True)
    os._exit(error.code)


@contextlib.contextmanager
def watch(
    bridge: Bridge, seconds: float, workdir: Path, on_stall: Callable[[Stalled], None] = end_process
) -> Iterator[None]:
    """Watch the ticks of a bridge in a thread.

    After half of `seconds` in one tick the bridge `is_stuck`, after all of them `on_stall` is
    called, once. The time in which this process was suspended does not count.
    """
    interval, ending = seconds / LOOKS, threading.Event()

    def run() -> None:
        before, seen, since = bridge.tick_number, time.monotonic(), 0.0
        while not ending.wait(interval):
            number, now = bridge.tick_number, time.monotonic()
            is_same = bridge.is_ticking and number == before
            since = since + min(now - seen, 2 * interval) if is_same else 0.0
            before, seen = number, now
            bridge.is_stuck = since > seconds / 2
            if since > seconds:
                on_stall(
                    Stalled(
                        "a pass of the model has not ended",
                        where=f"--stall_seconds={seconds:g}",
                        why=f"the pass began {since:.0f} s ago; the stacks are above",
                        fix=f"jaxlm serve --workdir={shlex.quote(str(workdir))}",
                    )
                )
                return

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
