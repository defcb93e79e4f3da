"""Pipeline parallelism over `pipe`: the loop that moves micro-batches from stage to stage."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float

from jaxlm.core.precision import widened
from jaxlm.parallel import logical, rules
from jaxlm.parallel.schedule import Schedule

Stage = Callable[[Any, Array, Array], tuple[Array, Any]]


def split_microbatches(x: Array, parts: int) -> Array:
    """Return [B, ...] as [parts, B / parts, ...]; part i is rows i, i + parts, ...

    Each row stays on its device.
    """
    split = jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
    return _constrained(split, None)


def merge_microbatches(x: Array) -> Array:
    """Undo `split_microbatches`."""
    rows = jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return _constrained(rows)


def map_microbatches(function: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """Return the [B, ...] results of `function` for a batch, computed for one part at a time."""
    if parts == 1:
        return function(batch)
    split = jax.tree.map(lambda x: split_microbatches(x, parts), batch)
    return jax.tree.map(merge_microbatches, jax.lax.map(function, split))


def run_pipeline(
    stage: Stage, layers: Any, x: Float[Array, "M B T D"], schedule: Schedule
) -> tuple[Float[Array, "M B T D"], Any]:
    """Return every micro-batch after all layers, and the stages' sums over all useful ticks.

    `stage(layers, x, microbatch)` runs a group of layers on the micro-batch of that number, and
    returns the stream and a tree of sums. The leaves of `layers` have the layers as first axis,
    P R groups of them.

    All stages are one program, mapped over the axis "stages"; the stream moves to the next stage
    by a permutation, (M R + P - 1) B T D elements in all, and as many backward. Each stage has room
    for all micro-batches, and only the first stage's is used: the batch waits there, returns there
    from the last stage, and is reduced over `pipe` at the end, M B T D elements.

    With R > 1 the consecutive layers of a stage are regrouped: all the parameters over `pipe` once
    a step, and their gradients once, the bytes of `models.wire.dealt_bytes`. Each tick then indexes
    one group, and under any remat policy its weights are stored for the backward pass.
    """
    stages, count = schedule.stages, schedule.microbatches
    wide, narrowed = widened(layers)
    groups = jax.tree.map(functools.partial(_by_stage, schedule), wide)
    numbers = jnp.arange(stages)
    is_first = (numbers == 0)[:, None, None, None]

    def one(groups: Any, x: Array, microbatch: Array, repeat: Array) -> tuple[Array, Any]:
        def pick(leaf: Array) -> Array:
            return _index(leaf, repeat) if schedule.repeats > 1 else leaf[0]

        return stage(narrowed(jax.tree.map(pick, groups)), x, microbatch)

    every = jax.vmap(one, spmd_axis_name=logical.RULES["stages"])

    def tick(carry: tuple[Array, Array], tick: Array) -> tuple[tuple[Array, Array], Any]:
        moving, waiting = carry
        counts, microbatch, repeat = schedule.item(numbers, tick)
        moving = jnp.where(is_first, _index(waiting, tick % count, axis=1), moving)
        moving, sums = every(groups, _constrained(moving, "stages"), microbatch, repeat)
        moving = _constrained(jnp.roll(moving, 1, axis=0), "stages")
        # The output of the last stage is now at the first one.
        left = tick - (stages - 1)
        back = jnp.where(left >= 0, moving, _index(waiting, left % count, axis=1))
        waiting = lax.dynamic_update_index_in_dim(waiting, back, left % count, axis=1)
        sums = jax.tree.map(
            lambda s: jnp.where(counts.reshape(-1, *(1,) * (s.ndim - 1)), s, 0).sum(0), sums
        )
        return (moving, _constrained(waiting, "stages", None)), sums

    waiting = _constrained(jnp.broadcast_to(x[None], (stages, *x.shape)), "stages", None)
    moving = _constrained(jnp.zeros((stages, *x.shape[1:]), x.dtype), "stages")
    (_, waiting), sums = lax.scan(tick, (moving, waiting), jnp.arange(schedule.ticks))
    out = jnp.where(is_first[..., None], waiting, 0).sum(0, dtype=x.dtype)
    return _constrained(out, None), jax.tree.map(lambda s: s.sum(0), sums)


def _by_stage(schedule: Schedule, leaf: Array) -> Array:
    """Return [L, ...] as [P, R, L / (P R), ...]."""
    size = leaf.shape[0] // (schedule.stages * schedule.repeats)
    groups = leaf.reshape(schedule.repeats, schedule.stages, size, *leaf.shape[1:])
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.swapaxes(groups, 0, 1)
    free = (PartitionSpec.UNCONSTRAINED,) * (groups.ndim - 1)
    by_stage = PartitionSpec(logical.RULES["stages"], *free)
    if schedule.repeats % schedule.stages == 0:
        # The gradient has this layout too: else XLA gathers all of it over replicas (jax 0.12).
        groups = lax.with_sharding_constraint(groups, by_stage)
    return lax.with_sharding_constraint(jnp.swapaxes(groups, 0, 1), by_stage)


def _index(x: Array, index: Array, axis: int = 0) -> Array:
    return lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def _constrained(x: Array, *leading: str | None) -> Array:
    """Constrain [..., B, T, D] or [..., B, T] on the mesh."""
    rest = ("batch", "length", None)[: x.ndim - len(leading)]
    return rules.constrain(x, *leading, *rest)
