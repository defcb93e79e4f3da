"""Runs that do not fit their mesh: one error with every problem, and fix lines that work."""

import dataclasses
import itertools
import math
import re
import shlex

import pytest

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.monitor.config import LogConfig
from jaxlm.parallel.config import AXES, MAX_FIXES
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.training.config import TrainConfig

SMALL = {
    "model.vocab": "64",
    "model.depth": "8",
    "model.width": "64",
    "model.heads": "8",
    "model.kv_heads": "4",
    "model.hidden": "128",
    "data.sequence": "64",
    "train.batch": "16",
}

LATENT = {"model.family": "deepseek_v3", "model.kv_heads": None}
# devices, settings, message
CASES = {
    "devices": (8, {"mesh.tensor": "3"}, ["a multiple of 3 devices, 8 are available"]),
    "devices and heads": (8, {"mesh.data": "1", "mesh.tensor": "16"}, ["needs 16", "kv_heads = 4"]),
    "heads": (8, {"mesh.tensor": "8"}, ["kv_heads = 4 does not divide by 8 (tensor), 8 would"]),
    "odd heads": (
        6,
        {
            "mesh.tensor": "2",
            "mesh.data": "3",
            "model.heads": "3",
            "model.kv_heads": "3",
            "model.width": "48",
            "train.batch": "6",
        },
        ["heads = 3 does not divide by 2"],
    ),
    "layers": (
        8,
        {"mesh.pipe": "8", "model.depth": "10"},
        ["depth = 10 does not divide by 8 (pipe), 8 or 16 would"],
    ),
    "layers after dense ones": (
        2,
        LATENT | {"mesh.pipe": "2", "model.depth": "4", "model.dense_depth": "1"},
        ["depth = 4 without its first 1 does not divide by 2 (pipe), 3 or 5 would"],
    ),
    "circular layers": (
        4,
        {
            "mesh.pipe": "4",
            "model.depth": "12",
            "train.pipeline": "circular",
            "train.microbatches": "4",
        },
        ["depth = 12 does not divide by 8"],
    ),
    "circular micro-batches": (
        4,
        {"mesh.pipe": "4", "train.pipeline": "circular", "train.microbatches": "2"},
        ["microbatches = 2 cannot fill 4 stages"],
    ),
    "circular micro-batches of a batch that is too small for them": (
        16,
        {
            "mesh.pipe": "4",
            "train.pipeline": "circular",
            "train.microbatches": "2",
            "train.batch": "6",
        },
        [
            "microbatches = 2 cannot fill 4 stages (pipe), 4 would",
            "batch = 6 does not divide by 16 (data x fsdp x expert), 16 would: 4 devices x 4",
        ],
    ),
    "circular micro-batches that no cut of the batch gives": (
        16,
        {
            "mesh.pipe": "4",
            "train.pipeline": "circular",
            "train.microbatches": "2",
            "train.batch": "8",
        },
        ["4 would", "batch = 8 does not divide by 16 (data x fsdp x expert), 16 would"],
    ),
    "rows of an evaluation": (
        8,
        {"eval.batch": "12", "train.batch": "12"},
        [
            "batch = 12 does not divide by 8 (data x fsdp x expert), 8 or 16 would",
            "eval.batch = 12 does not",
        ],
    ),
    "experts": (
        8,
        {"model.family": "mixtral", "model.experts": "6", "mesh.expert": "4"},
        ["experts = 6 does not divide by 4 (expert), 4 or 8 would"],
    ),
    "latents": (
        4,
        LATENT | {"mesh.fsdp": "4", "model.kv_rank": "18", "model.query_rank": "14"},
        [
            "kv_rank = 18 does not divide by 4 (fsdp), 16 or 20 would",
            "query_rank = 14 does not divide by 4 (fsdp)",
        ],
    ),
    "heads of a latent": (
        8,
        LATENT | {"mesh.tensor": "8", "mesh.data": "1", "model.heads": "6"},
        ["heads = 6 does not divide by 8 (tensor), 8 would"],
    ),
    "sequence": (
        4,
        {"mesh.context": "4", "data.sequence": "62"},
        ["sequence = 62 does not divide by 4 (context), "],
    ),
    "ring": (
        4,
        {"mesh.context": "4", "mesh.context_keys": "ring", "data.sequence": "60"},
        ["sequence = 60 does not divide by 8 (context), 56 or 64 would"],
    ),
    "rows": (8, {"train.batch": "12"}, ["batch = 12 does not divide by 8"]),
    "width": (
        3,
        {"mesh.fsdp": "3", "train.batch": "15"},
        ["width = 64 does not divide by 3 (fsdp), 48 or 96 would"],
    ),
    "many": (
        8,
        {
            "mesh.tensor": "8",
            "train.batch": "15",
            "train.microbatches": "3",
            "model.vocab": "100",
            "model.heads": "4",
        },
        ["vocab = 100", "heads = 4", "kv_heads = 4"],
    ),
    "everything": (
        32,
        {
            "mesh.pipe": "4",
            "mesh.context": "2",
            "mesh.tensor": "2",
            "model.depth": "6",
            "data.sequence": "63",
            "train.batch": "15",
            "model.kv_heads": "1",
        },
        [
            "kv_heads = 1",
            "depth = 6",
            "sequence = 63",
            "batch = 15 does not divide by 2 (data x fsdp x expert), 14 or 16 would",
        ],
    ),
    "a prime number of devices": (
        7,
        {"mesh.tensor": "3"},
        [
            "a multiple of 3 devices, 7 are available",
            "vocab = 64",
            "heads = 8",
            "kv_heads = 4",
            "hidden = 128",
        ],
    ),
    "no mesh for these rows": (
        8,
        {"mesh.tensor": "3", "mesh.data": "1", "train.batch": "15"},
        ["tensor=3 needs 3 devices, 8 are available"],
    ),
}


