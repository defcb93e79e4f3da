import math

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.parallel.config import MeshConfig, factorisations, flags, nearest


def test_auto_takes_the_devices_that_are_left():
    assert MeshConfig(data="auto", fsdp=2, tensor=2).sizes(8) == {"data": 2, "fsdp": 2, "tensor": 2}


def test_fixed_sizes_must_multiply_to_the_devices():
    with pytest.raises(ConfigError) as caught:
        MeshConfig(data=3, fsdp=1, tensor=2).sizes(8)
    assert "needs 6" in caught.value.why
    words = dict(
        word.removeprefix("--config.mesh.").split("=")
        for word in caught.value.fix.splitlines()[0].split()
    )
    assert math.prod(map(int, words.values())) == 8


def test_the_layouts_offered_are_the_nearest_first():
    fits = nearest({"data": 1, "fsdp": 1, "tensor": 3}, 8)
    assert fits[0]["tensor"] in (2, 4)
    assert len(fits) == len(factorisations(8)) == 10


def test_two_automatic_axes_are_a_problem():
    assert [field for field, *_ in MeshConfig(data="auto", tensor="auto").problems()] == ["tensor"]
    assert not list(MeshConfig().problems())


def test_flags_can_be_pasted():
    assert (
        flags({"data": 2, "fsdp": 1, "tensor": 4})
        == "--config.mesh.data=2 --config.mesh.fsdp=1 --config.mesh.tensor=4"
    )
