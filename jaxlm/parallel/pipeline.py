"""The pipeline over `pipe`: the loop that moves micro-batches on, and how they are dealt out."""

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
    """[B, ...] as [parts, B / parts, ...], part i being rows i, i + parts, ...: each row stays on its device."""
    dealt = jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
    return _constrained(dealt, None)


def merge_microbatches(x: Array) -> Array:
    """The rows of `deal` in their order again."""
    rows = jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return _constrained(rows)


def run_pipeline(
    stage: Stage, layers: Any, x: Float[Array, "M B T D"], schedule: Schedule
) -> tuple[Float[Array, "M B T D"], Any]:
    """Every micro-batch through all layers, and the sums that stages give, over stages and useful ticks.

    `stage(layers, x, microbatch)` is a group of layers, on one micro-batch, which it knows by number: it returns the
    stream and a tree of sums. `layers` is a tree whose leaves have the layers as their first axis, P R groups of them.

    All stages are one program, mapped over the axis "stages"; the stream moves to the next stage by a permutation of
    neighbours, (M R + P - 1) B T D elements in all, as many backward. Each stage has room for all micro-batches, of which only
    the first stage's is used: the batch waits there for its turn, comes back there from the last stage, and goes to all
    at the end in one reduction over `pipe`, M B T D elements.

    With R > 1 the layers of a stage, consecutive in the parameters, are dealt out by group: all the parameters over `pipe`
    once a step, and their gradients once, by what `models.wire.dealt_bytes` counts. Each tick then reads one group by its number: what the
    backward pass keeps of a tick has these weights in it, whatever remat computes again.
    """
    stages, count = schedule.stages, schedule.microbatches
    wide, narrowed = widened(layers)
    groups = jax.tree.map(functools.partial(_by_stage, schedule), wide)
    numbers = jnp.arange(stages)
    is_first = (numbers == 0)[:, None, None, None]

    def one(groups: Any, x: Array, microbatch: Array, repeat: Array) -> tuple[Array, Any]:
        own = jax.tree.map(
            lambda leaf: _at(leaf, repeat) if schedule.repeats > 1 else leaf[0], groups
        )
        return stage(narrowed(own), x, microbatch)

    every = jax.vmap(one, spmd_axis_name=logical.RULES["stages"])

    def tick(carry: tuple[Array, Array], tick: Array) -> tuple[tuple[Array, Array], Any]:
        moving, waiting = carry
        counts, microbatch, repeat = schedule.item(numbers, tick)
        moving = jnp.where(is_first, _at(waiting, tick % count, axis=1), moving)
        moving, sums = every(groups, _constrained(moving, "stages"), microbatch, repeat)
        moving = _constrained(jnp.roll(moving, 1, axis=0), "stages")
        # What has left the last stage is at the first one now.
        left = tick - (stages - 1)
        back = jnp.where(left >= 0, moving, _at(waiting, left % count, axis=1))
        waiting = lax.dynamic_update_index_in_dim(waiting, back, left % count, axis=1)
        sums = jax.tree.map(lambda s: jnp.where(_like(counts, s), s, 0).sum(0), sums)
        return (moving, _constrained(waiting, "stages", None)), sums

    waiting = _constrained(jnp.broadcast_to(x[None], (stages, *x.shape)), "stages", None)
    moving = _constrained(jnp.zeros((stages, *x.shape[1:]), x.dtype), "stages")
    (_, waiting), sums = lax.scan(tick, (moving, waiting), jnp.arange(schedule.ticks))
    out = jnp.where(is_first[..., None], waiting, 0).sum(0, dtype=x.dtype)
    return _constrained(out, None), jax.tree.map(lambda s: s.sum(0), sums)


def _by_stage(schedule: Schedule, leaf: Array) -> Array:
    """[L, ...] as [P, R, L / (P R), ...]."""
    size = leaf.shape[0] // (schedule.stages * schedule.repeats)
    groups = leaf.reshape(schedule.repeats, schedule.stages, size, *leaf.shape[1:])
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.swapaxes(groups, 0, 1)
    free = (PartitionSpec.UNCONSTRAINED,) * (groups.ndim - 1)
    by_stage = PartitionSpec(logical.RULES["stages"], *free)
    if schedule.repeats % schedule.stages == 0:
        # Its gradients are laid out so too: else XLA gathers all of them where devices hold copies (jax 0.12).
        groups = lax.with_sharding_constraint(groups, by_stage)
    return lax.with_sharding_constraint(jnp.swapaxes(groups, 0, 1), by_stage)


def _at(x: Array, index: Array, axis: int = 0) -> Array:
    return lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def _like(stages: Array, x: Array) -> Array:
    return stages.reshape(-1, *(1,) * (x.ndim - 1))


def _constrained(x: Array, *leading: str | None) -> Array:
    """Pins [..., B, T, D] or [..., B, T] to the mesh."""
    rest = ("batch", "length", None)[: x.ndim - len(leading)]
    return rules.constrain(x, *leading, *rest)