def load(settings):
    known = {path: value for path, value in settings.items() if value is not None}
    return config.load(Run, None, list(known.items())).value


def pasted(line):
    return dict(word.removeprefix("--config.").partition("=")[::2] for word in shlex.split(line))


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_said_at_once_and_every_line_of_the_fix_mends_it(case):
    count, settings, output = CASES[case]
    settings = SMALL | settings
    with pytest.raises(ConfigError) as caught:
        divisibility.check(load(settings), count)
    assert caught.value.code == 2
    assert len(str(caught.value).splitlines()) <= 8
    for words in output:
        assert words in caught.value.why
    lines = caught.value.fix.splitlines()
    assert lines
    for line in lines:
        assert pasted(line), line
        divisibility.check(load(settings | pasted(line)), count)


@pytest.mark.parametrize(
    ("settings", "slices", "count"),
    [({"mesh.data": "4", "mesh.fsdp": "3"}, 6, 12), ({"mesh.data": "3", "mesh.tensor": "2"}, 2, 6)],
)
def test_slices_that_a_mesh_cannot_be_cut_into_are_said_beside_all_else(settings, slices, count):
    settings = SMALL | settings | {"train.batch": "10"}
    with pytest.raises(ConfigError) as caught:
        divisibility.check(load(settings), count, slices)
    assert f"{slices} slices: " in caught.value.why
    assert "batch = 10" in caught.value.why
    for line in caught.value.fix.splitlines():
        divisibility.check(load(settings | pasted(line)), count, slices)


def distance(sizes, other):
    """Number of doublings and halvings between two meshes, and the most on one axis."""
    apart = [abs(math.log2(sizes[axis] / other[axis])) for axis in other]
    return round(sum(apart), 6), round(max(apart), 6)


def meshes(count):
    """All there are, of any axes."""
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    every = itertools.product(sizes, repeat=len(AXES))
    return [dict(zip(AXES, each, strict=True)) for each in every if math.prod(each) == count]


# Axes that a config does not use are not offered to it, but for these.
FREE = {"data", "fsdp", "tensor"}


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (16, {"mesh.pipe": "3", "mesh.tensor": "3", "mesh.data": "1"}),
        (8, {"mesh.tensor": "8"}),
        (8, {"mesh.tensor": "16", "mesh.data": "1"}),
        (16, {"mesh.pipe": "16"}),
        (12, {"mesh.context": "12", "train.batch": "12"}),
        (8, {"mesh.context": "8", "data.sequence": "60"}),
    ],
    ids=str,
)
def test_the_meshes_offered_are_all_that_are_nearest_of_all_there_are(count, settings):
    asked = SMALL | settings
    run = load(asked)
    with pytest.raises(ConfigError) as caught:
        divisibility.check(run, count)
    requested = {axis: size for axis in AXES if (size := getattr(run.mesh, axis)) != "auto"}
    if (left := count / math.prod(requested.values())).is_integer():
        requested = {"data": int(left)} | requested
    used = FREE | {axis for axis, size in requested.items() if size > 1}
    fits = [
        sizes
        for sizes in meshes(count)
        if all(size == 1 or axis in used for axis, size in sizes.items())
        and not any(divisibility.find_indivisible(run, sizes))
    ]
    lines = [line for line in caught.value.fix.splitlines() if "mesh." in line]
    offered = [load(asked | pasted(line)).mesh.sizes(count) for line in lines]
    distances = sorted(distance(sizes, requested) for sizes in fits)
    assert [distance(sizes, requested) for sizes in offered] == distances[: len(offered)]
    assert distances.count(distances[0]) == 1 or distances[0] == distance(offered[-1], requested)
    left = distances[len(offered) :].count(distance(offered[-1], requested))
    assert left == 0 or len(offered) == MAX_FIXES
    named = re.findall(r"as near as the last mesh below: (.*)", caught.value.why)
    rest = [
        load(asked | {f"mesh.{axis}": size for axis, size in re.findall(r"(\w+)=(\d+)", mesh)})
        for mesh in (named[0].split(", ") if named else [])
    ]
    nearest = [run.mesh.sizes(count) for run in rest]
    assert [distance(sizes, requested) for sizes in nearest] == [
        distance(offered[-1], requested)
    ] * left
    assert len({str(sizes) for sizes in offered + nearest}) == len(offered) + left


