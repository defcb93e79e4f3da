"""Limits of time that hold on a slower machine and on one that runs other programs."""

import os
import time

SQUARED = 20_000_000  # numbers whose squares the machine that the limits were set on adds in 1 s


class TooSlow(AssertionError):
    """A limit of time was missed.

    pytest runs such a test again, up to twice, and lists it under RERUN (pyproject.toml): a pause
    of the machine or of the garbage collector does not repeat, a slow program does.
    """


def slowness() -> float:
    """Ratio of the time of a piece of Python here to that where the limits were set, at least 1.

    Processor time, the best of three measurements: other programs do not count.
    """
    taken = []
    for _ in range(3):
        begun = time.process_time()
        sum(number * number for number in range(SQUARED // 10))
        taken.append(time.process_time() - begun)
    return max(1.0, 10 * min(taken))


def shared() -> float:
    """Ratio of the clock here to that with two cores for one test alone, at least 1."""
    cores = os.cpu_count() or 1
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1.0, os.getloadavg()[0] / cores, 2 * workers / cores)


def require_processor(seconds: float, limit: float, what: str = "it") -> None:
    """Raise TooSlow if seconds of the processor are over a limit, which grows with slowness()."""
    _require(seconds, limit, slowness, f"{what} took {seconds:.2f} s of the processor")


def require_clock(seconds: float, limit: float, what: str = "it") -> None:
    """Raise TooSlow if seconds of the clock exceed a limit.

    The limit grows with slowness() and shared().
    """
    _require(seconds, limit, lambda: shared() * slowness(), f"{what} took {seconds:.2f} s")


def _require(seconds, limit, factor, measured) -> None:
    if seconds > limit and seconds > (allowed := limit * factor()):
        raise TooSlow(f"{measured}, {allowed:.2f} are allowed here ({limit:g} on an idle machine)")
