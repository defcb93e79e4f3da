"""Log-likelihoods of requests, packed into rows whose shape and contents depend on the task alone.

A device computes rows of one shape in every pass. More devices compute more such parts at once, so
the same part has the same bits on one device and on several.

Example:
  >>> packed([5, 3, 4, 2], 8)
  [[0, 1], [2, 3]]
"""

import bisect
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from jaxlm.core import tree
from jaxlm.data.batch import Tokens
from jaxlm.evals.tasks.requests import Request
from jaxlm.models.build import Model
from jaxlm.objectives.loss import score
from jaxlm.parallel import host, rules

PASS_TOKENS = 2**12  # slots of a device in a pass
CHUNK = 2**10  # tokens of a device whose logits exist at a time
MIN_SLOTS = 256  # of a row, if the context is as long
SLOT_MULTIPLE = 128
BLOCK_TOKENS = 16 * PASS_TOKENS  # of requests that are scored and stored together


def row_slots(longest: int, limit: int, mesh: Mesh) -> int:
    """Return the slots of a row for requests that read at most `longest` tokens.

    `limit` is the length of rows that the model reads; a row that devices share has this length.
    """
    if rules.split(mesh, "length") > 1:
        return limit
    return min(limit, max(MIN_SLOTS, math.ceil(longest / SLOT_MULTIPLE) * SLOT_MULTIPLE))


def packed(lengths: Sequence[int], slots: int) -> list[list[int]]:
    """Return the indices of requests in each row: the longest first, each in the fullest row."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of each row with room, its free slots and its number
    for index in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[index]
        place = bisect.bisect_left(free, (length, -1))
        room, row = free.pop(place) if place < len(free) else (slots, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room > length:
            bisect.insort(free, (room - length, row))
    return rows


def batch_of(requests: Sequence[Request], rows: Sequence[Sequence[int]], shape: Any) -> Tokens:
    """Return the arrays of packed rows, on the host.

    Args:
      requests: the requests.
      rows: indices of the requests of each row, as `packed` returns them.
      shape: number of rows, slots, and id of padding.
    """
    count, slots, pad = shape
    tokens, targets = np.full((2, count, slots), pad, np.int32)
    segments, positions = np.zeros((2, count, slots), np.int32)
    weights = np.zeros((count, slots), np.float32)
    for row, indices in enumerate(rows):
        at = 0
        for segment, index in enumerate(indices, 1):
            ids, begin, _ = requests[index]
            part = slice(at, at + len(ids) - 1)
            tokens[row, part], targets[row, part] = ids[:-1], ids[1:]
            segments[row, part], positions[row, part] = segment, np.arange(len(ids) - 1)
            weights[row, at + begin - 1 : part.stop] = 1
            at = part.stop
    arrays: Any = (tokens, targets, weights, segments, positions)  # NumPy until they are placed
    return Tokens(*arrays)


class Scorer:
    """Negative log-likelihoods of requests by a model, in nats.

    Use it under the mesh.

    Args:
      merge: makes the model of its parameters.
      mesh: mesh of the parameters.
      slots: slots of a row.
      pad: id of padding.
    """

    def __init__(self, merge: Callable[[Any], Model], mesh: Mesh, slots: int, pad: int):
        self._mesh, self._slots, self._pad = mesh, slots, pad
        self._ways = rules.split(mesh, "batch")
        self._rows = max(1, PASS_TOKENS // slots)
        chunk = min(CHUNK, self._rows * slots) * self._ways

        def step(params: Any, batch: Tokens) -> Float[Array, "B T"]:
            scores, _ = score(merge(params), batch, None, chunk)
            return jnp.where(batch.weights > 0, scores.nll, 0.0)

        self._step = jax.jit(step)

    def nats(self, params: Any, requests: Sequence[Request]) -> list[float]:
        """Return -log p of the scored ids of each request; equal requests are computed once."""
        unique = list(dict.fromkeys(requests))
        rows = packed([len(each.ids) - 1 for each in unique], self._slots)
        count = self._rows * self._ways
        local = host.host_rows(self._mesh, count)
        put = functools.partial(host.put, self._mesh)
        nats: dict[Request, float] = {}
        pending: tuple[Sequence[Sequence[int]], Array] | None = None
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            batch = batch_of(unique, part, (count, self._slots, self._pad))
            mine = jax.tree.map(lambda each: each[local], batch)
            scored = self._step(params, put(mine))
            if pending is not None:
                nats |= _sums(unique, *pending)
            pending = part, scored
        if pending is not None:
            nats |= _sums(unique, *pending)
        return [nats[each] for each in requests]


def _sums(
    requests: Sequence[Request], rows: Sequence[Sequence[int]], scored: Array
) -> dict[Request, float]:
    """Return the sum of each request of a pass, in float64."""
    nll = np.asarray(host.fetch(scored), np.float64)
    sums = {}
    for row, indices in enumerate(rows):
        at = 0
        for index in indices:
            end = at + len(requests[index].ids) - 1
            sums[requests[index]] = float(nll[row, at:end].sum())
            at = end
    return sums


def weights_digest(params: Any) -> str:
    """Return a digest of parameters, the same for every sharding, computed on the devices."""
    facts = [
        [path, str(leaf.dtype), list(leaf.shape), *map(int, host.fetch(_checksums(leaf)))]
        for path, leaf in sorted(tree.leaves(params).items())
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@jax.jit
def _checksums(leaf: Array) -> tuple[Array, Array]:
    """Return two sums over hashes of value and place; integers add up in any order."""
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    size = leaf.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(leaf, kinds[size]).astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, length in enumerate(leaf.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        place = place * jnp.uint32(length) + index

    def total(seed: int) -> Array:
        mixed = (bits ^ jnp.uint32(seed)) * jnp.uint32(0x9E3779B1) + place
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
        return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)

    return total(0), total(0x5BD1E995)
