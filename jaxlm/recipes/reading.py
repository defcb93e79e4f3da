"""The data of a run, read as its objective reads it."""

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
        reading=corruption.reading(run.objective),
        say=say,
        warn=warn,
        progress=progress,
    )
