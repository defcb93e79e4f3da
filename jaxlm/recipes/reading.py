"""The data of a run, read as its objective reads it."""

from collections.abc import Iterable

from jaxlm.core.errors import ConfigError
from jaxlm.core.spelling import nearest
from jaxlm.data import dataset
from jaxlm.data.dataset import Data, Progress, Say
from jaxlm.objectives import corruption
from jaxlm.recipes.config import Run


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
