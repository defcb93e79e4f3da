import dataclasses
import itertools

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.monitor.chips import SLICES
from jaxlm.parallel import mesh
from jaxlm.parallel.config import AXES, MeshConfig, factorizations


@dataclasses.dataclass(frozen=True)
class Device:
    """A device with the attributes that `jax.experimental.mesh_utils` reads."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def laid_out(count, slices, **sizes):
    """The slice of each device on the mesh."""
    devices = [Device(i, i * slices // count) for i in reversed(range(count))]
    built = mesh.build(MeshConfig(**{"data": 1} | sizes), devices)
    assert sorted(d.id for d in built.devices.flat) == list(range(count))
    return np.vectorize(lambda d: d.slice_index)(built.devices)


def test_data_lies_across_slices_and_fsdp_within():
    grid = laid_out(8, 2, data=2, fsdp=4).squeeze()
    assert grid.tolist() == [[0] * 4, [1] * 4]


def test_an_axis_longer_than_the_slices_is_cut_between_them():
    assert laid_out(8, 2, data=4, tensor=2).squeeze().tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_pipe_crosses_before_data_does():
    grid = laid_out(8, 2, pipe=2, data=2, tensor=2)
    assert [len(set(part.flat)) for part in grid] == [1, 1]


def test_fsdp_crosses_where_nothing_lies_outside_of_it():
    assert mesh.axis_crossings(dict.fromkeys(AXES, 1) | {"fsdp": 64, "tensor": 8}, 16)["fsdp"] == 16


def test_a_mesh_that_slices_cannot_cut_is_refused_with_those_that_they_can():
    with pytest.raises(ConfigError) as caught:
        laid_out(12, 6, data=4, fsdp=3)
    assert "6 slices" in caught.value.what
    fix = dict(
        part.removeprefix("--config.mesh.").split("=")
        for part in caught.value.fix.splitlines()[0].split()
    )
    laid_out(12, 6, **{"data": 4, "fsdp": 3} | {axis: int(size) for axis, size in fix.items()})


def test_slices_of_different_sizes_are_refused():
    devices = [Device(i, int(i > 2)) for i in range(8)]
    with pytest.raises(ConfigError, match="differ in their number of devices"):
        mesh.build(MeshConfig(data=8), devices)


@dataclasses.dataclass(frozen=True)
class Chip:
    """The same of a chip of a TPU slice."""

    id: int
    coords: tuple[int, ...]
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0
    core_on_chip: int = 0


def chips(topology):
    """Those of a slice such as v6e:16x16."""
    name, _, shape = topology.partition(":")
    kind = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}[name]
    sizes = [*map(int, shape.split("x")), 1][:3]
    return [
        Chip(number, tuple(map(int, coords)), kind)
        for number, coords in enumerate(itertools.product(*map(range, sizes)))
    ]


@pytest.mark.parametrize("name", ["v5e-16", "v5e-256", "v5p-128", "v6e-256"])
def test_any_axis_finds_a_place_on_any_slice(name):
    """Also one that no dimension of the torus has the size of: JAX's own default is to give up."""
    devices = chips(SLICES[name].topology)
    for sizes in factorizations(len(devices), ("data", "fsdp", "tensor")):
        built = mesh.build(MeshConfig(**sizes), devices)
        assert dict(built.shape) == sizes
        assert sorted(chip.id for chip in built.devices.flat) == list(range(len(devices)))
