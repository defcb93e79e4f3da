"""Numbers and plot of a run's learning-rate schedule, without training. Free of JAX."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import cannot_write
from jaxlm.monitor import plots, sinks
from jaxlm.optim.schedule_config import lr_factor, with_swa_cycles
from jaxlm.recipes.config import Run

MAX_POINTS = 1000  # points of a curve


def draw(run: Run, target: Path) -> dict[str, Any]:
    """Plot the learning rate by update, at most 1,000 points with the last. Raises NotWritable."""
    steps = np.unique(np.linspace(1, run.train.steps, MAX_POINTS).round().astype(int))
    length: dict[str, Any] = {"total": run.train.steps, "tokens_per_step": run.pace, "xp": np}
    factor = with_swa_cycles(run.average, lr_factor(run.schedule, **length), **length)
    rates = run.optim.lr * factor(steps - 1.0)
    points = list(zip(steps.tolist(), rates.tolist(), strict=True))
    make_folder(target.parent, "the plot", fix="--out=learning_rate.png")
    sinks.replace(target, plots.learning_rate_png(points))
    return {
        "plot": str(target),
        "schedule": run.schedule.name,
        "points": [{"step": step, "learning_rate": value} for step, value in points],
    }


def make_folder(folder: Path, what: str, *, fix: str) -> None:
    """Create the folder of `--out` before any time is spent. Raises NotWritable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise cannot_write(what, f"--out={folder}", error, fix=fix) from error
