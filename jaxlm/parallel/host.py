"""Global arrays from data that each host reads: rows of a batch, parts of a parameter."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxlm.core.errors import ConfigError
from jaxlm.parallel import rules
from jaxlm.parallel.config import format_mesh


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a [rows, length] array."""
    return NamedSharding(mesh, rules.spec(("batch", "length")))


def check_rows(mesh: Mesh, batch: int, microbatches: int = 1) -> None:
    """Raise ConfigError if the rows of a micro-batch do not divide; the fix keeps the batch."""
    ways = rules.split(mesh, "batch")
    unit = ways * microbatches
    if batch % unit == 0:
        return
    fewer = mesh.size // ways * math.gcd(ways, batch // microbatches)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    parts = f" x {microbatches} micro-batches" if microbatches > 1 else ""
    what = f"a batch of {batch} rows does not divide over {ways} devices{parts}"
    why = f"mesh {format_mesh(mesh.shape)}{parts} needs a multiple of {unit}"
    fix = f"--cpu_devices={fewer}" if on_cpu else f"run it on {fewer} devices"
    raise ConfigError(what, where="train.batch", why=why, fix=fix)


def host_rows(mesh: Mesh, batch: int, devices: Collection[jax.Device] | None = None) -> slice:
    """Return the contiguous rows of the global batch that `devices` (this process's) hold.

    Processes that split a row over `context`, or hold copies of it, read the same rows.
    """
    sharding = batch_sharding(mesh)
    devices = sharding.addressable_devices if devices is None else devices
    indices = sharding.devices_indices_map((batch, rules.split(mesh, "length")))
    bounds = (indices[device][0].indices(batch)[:2] for device in devices)
    starts, stops = zip(*bounds, strict=True)
    return slice(min(starts), max(stops))


def fetch(tree: Any) -> Any:
    """Return a tree of global arrays as NumPy arrays, whole on every host."""
    return multihost_utils.process_allgather(tree, tiled=True)


def put(mesh: Mesh, rows: Any) -> Any:
    """Return a tree of arrays of the rows `host_rows`, whole, as global arrays on the mesh."""
    sharding = batch_sharding(mesh)
    ways = rules.split(mesh, "batch")
    local = host_rows(mesh, ways)

    def place(x: Any) -> jax.Array:
        x = np.asarray(x)
        size = len(x) // (local.stop - local.start)
        cut = functools.partial(part, x, first=local.start * size)
        return jax.make_array_from_callback((ways * size, *x.shape[1:]), sharding, cut)

    return jax.tree.map(place, rows)


def by_parts(
    shape: tuple[int, ...], sharding: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Return a global array while only one part of it is on the host at a time.

    `read` returns the part at a slice of each dimension, once for all devices that hold it.
    `jax.make_array_from_callback` reads the parts of all devices of this process before it places
    the first: together those of eight devices are a whole leaf.
    """
    devices = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        cuts = zip(index or (), shape, strict=True)
        devices[tuple(cut.indices(size)[:2] for cut, size in cuts)].append(device)
    placed: list[jax.Array] = []
    for bounds, holders in devices.items():
        values = read(tuple(slice(*each) for each in bounds))
        placed += jax.block_until_ready([jax.device_put(values, device) for device in holders])
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def part(rows: np.ndarray, index: tuple[slice, ...] | None, first: int) -> np.ndarray:
    """Return the part at `index` of the global array, from `rows` that begin with row `first`."""
    assert index is not None
    start, stop, _ = index[0].indices(first + len(rows))
    return rows[start - first : stop - first, *index[1:]]
