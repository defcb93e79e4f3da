"""Experts with and without a capacity, through the front door: what is cautioned and exported."""

import json

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.models.cost import model_cost
from jaxlm.nn.config import MoeConfig
from jaxlm.ops.kernels import Target
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")
SETTINGS = {
    "train.steps": 1,
    "train.attention": "reference",
    "model.family": "mixtral",
    "model.depth": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.hidden": 32,
    "model.experts": 4,
    "model.top_k": 2,
    "model.capacity": 0.75,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.mark.slow
def test_a_run_with_a_capacity_is_exported_without_and_says_so(config, tmp_path, capsys):
    """Experts of transformers drop no token: logits are compared with ours as these compute."""
    run = tmp_path / "run"
    assert main(harness.words(config, run)) == 0
    (trained,) = [r for r in harness.records(run) if r["split"] == "train"]
    assert trained["moe_dropped"] > 0
    assert main(["export", f"--workdir={run}", f"--out={tmp_path / 'hub'}"]) == 0
    assert "left out: model.capacity" in capsys.readouterr().out
    assert json.loads((tmp_path / "hub/parity.json").read_text())["is_bit_identical"]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_experts_without_a_capacity_are_cautioned_on_gpus_alone(config, platform):
    run = configs.load(Run, config, [("model.capacity", "None")]).value
    cautions = list(predict.dropless_warnings(run, run.decoder(320), {}, platform))
    assert len(cautions) == (platform == "gpu")
    for caution in cautions:
        assert "multiply each row with the weights of all 4" in caution
        assert "4 times the FLOPs that the tokens' experts need" in caution
        assert "--config.model.capacity=1.25" in caution


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_training_without_a_capacity_is_cautioned_on_gpus_alone(
    config, tmp_path, monkeypatch, platform
):
    """Compiled for the CPU of this machine, which is reported as another device."""
    monkeypatch.setattr(setup, "target", lambda mesh: Target(platform))
    run = tmp_path / "run"
    assert main(harness.words(config, run, "--config.model.capacity=None")) == 0
    log = (run / "log.txt").read_text()
    caution = "model.capacity=None makes XLA for GPUs multiply each row with the weights of all 4"
    assert (caution in log) == (platform == "gpu")
    if platform == "gpu":
        assert "4 times the FLOPs that the tokens' experts need" in log
        assert "--config.model.capacity=1.25" in log


@pytest.mark.parametrize(
    ("capacity", "sizes", "rows", "dense"),
    [
        (None, {}, 6, 64),  # of 64 experts, each row meets all
        (None, {"expert": 8}, 8 * 6, 8 * 6 * 8 / 6),
        (None, {"expert": 64}, 64, 64 / 6),
        (1.25, {"expert": 8}, 7.5, 1.25),
        (64.0, {}, 64, 64 / 6),  # a place for every token of a row, and no more
    ],
)
def test_rows_and_flops_of_experts_are_those_of_the_layout(capacity, sizes, rows, dense):
    mlp = MoeConfig(experts=64, top_k=6, hidden=1408, capacity=capacity)
    assert model_cost.expert_rows(mlp, 4096, sizes) == rows
    assert model_cost.expert_flops_ratio(mlp, 4096, sizes, is_dense=True) == pytest.approx(dense)
    ragged = 1.0 if capacity is None else dense
    assert model_cost.expert_flops_ratio(mlp, 4096, sizes, is_dense=False) == pytest.approx(ragged)
