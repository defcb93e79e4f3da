"""Engines that run the units of a job: processes of this machine, or a Ray cluster.

All write the same bytes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jaxlm.corpus import cluster, pool
from jaxlm.corpus.task import MakeTask

EngineName = Literal["processes", "ray"]
RunUnits = Callable[
    [MakeTask, Sequence[int]], Iterator[tuple[int, dict[str, float]]]
]  # see `pool.run_units`


@contextlib.contextmanager
def opened(name: EngineName, workers: int, log: Callable[[str], None]) -> Iterator[RunUnits]:
    """Open an engine that runs at most `workers` units at a time.

    Raises:
      InputMissing: its package is not installed, or its cluster does not answer.
    """
    match name:
        case "processes":
            yield functools.partial(pool.run_units, workers=workers)
        case "ray":
            with cluster.connected(workers, log) as ray:
                yield functools.partial(cluster.run_units, workers=workers, ray=ray)
