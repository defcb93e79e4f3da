"""How fast it goes."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Counts the seconds of steps apart from those of evaluations and saves.

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
        self._begun = self._lap_begun = now()
        self._paused = self._lap_paused = 0.0
        self._lap_step = start
        self._lap_tokens = self._lap_wait = 0.0
        self._lap_work: list[tuple[float, ...]] = []

    def add(
        self, *, tokens: float, data_wait_seconds: float, work: tuple[float, ...] = (1.0, 1.0)
    ) -> None:
        """Counts one completed step: the tokens that it trained on, and how long it waited for its batch.

        `work` is its model FLOPs over those of the global batch, by both conventions: less, where its batch is smaller.
        """
        self._lap_work.append(work)
        self._lap_tokens += tokens
        self._lap_wait += data_wait_seconds

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is no part of a step."""
        begun = self._now()
        try:
            yield
        finally:
            self._paused += self._now() - begun

    def read(self, step: int) -> dict[str, float | None]:
        """The mean step since the last reading, and the whole run so far, under the names of metrics.jsonl.

        `goodput` is the share of the time since the start that steps took; evaluation and saving are the rest.
        `left_seconds` goes by that whole time, so it foresees the evaluations to come.
        """
        now = self._now()
        steps = step - self._lap_step
        lap = now - self._lap_begun - (self._paused - self._lap_paused)
        elapsed = now - self._begun
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
            "goodput": (elapsed - self._paused) / elapsed if elapsed > 0 else None,
            "elapsed_seconds": elapsed,
            "left_seconds": elapsed / done * (self._steps - step) if done else None,
        }
        self._lap_begun, self._lap_paused, self._lap_step = now, self._paused, step
        self._lap_tokens = self._lap_wait = 0.0
        self._lap_work = []
        return reading
