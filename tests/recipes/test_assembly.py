"""The schedule of stages that a run's settings make of its mesh, and errors for uneven ones."""

import dataclasses

import jax
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.models.families.llama import Llama
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.schedule import Schedule
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.training.config import TrainConfig


def run(*, depth=8, pipe=4, **train):
    return Run(
        model=Llama(vocab=64, width=16, depth=depth, heads=4, kv_heads=4, hidden=32),
        train=TrainConfig(**{"batch": 8, "microbatches": 4} | train),
        mesh=MeshConfig(pipe=pipe),
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (run(), Schedule(4, 4)),
        (run(pipeline="circular"), Schedule(4, 4, 2)),
        (run(pipe=1, pipeline="circular", batch=16), None),
    ],
)
def test_the_mesh_and_the_loop_give_the_schedule(config, expected):
    grid = mesh.build(config.mesh, jax.devices()[:4])
    divisibility.check(config, 4)
    assert divisibility.schedule(config, grid.shape) == expected
    assert setup.build_sharded_model(config, 64, grid).blueprint.schedule == expected


def changed(config, flags):
    """A config with the flags of an error pasted."""
    for flag in flags.split():
        path, _, value = flag.removeprefix("--config.").partition("=")
        section, name = path.split(".")
        part = dataclasses.replace(
            getattr(config, section), **{name: int(value) if value.isdigit() else value}
        )
        config = dataclasses.replace(config, **{section: part})
    return config


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"depth": 6}, "depth = 6 does not divide by 4"),
        ({"depth": 12, "pipeline": "circular"}, "depth = 12 does not divide by 8"),
        ({"pipeline": "circular", "microbatches": 2}, "microbatches = 2 cannot fill 4"),
        ({"batch": 6}, "batch = 6 does not divide by 4"),
        ({"batch": 6, "depth": 6}, "depth = 6"),
    ],
    ids=str,
)
def test_what_does_not_come_out_even_is_refused_with_values_that_do(options, why):
    wrong = run(**options)
    with pytest.raises(ConfigError) as caught:
        divisibility.check(wrong, 4)
    assert why in caught.value.why
    assert caught.value.code == 2
    for flags in caught.value.fix.splitlines():
        fitting = changed(wrong, flags)
        divisibility.check(fitting, 4)
        setup.check_fit(fitting, mesh.build(fitting.mesh, jax.devices()[:4]))
