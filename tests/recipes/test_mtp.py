"""Multi-token prediction through the front door: trained, resumed, evaluated, exported, planned."""

import json

import pytest

from jaxlm.cli.main import main
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "train.steps": 4,
    "train.microbatches": 2,
    "data.sequence": 64,
    "objective.name": "mtp",
    "objective.weights": (0.3, 0.1),
    "eval.batches": 2,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "mtp"
    assert main(harness.words(config, workdir)) == 0
    return workdir


def answer(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_next_token_is_what_is_compared_and_the_others_are_told(run, capsys):
    rows = [r for r in harness.records(run) if r["split"] == "train"]
    assert all(r["ahead_2_nats"] > 0 and r["ahead_3_nats"] > 0 for r in rows)
    assert all(0 <= r["ahead_2_accuracy"] <= 1 for r in rows)
    assert rows[-1]["loss_nats"] < rows[0]["loss_nats"]
    assert rows[-1]["ahead_2_nats"] < rows[0]["ahead_2_nats"]
    last = [r for r in harness.records(run) if r["split"] == "val"][-1]
    assert answer(capsys, "eval", f"--workdir={run}")["loss_nats"] == pytest.approx(
        last["loss_nats"], rel=1e-6
    )
    assert any(path.startswith("params/heads/1/") for path in harness.store(run).arrays(4))


def test_an_export_says_that_it_leaves_the_heads_out(run, tmp_path, capsys):
    assert main(["export", f"--workdir={run}", f"--out={tmp_path / 'hub'}"]) == 0
    assert "left out: 2 heads" in capsys.readouterr().out
    parity = json.loads((tmp_path / "hub/parity.json").read_text())
    assert parity["is_bit_identical"]


def test_the_plan_counts_the_heads(config, run, capsys):
    words = ["plan", f"--config={config}", "--on=cpu", "--config.model.vocab=320"]
    found = answer(capsys, *words)
    plain = answer(capsys, *words, "--config.objective.name=causal")
    arrays = harness.store(run).arrays(4)
    heads = sum(leaf.size for path, leaf in arrays.items() if path.startswith("params/heads/"))
    assert found["parameters"] - plain["parameters"] == heads
    for name in ("parameters", "gradients", "optimizer", "logits", "activations"):
        assert found["bytes_per_device"][name] > plain["bytes_per_device"][name]
    assert found["flops_per_token"] > plain["flops_per_token"]


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["sequential", "parallel"])
def test_stopping_and_going_on_changes_no_bit(heads, config, tmp_path):
    words = [f"--config.objective.heads={heads}", "--config.model.dropout=0.1"]
    assert main(harness.words(config, tmp_path / "whole", *words)) == 0
    assert main(harness.words(config, tmp_path / "parts", *words, "--stop_at=2")) == 0
    assert main(harness.words(config, tmp_path / "parts", *words)) == 0
    assert harness.state_digest(tmp_path / "whole") == harness.state_digest(tmp_path / "parts")
    assert harness.losses(tmp_path / "whole") == harness.losses(tmp_path / "parts")


def test_what_cannot_be_is_refused(config, tmp_path, capsys):
    assert main(harness.words(config, tmp_path / "run", "--config.objective.weights=()")) == 2
    assert "that is the objective causal" in capsys.readouterr().err
    assert main(harness.words(config, tmp_path / "run", "--config.optim.name=sophia")) == 2
    assert "heads for further ones would have none" in capsys.readouterr().err
