"""The schedule against a simulation that moves micro-batches by hand."""

import collections

import pytest

from jaxlm.parallel.schedule import Schedule

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
    """Work of each stage at each tick: micro-batches wait, then go around `repeats` times."""
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


@pytest.mark.few(3)
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
    fitted = plan.fitted(rows, ways=1)
    assert (fitted and fitted.microbatches) == count
