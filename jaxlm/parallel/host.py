"""Global arrays from the rows that each host reads."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jaxlm.core.errors import ConfigError
from jaxlm.parallel import rules


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How a [rows, length] array lies on the mesh."""
    return NamedSharding(mesh, rules.spec(("batch", "length")))


def check_rows(mesh: Mesh, batch: int, microbatches: int) -> None:
    """Raises ConfigError where the rows of a micro-batch cannot be dealt out evenly."""
    ways = rules.split(mesh, "batch")
    if batch % (ways * microbatches) == 0:
        return
    unit = ways * microbatches
    below, above = batch // unit * unit, -(-batch // unit) * unit
    parts = f" x {microbatches} micro-batches" if microbatches > 1 else ""
    raise ConfigError(
        f"a batch of {batch} rows does not divide over {ways} devices{parts}",
        where="train.batch",
        why=f"mesh data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}{parts} needs a multiple of {unit}",
        fix="\n".join(
            f"--config.train.batch={size}" for size in dict.fromkeys((below, above)) if size
        ),
    )


def host_rows(mesh: Mesh, batch: int) -> slice:
    """The rows of the global batch that this process's devices hold; one contiguous run, as `data` is outermost."""
    held = batch_sharding(mesh).addressable_devices_indices_map((batch, 1)).values()
    starts, stops = zip(
        *(index[0].indices(batch)[:2] for index in held if index is not None), strict=True
    )
    return slice(min(starts), max(stops))


def fetch(tree: Any) -> Any:
    """A tree of global arrays as NumPy arrays, whole on every host."""
    return multihost_utils.process_allgather(tree, tiled=True)


def put(mesh: Mesh, rows: Any) -> Any:
    """A tree of this host's [rows, length] arrays as global arrays on the mesh."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), rows
    )
