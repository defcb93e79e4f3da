"""Engines that run the units of a job: processes of this machine, or a Ray cluster.

All write the same bytes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jaxlm.corpus import cluster, pool
from jaxlm.corpus.task import Opens

EngineName = Literal["processes", "ray"]
RunUnits = Callable[
    [MakeTask, Sequence[int]], Iterator[tuple[int, dict[str, float]]]
]  # see `pool.run_units`


@contextlib.contextmanager
def opened(name: EngineName, workers: int, say: Callable[[str], None]) -> Iterator[Each]:
    """Open an engine that runs at most `workers` units at a time.

    Raises:
      InputMissing: its package is not installed, or its cluster does not answer.
    """
    match name:
        case "processes":
            yield functools.partial(pool.each, workers=workers)
        case "ray":
            with cluster.connected(workers, say) as ray:
                yield functools.partial(cluster.each, workers=workers, ray=ray)
