import functools
import math

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.parallel.config import (
    AXES,
    MeshConfig,
    factorizations,
    format_mesh,
    layout_fixes,
    mesh_flags,
    nearest_layouts,
)


def test_auto_takes_the_devices_that_are_left():
    sizes = MeshConfig(data="auto", fsdp=2, tensor=2).sizes(8)
    assert sizes == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}


def test_fixed_sizes_must_multiply_to_the_devices():
    with pytest.raises(ConfigError) as caught:
        MeshConfig(data=3, fsdp=1, tensor=2).sizes(8)
    assert "needs 6" in caught.value.why
    changed = {
        word.removeprefix("--config.mesh.").partition("=")[0]: int(word.partition("=")[2])
        for word in caught.value.fix.splitlines()[0].split()
    }
    assert math.prod(({"data": 3, "fsdp": 1, "tensor": 2} | changed).values()) == 8


def test_the_layouts_offered_are_the_nearest_first():
    fits = nearest_layouts({"data": 1, "fsdp": 1, "tensor": 3}, 8)
    assert fits[0]["tensor"] in (2, 4)
    assert len(fits) == len(factorizations(8, ("data", "fsdp", "tensor"))) == 10
    assert len(factorizations(8)) == 56
    assert all(math.prod(fit.values()) == 8 and list(fit) == list(AXES) for fit in fits)


def test_all_layouts_that_are_as_near_as_the_nearest_are_offered():
    sizes = dict.fromkeys(AXES, 1) | {"pipe": 3, "data": "auto", "tensor": 3}
    two, four = (
        "--config.mesh.pipe=2 --config.mesh.tensor=4",
        "--config.mesh.pipe=4 --config.mesh.tensor=2",
    )
    line = functools.partial(mesh_flags, instead_of=sizes)
    assert layout_fixes(sizes, nearest_layouts(sizes, 8), line) == [two, four]
    lines = layout_fixes(sizes, nearest_layouts(sizes, 16), line)
    assert lines == ["--config.mesh.pipe=4 --config.mesh.tensor=4", two, four], (
        "one alone is nearest"
    )
    some = layout_fixes(
        sizes, nearest_layouts(sizes, 16), lambda fit: line(fit) if fit["pipe"] < 4 else ""
    )
    assert some[0] == two


def test_an_axis_that_the_config_uses_stays_in_what_is_offered():
    fits = nearest_layouts({"pipe": 3, "data": "auto"}, 8)
    assert fits[0]["pipe"] in (2, 4)
    assert all(fit["expert"] == fit["context"] == 1 for fit in fits)


def test_two_automatic_axes_are_a_problem():
    assert [field for field, *_ in MeshConfig(data="auto", tensor="auto").problems()] == ["tensor"]
    assert not list(MeshConfig().problems())


def test_flags_name_what_changes():
    fit = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 4}
    assert (
        mesh_flags(fit, {"data": 3, "tensor": 3}) == "--config.mesh.data=2 --config.mesh.tensor=4"
    )
    assert mesh_flags(fit, {"data": "auto", "tensor": 3}) == "--config.mesh.tensor=4"


def test_a_layout_in_words_leaves_out_what_splits_nothing():
    assert format_mesh({"data": 2, "fsdp": 1, "tensor": 4}) == "data=2 x tensor=4"
    assert format_mesh({"data": 1}) == "of one device"
