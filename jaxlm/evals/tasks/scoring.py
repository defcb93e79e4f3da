"""Log-likelihoods of requests, in rows whose shape and contents depend on the task alone.

A device computes rows one at a time in a program of their shape. So the bits of a row do
not depend on the number of rows of a pass, or on that of devices.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import dynamic_index_in_dim as dynamic_index
from jax.lax import dynamic_update_index_in_dim as dynamic_update
from jax.sharding import Mesh
from jaxtyping import Float

from jaxlm.core import tree
from jaxlm.evals.tasks import packing
from jaxlm.evals.tasks.packing import Batch, PrefixGroup, RowShape
from jaxlm.evals.tasks.requests import ScoringRequest
from jaxlm.models.build import Model
from jaxlm.objectives.loss import logits_function, read_sharded
from jaxlm.ops.cross_entropy import in_chunks, token_scores
from jaxlm.parallel import context, host, rules

PASS_TOKENS = 2**12  # slots of a device in a pass without a batch size
CHUNK = 2**10  # tokens of a device whose logits exist at a time
BLOCK_TOKENS = 16 * PASS_TOKENS  # of requests that are scored and stored together


class Scorer:
    """Negative log-likelihoods of requests by a model, in nats.

    One object scores all tasks: a program is compiled for each shape of rows. Use it under the
    mesh.

    Args:
      merge: makes the model of its parameters.
      mesh: mesh of the parameters.
      pad: id of padding.
      is_shared: requests of an item share the ids that they begin with.
      batch: rows of a pass, rounded up to whole rows of each device; None for those of
        `PASS_TOKENS`. Scores do not depend on it.
    """

    def __init__(
        self,
        merge: Callable[[Any], Model],
        mesh: Mesh,
        pad: int,
        *,
        is_shared: bool,
        batch: int | None = None,
    ):
        self._mesh, self._pad, self._is_shared, self._batch = mesh, pad, is_shared, batch
        self._ways = ways = rules.split(mesh, "batch")

        def step(params: Any, batch: Batch, used: Array) -> Float[Array, "B C"]:
            """Return the scores of the first `used` rows of each device."""
            model = merge(params)
            logits_of = logits_function(model)
            by_device = jax.tree.map(lambda x: x.reshape(ways, -1, *x.shape[1:]), batch)

            def of_targets(values: Array, ids: Array) -> Array:
                return token_scores(logits_of(values), ids).nll

            def score_row(number: Array, scores: Array) -> Array:
                row = jax.tree.map(lambda x: dynamic_index(x, number, 1, keepdims=False), by_device)
                _, hidden, parts = read_sharded(model, row.read, None)
                values = context.zigzag_unshard(hidden.values, parts)
                # Of the scored slots alone: most slots are those of contexts.
                values = jax.vmap(lambda each, slots: each[slots])(values, row.slots)
                values = rules.constrain(values, "batch", "length", None)
                nll = in_chunks(of_targets, values, row.ids, tokens=CHUNK * ways)
                return dynamic_update(scores, nll, number, 1)

            empty = rules.constrain(jnp.zeros(by_device.ids.shape), "batch", None, "length")
            return jax.lax.fori_loop(0, used, score_row, empty).reshape(batch.ids.shape)

        self._step = jax.jit(step)

    def nats(
        self, params: Any, asked: Sequence[Sequence[ScoringRequest]], shape: RowShape
    ) -> list[list[float]]:
        """Return -log p of the scored ids of each request; equal ones are computed once.

        Args:
          params: the parameters.
          asked: the requests of items, which are read together.
          shape: shape of the rows.
        """
        unique = dict.fromkeys(map(tuple, asked))
        prefix_groups: list[PrefixGroup] = []
        for each in unique:
            prefix_groups += packing.groups(each, shape.slots, is_shared=self._is_shared)
        rows = packing.packed([each.size for each in prefix_groups], shape)
        of_device = math.ceil((self._batch or PASS_TOKENS // shape.slots) / self._ways) or 1
        count = of_device * self._ways
        local = host.host_rows(self._mesh, count)
        sums: dict[int, list[float]] = {}
        pending: tuple[Sequence[Sequence[int]], Array] | None = None
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            used = math.ceil(len(part) / self._ways)
            # The first row of each device, then the second of each.
            part += [[] for _ in range(count - len(part))]
            part = [part[n] for way in range(self._ways) for n in range(way, count, self._ways)]
            batch = packing.batch_of(
                prefix_groups, part, shape, pad=self._pad, is_shared=self._is_shared
            )
            mine = jax.tree.map(lambda each: each[local], batch)
            scored = self._step(params, host.put(self._mesh, mine), np.int32(used))
            if pending is not None:
                sums |= _sums(prefix_groups, *pending)
            pending = part, scored
        if pending is not None:
            sums |= _sums(prefix_groups, *pending)
        flat = iter([nats for number in range(len(prefix_groups)) for nats in sums[number]])
        nats = {each: [next(flat) for _ in each] for each in unique}
        return [nats[tuple(each)] for each in asked]


def _sums(
    prefix_groups: Sequence[PrefixGroup], rows: Sequence[Sequence[int]], scored: Array
) -> dict[int, list[float]]:
    """Return the sums of the requests of each group of a pass."""
    nll = np.asarray(host.fetch(scored), np.float64)
    sums: dict[int, list[float]] = {}
    for row, indices in zip(nll, rows, strict=False):
        sums |= dict(zip(indices, packing.sums(prefix_groups, indices, row), strict=True))
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
