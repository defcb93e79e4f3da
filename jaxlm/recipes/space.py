"""Whether the checkpoints of a run will fit on the disk."""

import math
import shutil

from jaxlm.core import tree
from jaxlm.core.errors import NotWritable
from jaxlm.monitor import words
from jaxlm.recipes.config import Run
from jaxlm.recipes.engine import Engine
from jaxlm.train.rundir import RunDir


def check(engine: Engine, committed: int, directory: RunDir) -> None:
    """Compares what the kept steps, and one more while it is written, will take with what is free.

    So many steps of the run are `committed` already. The arrays are counted as they are; compression saves a little of it.

    Raises:
      NotWritable: where they do not fit, with both numbers.
    """
    config = engine.run.checkpoint
    if config.space == "ignore":
        return
    one = tree.size_bytes(engine.shapes)
    way_back = 2  # healthy steps: one to rewind to, and one that will be
    kept = config.keep_last + config.keep_best + _rungs(engine.run) + way_back
    missing = max(kept + 1 - committed, 1)
    free = shutil.disk_usage(directory.path).free
    if missing * one > free:
        fewer = max(missing - (config.keep_last - 1), 1)
        fits = (
            "--config.checkpoint.keep_last=1\n"
            if config.keep_last > 1 and fewer * one <= free
            else ""
        )
        raise NotWritable(
            "the checkpoints of this run will not fit on the disk",
            where=str(directory.checkpoints),
            why=f"{missing} more of {words.size(one)} need {words.size(missing * one)}, and {words.size(free)} are free",
            fix=f"{fits}--config.checkpoint.space=ignore    # trains until the disk is full",
        )


def _rungs(run: Run) -> int:
    """Steps of the permanent ladder: the saved ones that are its multiples. Which a cadence in time saves, nobody knows."""
    every, saved = run.checkpoint.keep_every, run.checkpoint.every
    if every is None or saved.unit == "second":
        return 0
    apart = saved.steps(run.train.steps, run.pace)
    return run.train.steps // math.lcm(every, apart) if apart else 0
