"""The data of a run, read as its objective reads it."""

import math
from collections.abc import Iterable

from jaxlm.core.errors import ConfigError
from jaxlm.core.spelling import nearest
from jaxlm.data import dataset
from jaxlm.data.config import HELD_OUT, DataConfig
from jaxlm.data.dataset import Data, Say
from jaxlm.monitor.progress import Progress
from jaxlm.objectives import corruption
from jaxlm.recipes.config import Run

MOST_HELD_OUT = 50  # percent that an error proposes


def open_data(
    run: Run,
    *,
    say: Say = lambda _: None,
    warn: Say = lambda _: None,
    progress: Progress = lambda what, done, total: None,
) -> Data:
    """Opens what the run names, see `dataset.open_data`.

    Raises:
      JaxlmError: where the data is missing, broken, empty, or lacks what the objective needs.
    """
    return dataset.open_data(
        run.data,
        seed=run.seed,
        reading=corruption.reading(run.objective, is_paired=run.is_paired),
        row_at=run.row_at,
        rows=run.rows,
        say=say,
        warn=warn,
        progress=progress,
    )


def check_held_out(config: DataConfig, data: Data) -> None:
    """Raise ConfigError if a set held out because data.validation is not set has no row of tokens."""
    if config.validation != (HELD_OUT,):
        return
    for name, loader in data.validation.items():
        found, row = loader.shards.manifest.tokens, config.sequence
        if found >= row:
            continue
        share = float(HELD_OUT.removeprefix("tail:").removesuffix("%"))
        enough = math.ceil(1.1 * share * row / found)
        larger = f"--config.data.validation=tail:{enough}%\n" if enough <= MOST_HELD_OUT else ""
        raise ConfigError(
            "too little text is held out for validation",
            where=f"data.validation = {HELD_OUT}",
            why=f"{name} has {found} tokens, and a row {row}",
            fix=f"{larger}'--config.data.validation=()'    # trains without validation",
        )


def followed(run: Run, names: Iterable[str]) -> str | None:
    """The validation set, of those there are, whose loss ranks checkpoints; None where there is none.

    Raises:
      ConfigError: where `eval.follow` names another.
    """
    known, wanted = list(names), run.eval.follow
    if wanted in known or (wanted == "auto" and not known):
        return wanted if known else None
    if wanted == "auto":
        return known[0]
    raise ConfigError(
        f"there is no validation set {wanted!r} to follow",
        where="eval.follow",
        why=f"there is {', '.join(known) or 'none'}",
        fix=f"--config.eval.follow={nearest(wanted, known) or nearest(wanted.partition('.')[0], known) or 'auto'}",
    )
