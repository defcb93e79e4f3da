"""Multi-token prediction split over a mesh: the losses of one device, and no needless traffic."""

import dataclasses

import pytest

from jaxlm.objectives.config import MTP
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import check


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["sequential", "parallel"])
@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 2, "tensor": 2}, {"context": 2, "context_keys": "ring"}, {"pipe": 2}],
    ids=str,
)
def test_a_mesh_trains_as_one_device_does(sizes, heads):
    run = Run(
        objective=MTP(heads=heads, weights=(0.3, 0.2)), mesh=MeshConfig(**{"data": 1} | sizes)
    )
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, microbatches=2))
    report = check.check(run, devices=4)
    assert report["is_equal"], report["deviation"]
    assert not report["replicated"]
    assert not report["unexpected"]
