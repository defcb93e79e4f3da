"""Training by the command line on other meshes, or with offloaded state, is the same run."""

import json

import jax
import numpy as np
import pytest

from jaxlm.core import config as configs
from jaxlm.recipes.config import Run
from jaxlm.recipes.train import resume
from jaxlm.recipes.train.api import ResumeOptions
from tests.faults import harness
from tests.recipes.train.test_run import SETTINGS, records, train

STEPS = ("--config.train.steps=4", "--config.checkpoint.every=2", "--config.eval.every=4")
LAYOUTS = {
    "stages and fsdp": ("pipe=2", "fsdp=2"),
    "circular, optimizer state split alone": ("pipe=2", "fsdp=2", "zero=1"),
    "optimizer state on the host": ("fsdp=4", "zero=2"),
}
HEADERS = {
    "stages and fsdp": "2 stages, 2 micro-batches: each stage idles 33% of ticks",
    "circular, optimizer state split alone": "2 stages x 2 groups of layers, 2 micro-batches: "
    "each stage idles 20% of ticks",
    "optimizer state on the host": "of optimizer (zero=2), the optimizer state on the host "
    "between steps",
}
MORE = {
    "stages and fsdp": (),
    "circular, optimizer state split alone": ("--config.train.pipeline=circular",),
    "optimizer state on the host": (
        "--config.train.offload=optimizer",
        "--config.train.remat=offload:layer_in,attention_out",
    ),
}


@pytest.mark.slow
def test_how_state_is_split_and_kept_may_change_when_a_run_goes_on():
    saved = configs.load(Run, None).value
    for flags in (
        [("mesh.zero", "1")],
        [("mesh.pipe", "2"), ("train.pipeline", "circular"), ("train.pipeline_repeats", "4")],
        [("train.offload", "optimizer"), ("train.remat", "offload:mlp_out")],
    ):
        changed = configs.load(Run, None, flags).value
        changes = resume.check(saved, changed, ResumeOptions(), 1)
        assert {change.path for change in changes} == {path for path, _ in flags}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    settings = SETTINGS | {"model.dropout": 0.0, "model.depth": 4, "train.batch": 16}
    return harness.write_config(tmp_path_factory.mktemp("texts"), settings)


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "plain"
    assert train(config, workdir, *STEPS, "--config.train.microbatches=2") == 0
    return workdir


def figures(workdir):
    return [(r["split"], r["step"], r["loss_nats"]) for r in records(workdir)]


def samples(workdir):
    return [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_the_same_on_another_layout_and_goes_on_from_another(
    config, plain, tmp_path, name
):
    """Losses, evaluations and samples; half of the steps before a change of layout, half after."""
    mesh = [f"--config.mesh.{flag}" for flag in LAYOUTS[name]]
    flags = [*STEPS, "--config.train.microbatches=2"]
    assert train(config, tmp_path / "run", *flags, "--stop_at=2") == 0
    assert train(config, tmp_path / "run", *flags, *mesh, *MORE[name]) == 0
    one, other = figures(plain), figures(tmp_path / "run")
    assert [row[:2] for row in one] == [row[:2] for row in other]
    np.testing.assert_allclose([row[2] for row in other], [row[2] for row in one], rtol=1e-5)
    assert samples(tmp_path / "run") == samples(plain)
    assert HEADERS[name] in " ".join((tmp_path / "run/log.txt").read_text().split())
    assert jax.device_count() == 8
