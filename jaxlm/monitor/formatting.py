"""Human-readable numbers, sizes and durations, and progress lines."""

import math
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.core.callbacks import Log


def count(value: float | None, *, billion: str = "B") -> str:
    """Format a count: 1234567 -> "1.23M", 7e9 -> "7B"; None -> "-". FLOPs have G for `billion`."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    for scale, letter in ((1e12, "T"), (1e9, billion), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{_three(value / scale)}{letter}"
    return _three(value)


def size(amount: float | None) -> str:
    """Format bytes in binary units: 1610612736 -> "1.50 GiB"; None -> "-"."""
    if amount is None:
        return "-"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(amount) >= 1024**power:
            return f"{_three(amount / 1024**power)} {unit}"
    return f"{amount:.0f} B"


def duration(seconds: float | None) -> str:
    """Format seconds as "42us", "1.2ms", "4.2s", "42s", "3m05s", "1h02m", "3d04h", "1y97d", "-"."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if 0 < seconds < 0.995e-4:
        return f"{1e6 * seconds:.2g}us"
    if seconds < 0.0995:
        return f"{1e3 * seconds:.1f}ms" if seconds else "0s"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d{hours:02}h" if days < 365 else f"{days // 365:,}y{days % 365}d"


def number(value: float | None, digits: int = 4) -> str:
    """Format a loss or a rate with `digits` significant digits; None -> "-"."""
    return "-" if value is None else f"{value:.{digits}g}"


def _three(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def evaluation_suffix(evaluation: Mapping[str, Any], newest: int) -> str:
    """Return ", after step 100, on 16% of the set" for one before `newest`, of a part; or ""."""
    step, share = evaluation.get("step", newest), evaluation.get("share")
    parts = [f"after step {step}"] if step != newest else []
    if share is not None and share < 1:
        parts.append(f"on {share:.1%} of the set")
    return "".join(f", {part}" for part in parts)


def wrapped(text: str, width: int, indent: int) -> str:
    """Wrap lines at words, with the rest of a line indented; lines with flags remain whole."""

    def parts(line: str) -> list[str]:
        if len(line) <= width or " --" in line or width < 2 * indent:
            return [line]
        start = len(line) - len(line.lstrip())
        words = textwrap.TextWrapper(
            width=width,
            initial_indent=line[:start],
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        return words.wrap(line[start:]) or [line]

    return "\n".join(part for line in text.split("\n") for part in parts(line))


PROGRESS_SECONDS = 10.0  # between two lines


class ProgressLines:
    """Prints what is done, rate and time left, from any thread, at most once in `seconds`.

    `shown` formats what is done, and what is done in a second: bytes by default.
    """

    def __init__(
        self,
        say: Log,
        doing: str = "",
        seconds: float | None = None,
        shown: Callable[[float], str] = size,
    ):
        self._say, self._doing, self._shown = say, doing, shown
        self._seconds = PROGRESS_SECONDS if seconds is None else seconds
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
            line = f"{self._doing}{what}: {self._shown(done)} of {self._shown(total)}"
            if done > before:
                rate = (done - before) / (now - since)
                line += f", {self._shown(rate)} a second, {duration((total - done) / rate)} left"
            self._say(line)
