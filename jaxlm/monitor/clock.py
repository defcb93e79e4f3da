"""Training speed: step time, throughput, MFU and goodput."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Measures the time of steps, apart from pauses such as evaluations and saves.

    Model FLOPs utilization is `flops_per_step / step_seconds / peak_flops`. By the convention of
    `models.cost.flops_per_token(causal=True)`, the FLOPs of a token are 6 x (parameters that
    multiply), plus attention at the causal half; `flops_per_step_full`, from `causal=False`, gives
    `mfu_full_attention` as well. Recomputation, such as remat, does not count.

    Args:
      start, steps: completed steps when the clock starts, and at the end of the run.
      flops_per_step, flops_per_step_full: model FLOPs of the global batch.
      peak_flops: of all devices together, from `chips.peak_flops`; None if unknown.
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
        self._begun = self._done_at = now()
        self._paused = 0.0
        self._pauses: list[tuple[str, float, float]] = []  # (kind, begin, end), not yet read
        self._start_lap(self._begun, start)

    def _start_lap(self, begun: float, step: int) -> None:
        self._lap_begun, self._lap_step = begun, step
        self._lap_tokens = self._lap_wait = self._lap_trained = 0.0
        self._lap_work: list[tuple[float, ...]] = []

    def add(
        self,
        *,
        tokens: float,
        data_wait_seconds: float,
        begun_at: float | None = None,
        completed_at: float | None = None,
        work: tuple[float, ...] = (1.0, 1.0),
    ) -> None:
        """Count one completed step.

        Args:
          tokens: those it read.
          data_wait_seconds: its wait for the batch.
          begun_at: when it was dispatched, by the clock `now`; by default with the end of the step
            before.
          completed_at: by default this moment.
          work: model FLOPs over those of the global batch, by both conventions; below 1 if the
            batch of the step is smaller or has padding.
        """
        before, self._done_at = self._done_at, self._now() if completed_at is None else completed_at
        self._lap_trained += self._done_at - max(before, begun_at or before)
        self._lap_work.append(work)
        self._lap_tokens += tokens
        self._lap_wait += data_wait_seconds

    @contextlib.contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Exclude the context, such as an "eval", from steps; no step may run when it begins."""
        begun = self._now()
        try:
            yield
        finally:
            self._pauses.append((kind, begun, self._now()))

    def read(self, step: int) -> dict[str, float | None]:
        """Return the speed of the steps since the last reading, and of the run so far.

        The names are those of metrics.jsonl. An interval lasts from the completion of the last step
        of the previous reading (or the clock's start) to that of the last step added. Its seconds
        are `step_seconds` times the number of steps, plus `pause_seconds`, also given by kind as
        `pause_seconds/KIND`; over all readings they add up to `elapsed_seconds`. A pause after the
        last step belongs to the next interval. `train_seconds` is the time of a step from its
        dispatch, or from the end of the step before if that is later. `goodput` is the share of
        `elapsed_seconds` spent in steps. `left_seconds` extrapolates all elapsed time, with
        evaluations.
        """
        begin, end = self._lap_begun, self._done_at
        kinds: dict[str, float] = {}
        for kind, low, high in self._pauses:
            if (inside := min(high, end) - max(low, begin)) > 0:
                kinds[kind] = kinds.get(kind, 0.0) + inside
        self._pauses = [pause for pause in self._pauses if pause[2] > end]
        paused = sum(kinds.values())
        self._paused += paused
        steps, done = step - self._lap_step, step - self._start
        lap, elapsed = end - begin - paused, end - self._begun
        rate = steps / lap if steps and lap > 0 else None
        work = [sum(each) / len(each) for each in zip(*self._lap_work, strict=True)] or [1.0, 1.0]
        flops, flops_full = self._flops * work[0], self._flops_full * work[1]
        reading: dict[str, float | None] = {
            "step_seconds": lap / steps if steps else None,
            "data_wait_seconds": self._lap_wait / steps if steps else None,
            "train_seconds": self._lap_trained / steps if steps else None,
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
        self._start_lap(end, step)
        return reading
