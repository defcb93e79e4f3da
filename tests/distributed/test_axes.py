"""The law of the mesh: all axes give the losses, gradients and parameters of one device."""

import contextlib
import functools
import itertools
import math

import numpy as np
import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core import tree
from jaxlm.data import dataset
from jaxlm.parallel.config import AXES
from tests.distributed import laws

PAIRS = [
    {"pipe": 2, "fsdp": 2},
    {"data": 2, "expert": 2},
    {"fsdp": 2, "context": 2},
    {"context": 2, "tensor": 2},
]
TRIPLES = [
    {"pipe": 2, "data": 2, "fsdp": 2},
    {"pipe": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "fsdp": 2, "context": 2},
    {"pipe": 2, "expert": 2, "tensor": 2},
    {"pipe": 2, "context": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"data": 2, "fsdp": 2, "context": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"expert": 2, "context": 2, "tensor": 2},
]
STEPS = 20
# Parameters are shown alone: AdamW divides gradients near zero by their own size, so they drift
# with the sign of a rounding error.
LIMITS = dict.fromkeys(("loss", "first grad_norm", "gradients", "grad_norm"), 1e-5)


COMBINATIONS = [
    *({axis: 8} for axis in AXES),
    *({one: 2, two: 4} for one, two in itertools.combinations(AXES, 2)),
    *TRIPLES,
]


# Of the dense model, other ways to use an axis than the table's: it has ZeRO 3, stages gone through
# once, and keys in a ring.
CIRCULAR = {"pipeline": "circular", "remat": "full"}
WAYS = {
    "fsdp=8, ZeRO 1": ({"fsdp": 8, "zero": 1}, {}),
    "fsdp=8, ZeRO 2": ({"fsdp": 8, "zero": 2}, {}),
    "fsdp=4 x tensor=2, ZeRO 1": ({"fsdp": 4, "tensor": 2, "zero": 1}, {}),
    "fsdp=4 x tensor=2, ZeRO 2": ({"fsdp": 4, "tensor": 2, "zero": 2}, {}),
    "data=2 x fsdp=4, ZeRO 1": ({"data": 2, "fsdp": 4, "zero": 1}, {}),
    "data=2 x fsdp=4, ZeRO 2": ({"data": 2, "fsdp": 4, "zero": 2}, {}),
    "pipe=4 x fsdp=2, 2 rounds": ({"pipe": 4, "fsdp": 2}, CIRCULAR),
    "pipe=2 x data=4, 4 rounds": ({"pipe": 2, "data": 4}, CIRCULAR | {"pipeline_repeats": 4}),
    "pipe=4 x fsdp=2, 2 rounds, ZeRO 2": ({"pipe": 4, "fsdp": 2, "zero": 2}, CIRCULAR),
    "context=8, gathered": ({"context": 8, "context_keys": "gather"}, {}),
    "context=4 x tensor=2, gathered": ({"context": 4, "tensor": 2, "context_keys": "gather"}, {}),
}


def combinations(family):
    """The meshes of a family's table; a capacity changes only the traffic of `expert`."""
    is_few = family == "capacity"
    return [s for s in COMBINATIONS if not is_few or len(s) == 1 or "expert" in s]


def named(sizes):
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def table(title, deviations):
    """Deviations by name, a row each, and the largest of all."""
    names = list(next(iter(deviations.values())))
    largest = {name: max(each[name] for each in deviations.values()) for name in names}
    head = f"{title:<36}" + "".join(f"{name:>17}" for name in names)
    rows = (deviations | {"largest": largest}).items()
    lines = [f"{name:<36}" + "".join(f"{x:>17.1e}" for x in each.values()) for name, each in rows]
    return "\n".join([head, *lines])


def outside(deviation):
    return {name: deviation[name] for name, most in LIMITS.items() if not deviation[name] <= most}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return laws.corpus(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def alone(data):
    return laws.follow(laws.run_on(data, {}, rows=16, microbatches=4), STEPS)


def test_the_course_of_one_device_is_one_to_compare_with(alone):
    assert alone.losses[-1] < alone.losses[0]
    assert len(set(alone.losses)) == STEPS
    assert all(np.abs(gradient).max() > 0 for gradient in alone.gradients.values())


@pytest.mark.few(1)  # stages and split weights in one
@pytest.mark.parametrize("sizes", [*PAIRS, *({axis: 4} for axis in AXES)], ids=named)
def test_an_axis_and_a_pair_on_four_devices_give_the_course_of_one(alone, data, sizes):
    run = laws.run_on(data, sizes, rows=16, microbatches=4)
    assert not outside(laws.follow(run, STEPS, begun=alone.start).deviation(alone))


@pytest.mark.slow
def test_a_checkpoint_moves_through_every_mesh_bit_for_bit(data, tmp_path):
    """A chain of saves and restores visits each mesh of the table, with each ZeRO stage.

    It begins and ends on one device. As each step keeps all bits, so does a move between any two.
    """
    stages = [{"fsdp": 8, "zero": zero} for zero in (1, 2)]
    read = dataset.open_data(data, seed=0)
    draw = np.random.default_rng(0)
    value: dict[str, np.ndarray] = {}
    for step, sizes in enumerate([{}, *COMBINATIONS, *stages, {}], 1):
        engine = laws.engine_of(laws.run_on(data, sizes, rows=64, microbatches=8), read)
        with contextlib.closing(Store(tmp_path, CheckpointConfig(keep_last=2))) as store:
            if step == 1:
                shapes = tree.leaves(engine.abstract())
                value = {path: noise(draw, leaf) for path, leaf in shapes.items()}
                state = laws.placed(engine, value)
            else:
                state = store.restore(step - 1, engine.abstract())
            for path, leaf in tree.leaves(state).items():
                assert np.asarray(leaf).tobytes() == value[path].tobytes(), (sizes, path)
            store.save(step, state, {})


def noise(draw, leaf):
    """Numbers of a leaf's shape and dtype, different for each array."""
    return draw.integers(0, 2**20, leaf.shape).astype(leaf.dtype)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("family", laws.FAMILIES)
def test_every_pair_of_axes(data, record_property, family):
    """Each axis alone, every pair, and a dozen triples on eight devices, 20 steps; with a table."""
    assert all(math.prod(sizes.values()) == 8 for sizes in COMBINATIONS)
    cases = {named(sizes): (sizes, {}) for sizes in combinations(family)}
    check(data, record_property, family, cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_to_use_an_axis(data, record_property):
    """ZeRO 1 and 2, circular pipelines and gathered keys, as above."""
    check(data, record_property, "dense", WAYS)


def check(data, record_property, family, cases):
    """The course of each case, settings of its mesh and of `train`, is that of one device."""
    on = functools.partial(laws.run_on, data, rows=64, microbatches=8, family=family)
    alone = laws.follow(on({}), STEPS)
    deviations = {
        name: laws.follow(on(sizes, **train), STEPS, begun=alone.start).deviation(alone)
        for name, (sizes, train) in cases.items()
    }
    record_property("table", table(family, deviations))
    assert not {name: wrong for name, each in deviations.items() if (wrong := outside(each))}
