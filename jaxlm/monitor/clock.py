"""How fast it goes."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Counts the seconds of steps apart from those of pauses, such as evaluations and saves.

    Model FLOPs utilisation is `flops_per_step / step_seconds / peak_flops`. By the convention of
    `models.cost.flops_per_token(causal=True)`, the FLOPs of a token are 6 x (parameters that multiply), plus attention
    at the causal half; `flops_per_step_full`, from `causal=False`, gives `mfu_full_attention` beside it. Work done
    twice, as by remat, does not count.

    Args:
      start: completed steps when the clock begins.
      steps: completed steps at the end of the run.
      flops_per_step: model FLOPs of the global batch.
      peak_flops: of all devices together, from `chips.peak_flops`; None where unknown.
      now: a monotonic clock.
    """

    def __init__(
        self,
        *,
        start: int,
        steps: int,
        flops_per_step: float,
        flops_per_step_full: float,
        peak_flops: float | None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._now, self._steps, self._start = now, steps, start
        self._flops, self._flops_full, self._peak = flops_per_step, flops_per_step_full, peak_flops
        self._begun = self._lap_begun = self._done_at = now()
        self._paused = 0.0
        self._pauses: list[tuple[str, float, float]] = []  # (kind, begin, end), not read yet
        self._lap_step = start
        self._lap_tokens = self._lap_wait = 0.0
        self._lap_work: list[tuple[float, ...]] = []

    def add(
        self,
        *,
        tokens: float,
        data_wait_seconds: float,
        at: float | None = None,
        work: tuple[float, ...] = (1.0, 1.0),
    ) -> None:
        """Counts one completed step: the tokens that it trained on, and how long it waited for its batch.

        `at` is the time by `now` at which it was complete; None is this moment. `work` is its model FLOPs over those of
        the global batch, by both conventions: less, where its batch is smaller.
        """
        self._done_at = self._now() if at is None else at
        self._lap_work.append(work)
        self._lap_tokens += tokens
        self._lap_wait += data_wait_seconds

    @contextlib.contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Time in here is no part of a step. No step may be under way on the devices when it begins.

        `kind` names what interrupts the steps, such as "eval".
        """
        begun = self._now()
        try:
            yield
        finally:
            self._pauses.append((kind, begun, self._now()))

    def read(self, step: int) -> dict[str, float | None]:
        """Return the speed of the steps since the last reading, and of the run so far.

        The names are those of metrics.jsonl. An interval begins and ends when a step is complete:
        that of the last reading, or the start of the clock, and the last step that was added. Its
        seconds are those of the steps, step_seconds times their number, and `pause_seconds`, also
        by kind as `pause_seconds/KIND`. The sum over all readings is `elapsed_seconds`. A pause
        after the last step belongs to the next interval.

        `goodput` is the share of `elapsed_seconds` that steps took. `left_seconds` goes by the whole
        time, so it includes the evaluations to come.
        """
        begin, end = self._lap_begun, self._done_at
        kinds: dict[str, float] = {}
        for kind, low, high in self._pauses:
            if (inside := min(high, end) - max(low, begin)) > 0:
                kinds[kind] = kinds.get(kind, 0.0) + inside
        self._pauses = [pause for pause in self._pauses if pause[2] > end]
        paused = sum(kinds.values())
        self._paused += paused
        steps = step - self._lap_step
        lap = end - begin - paused
        elapsed = end - self._begun
        done = step - self._start
        rate = steps / lap if steps and lap > 0 else None
        work = [sum(each) / len(each) for each in zip(*self._lap_work, strict=True)] or [1.0, 1.0]
        flops, flops_full = self._flops * work[0], self._flops_full * work[1]
        reading: dict[str, float | None] = {
            "step_seconds": lap / steps if steps else None,
            "data_wait_seconds": self._lap_wait / steps if steps else None,
            "tokens_per_second": self._lap_tokens / lap if steps and lap > 0 else None,
            "flops_per_second": rate and rate * flops,
            "mfu": rate and self._peak and rate * flops / self._peak,
            "mfu_full_attention": rate and self._peak and rate * flops_full / self._peak,
            "pause_seconds": paused,
            **{f"pause_seconds/{kind}": seconds for kind, seconds in kinds.items()},
            "goodput": (elapsed - self._paused) / elapsed if elapsed > 0 else None,
            "elapsed_seconds": elapsed,
            "left_seconds": elapsed / done * (self._steps - step) if done else None,
        }
        self._lap_begun, self._lap_step = end, step
        self._lap_tokens = self._lap_wait = 0.0
        self._lap_work = []
        return reading
