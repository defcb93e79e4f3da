"""Steps and batch of a run whose `train.epochs` limits the passes over its data.

Settings of the command line stay as they are. A run that resumes keeps the values that it began
with.

Example:
  >>> from jaxlm.training.epochs import fewer_steps
  >>> from jaxlm.training.config import TrainConfig
  >>> fewer_steps(TrainConfig(steps=500, batch=16, epochs=3), rows=20, unit=1, typed=())
  {'train.batch': 2, 'train.steps': 30}
"""

import math
from collections.abc import Collection
from typing import Any

from jaxlm.core.config import Loaded
from jaxlm.training.config import TrainConfig

NAMES = ("train.batch", "train.steps")
EPOCH_STEPS = 8  # steps of an epoch below which the batch becomes smaller


def fewer_steps(
    train: TrainConfig, *, rows: int, unit: int, typed: Collection[str]
) -> dict[str, Any]:
    """Return the batch and the steps with which `train.epochs` passes are not exceeded, by path.

    The batch becomes smaller, so that an epoch has `EPOCH_STEPS` steps, and then the run shorter.

    Args:
      train: the settings; without `epochs` the answer is empty.
      rows: rows of the training set.
      unit: rows that devices and micro-batches divide: a batch is a multiple of it.
      typed: settings of the command line, which stay.
    """
    if train.epochs is None:
        return {}
    batch, steps = train.batch, train.steps
    if "train.batch" not in typed and not train.batch_warmup:
        batch = min(batch, max(rows // EPOCH_STEPS // unit, 1) * unit)
    if "train.steps" not in typed:
        steps = min(steps, max(math.ceil(train.epochs * rows / batch), 1))
    return {"train.batch": batch, "train.steps": steps}


def typed_names(loaded: Loaded) -> list[str]:
    """Return those of the settings that the command line sets."""
    return [name for name in NAMES if loaded.provenance[name].kind == "command line"]


def limited_names(loaded: Loaded) -> list[str]:
    """Return those of the settings that `train.epochs` may change when a run begins."""
    typed = typed_names(loaded)
    return [] if loaded.value.train.epochs is None else [n for n in NAMES if n not in typed]


def explain(before: TrainConfig, after: TrainConfig, rows: int) -> str:
    """Return a line about a batch or a number of steps that `train.epochs` made smaller."""
    wide = "row" if rows == 1 else "rows"
    changes = [
        f"train.{name} = {new} in place of {old}"
        for name in ("batch", "steps")
        if (new := getattr(after, name)) != (old := getattr(before, name))
    ]
    return (
        f"train.epochs = {before.epochs:g}: the training set has {rows} {wide}, so "
        f"{' and '.join(changes)}; --config.train.steps=N and --config.train.batch=N set others"
    )


def explain_end(train: TrainConfig, rows: int) -> str:
    """Return a line about steps that make fewer or more passes than `train.epochs`; else "".

    Steps of the command line may make more. Rows are counted at the full batch, also in a run whose
    batch grows.
    """
    if train.epochs is None:
        return ""
    needed = math.ceil(train.epochs * rows / train.batch)
    if train.steps == needed:
        return ""
    passes = train.steps * train.batch / rows
    if train.steps > needed:
        return (
            f"train.steps = {train.steps} makes {passes:.2g} passes over {rows} rows, more than "
            f"train.epochs = {train.epochs:g}: the command line sets it"
        )
    return (
        f"train.steps = {train.steps} ends the run after {passes:.2g} of train.epochs = "
        f"{train.epochs:g} passes over {rows} rows; --config.train.steps={needed} makes all of them"
    )