SINGLE = [
    (8, {"mesh.pipe": "8", "model.depth": "13"}, "model.depth"),
    (4, {"mesh.context": "4", "mesh.context_keys": "ring", "data.sequence": "59"}, "data.sequence"),
    (8, {"train.batch": "27"}, "train.batch"),
    (8, {"train.batch": "24", "train.microbatches": "2"}, "train.batch"),
    (4, {"eval.batch": "7"}, "eval.batch"),
    (4, {"mesh.tensor": "4", "model.hidden": "130"}, "model.hidden"),
    (3, {"mesh.fsdp": "3", "train.batch": "15", "model.width": "80"}, "model.width"),
    (4, {"mesh.fsdp": "4", "model.head_dim": "8", "model.width": "70"}, "model.width"),
    (8, {"model.family": "mixtral", "model.experts": "10", "mesh.expert": "4"}, "model.experts"),
    (
        16,
        {
            "mesh.pipe": "4",
            "train.pipeline": "circular",
            "train.microbatches": "2",
            "train.batch": "48",
        },
        "train.microbatches",
    ),
]


@pytest.mark.parametrize(("count", "settings", "path"), SINGLE, ids=str)
def test_the_values_named_are_the_nearest_of_all_that_fit(count, settings, path):
    """The next ones below and above; pasted is the nearer."""
    settings = SMALL | settings
    with pytest.raises(ConfigError) as caught:
        divisibility.check(load(settings), count)
    now = int(settings[path])

    def fits(value):
        try:
            run = load(settings | {path: str(value)})
        except ConfigError:
            return False
        return not any(divisibility.find_indivisible(run, run.mesh.sizes(count)))

    below = next((n for n in range(now - 1, 0, -1) if fits(n)), None)
    above = next((n for n in range(now + 1, 4 * now) if fits(n)), None)
    named = re.search(
        rf"{path.partition('.')[2]} = .*?, (\d+)(?: or (\d+))? would", caught.value.why
    )
    both = [n for n in (below, above) if n]
    assert sorted(int(n) for n in named.groups() if n) == both
    (line,) = [line for line in caught.value.fix.splitlines() if path in line]
    pasted_value = int(pasted(line)[path])
    assert abs(pasted_value - now) == min(abs(n - now) for n in both)


def test_what_fits_is_left_alone():
    divisibility.check(load(SMALL), 8)
    divisibility.check(load(SMALL | {"mesh.fsdp": "2", "mesh.tensor": "4", "mesh.data": "1"}), 8)
    divisibility.check(load(SMALL | {"mesh.pipe": "2", "mesh.context": "2", "mesh.tensor": "2"}), 8)
    divisibility.check(load(SMALL | {"model.vocab": "auto", "mesh.tensor": "2"}), 8)


def test_one_row_a_device_has_no_noise_to_measure():
    run = Run(train=TrainConfig(batch=8), log=LogConfig(layers=("noise",)))
    assert divisibility.observer_microbatches(run, {"data": 2}) == 4
    with pytest.raises(ConfigError, match="noise"):
        divisibility.observer_microbatches(run, {"data": 8})
    many = dataclasses.replace(run, train=TrainConfig(batch=8, microbatches=2))
    assert divisibility.observer_microbatches(many, {"data": 4}) == 2
    assert divisibility.observer_microbatches(Run(train=TrainConfig(batch=8)), {"data": 8}) == 1
