"""Profiler trace of a few steps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.monitor.config import ProfileConfig
from jaxlm.monitor.traced import MARK


class Trace:
    """Traces the steps of the config's window in this process with jax.profiler.

    `before(step)` must be called before each step with the number of completed steps. Read the
    result with `tensorboard --logdir` and its profile plugin, or xprof.

    Args:
      config: the window.
      folder: output folder.
      written: called once the trace is on the disk.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: str | os.PathLike[str],
        written: Callable[[], object] = lambda: None,
    ):
        self.folder = Path(folder)
        self._window = config.window
        self._written = written
        self._running = False
        self._mark: Any = None

    def is_due(self, step: int) -> bool:
        """Return True if the trace begins or ends before this step."""
        return self._running != (step in self._window)

    def before(self, step: int) -> None:
        """Begin or end the trace if due, with idle devices, so that it contains whole steps."""
        if not self.is_due(step):
            return
        import jax

        jax.block_until_ready(jax.live_arrays())
        if self._running:
            self.close()
            return
        # Tracing Python's calls, thousands a step, slows steps and crowds out operations.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._running = True

    def enter(self, phase: str) -> None:
        """Annotate the following phase of the loop in the trace: "data" or "step"."""
        self._unmark()
        if self._running:
            import jax

            self._mark = jax.profiler.TraceAnnotation(f"{MARK}{phase}")
            self._mark.__enter__()

    def close(self) -> None:
        """End a running trace."""
        self._unmark()
        if self._running:
            import jax

            jax.profiler.stop_trace()
            self._running = False
            self._written()

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
