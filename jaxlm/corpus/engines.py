"""What does the units of a job: processes of this machine, or the machines of a cluster. The bytes are the same."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jaxlm.corpus import cluster, pool
from jaxlm.corpus.task import Opens

EngineName = Literal["processes", "ray"]
Each = Callable[[Opens, Sequence[int]], Iterator[tuple[int, dict[str, float]]]]  # as `pool.each`


@contextlib.contextmanager
def opened(name: EngineName, workers: int, say: Callable[[str], None]) -> Iterator[Each]:
    """An engine that does at most `workers` units at a time.

    Raises:
      InputMissing: where its package or its cluster is not there.
    """
    match name:
        case "processes":
            yield functools.partial(pool.each, workers=workers)
        case "ray":
            with cluster.connected(workers, say) as ray:
                yield functools.partial(cluster.each, workers=workers, ray=ray)
