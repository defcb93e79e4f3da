"""A trace of a few steps."""

import os
from pathlib import Path

from jaxlm.monitor.config import ProfileConfig


class Trace:
    """Traces the steps `start` to `start + steps` of this process with jax.profiler.

    `before(step)` is called before each step with the number of completed ones. Read the result with
    `tensorboard --logdir` and its profile plugin, or xprof.
    """

    def __init__(self, config: ProfileConfig, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._window = range(config.start, config.start + config.steps)
        self._running = False

    def before(self, step: int) -> None:
        """Begins or ends the trace where it is time."""
        if self._running and step not in self._window:
            self.close()
        elif not self._running and step in self._window:
            import jax

            jax.profiler.start_trace(str(self.folder))
            self._running = True

    def close(self) -> None:
        """Ends a trace that is running."""
        if self._running:
            import jax

            jax.profiler.stop_trace()
            self._running = False
