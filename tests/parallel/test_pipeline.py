"""The schedule against a simulation that moves micro-batches by hand, and the loop against plain Python."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.parallel import mesh, pipeline
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.pipeline import Schedule

SCHEDULES = [
    Schedule(2, 1),
    Schedule(2, 4),
    Schedule(4, 2),
    Schedule(4, 8),
    Schedule(2, 2, 2),
    Schedule(4, 4, 3),
    Schedule(3, 5, 2),
]


def simulated(plan):
    """Who works on what at each tick: micro-batches wait before the first stage, and go around `repeats` times."""
    waiting = collections.deque((m, 0) for m in range(plan.microbatches))
    at = [None] * plan.stages
    ticks, done = [], 0
    while done < plan.microbatches:
        at[0] = waiting.popleft() if waiting else None
        ticks.append(list(at))
        last = at[-1]
        at = [None, *at[:-1]]
        if last is not None and last[1] + 1 < plan.repeats:
            waiting.append((last[0], last[1] + 1))
        elif last is not None:
            done += 1
    return ticks


@pytest.mark.parametrize("plan", SCHEDULES, ids=str)
def test_every_stage_does_at_every_tick_what_the_simulation_does(plan):
    ticks = simulated(plan)
    assert len(ticks) == plan.ticks
    for tick, stages in enumerate(ticks):
        for stage, work in enumerate(stages):
            counts, microbatch, repeat = plan.item(stage, tick)
            assert (work is not None) == counts
            assert work is None or work == (microbatch, repeat)
    idle = sum(work is None for stages in ticks for work in stages)
    assert plan.bubble == idle / (len(ticks) * plan.stages)


def test_a_circular_schedule_idles_less_with_every_group():
    bubbles = [Schedule(4, 8, repeats).bubble for repeats in (1, 2, 4)]
    assert bubbles == [3 / 11, 3 / 19, 3 / 35]


def test_rows_come_back_in_their_order():
    x = jnp.arange(24).reshape(12, 2)
    dealt = pipeline.deal(x, 3)
    np.testing.assert_array_equal(dealt[1], x[1::3])
    np.testing.assert_array_equal(pipeline.collect(dealt), x)


@pytest.mark.parametrize(
    ("plan", "rows", "count"),
    [
        (Schedule(2, 8), 16, 8),
        (Schedule(2, 8), 12, 4),
        (Schedule(2, 8), 3, 1),
        (Schedule(4, 8, 2), 12, 4),
        (Schedule(4, 8, 2), 6, None),
    ],
)
def test_a_batch_of_another_size_has_as_many_micro_batches_as_fit(plan, rows, count):
    fitted = plan.fitted(rows)
    assert (fitted and fitted.microbatches) == count


@pytest.mark.parametrize("plan", [Schedule(4, 6), Schedule(4, 5, 2)], ids=str)
def test_stages_are_run_as_often_as_predicted_and_in_the_order_of_the_layers(plan, record_property):
    """On four devices, each a stage: every execution is counted where it happens."""
    layers = 2 * plan.stages * plan.repeats
    weights = jnp.arange(1.0, layers + 1) / layers
    x = jax.random.normal(jax.random.key(0), (plan.microbatches, 2, 3, 4))
    runs = []

    def stage(weights, x, microbatch):
        jax.debug.callback(lambda m: runs.append(int(m)), microbatch)
        for weight in weights:
            x = jnp.sin(x) * weight + microbatch
        return x, {"layers": jnp.float32(len(weights)), "microbatch": microbatch}

    grid = mesh.build(MeshConfig(data=1, pipe=4), jax.devices()[:4])
    with jax.set_mesh(grid):
        out, sums = jax.jit(lambda w, x: pipeline.run(stage, w, x, plan))(weights, x)
        jax.effects_barrier()
    for number, expected in enumerate(x):
        for weight in weights:
            expected = jnp.sin(expected) * weight + number
        np.testing.assert_allclose(out[number], expected, rtol=1e-5, atol=1e-6)
    # Sums are over all stages and micro-batches, and over nothing else.
    useful = plan.stages * plan.repeats * plan.microbatches
    assert float(sums["layers"]) == 2 * useful
    assert int(sums["microbatch"]) == sum(range(plan.microbatches)) * useful // plan.microbatches
    assert len(runs) == plan.ticks * plan.stages
    counted = 1 - useful / len(runs)
    record_property("table", f"{plan}: bubble {plan.bubble:.1%} predicted, {counted:.1%} counted")
    assert counted == pytest.approx(plan.bubble)
