"""Runs of process reward models: start, resuming, figures, and the score of a whole answer."""

import json
import math

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.data import conversations
from tests.faults import harness
from tests.recipes.train.test_reference import SETTINGS, losses, train, train_records

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    records = [
        {"prompt": f"{n}+2=", "steps": [f"{n}+1={n + 1}", f"{n + 2 + n % 2}"]} for n in range(60)
    ]
    labeled = [each | {"labels": [True, n % 2 == 0]} for n, each in enumerate(records)]
    text = "".join(json.dumps(each) + "\n" for each in labeled)
    (folder / "steps.jsonl").write_text(text)
    settings = {"data.train": (f"{folder}/steps.jsonl",), "data.kind": "steps"}
    settings |= {"objective.name": "process", "optim.lr": 0.01}
    return harness.write_config(folder, SETTINGS | settings)


@pytest.fixture(scope="module")
def process(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "process"
    assert train(config, workdir) == 0
    return workdir


@pytest.mark.slow
def test_a_process_reward_model_begins_at_ln_2_learns_and_resumes(config, process, tmp_path):
    first, *_, last = train_records(process)
    assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-7)
    assert last["loss_nats"] < first["loss_nats"]
    assert {"step_accuracy", "right_accuracy", "wrong_score"} <= first.keys()
    assert train(config, tmp_path / "parts", "--stop_at=2", "--config.train.microbatches=1") == 0
    assert train(config, tmp_path / "parts") == 0
    assert losses(process) == losses(tmp_path / "parts")


def test_an_evaluation_has_the_figures_of_the_training(process, capsys):
    assert main(["eval", f"--workdir={process}", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["sets"]["val"]
    logged = train_records(process, "val")[-1]
    for name in ("loss_nats", "step_accuracy", "right_score", "wrong_score"):
        assert figures[name] == pytest.approx(logged[name], rel=1e-5), name


def test_the_score_of_an_answer_is_that_of_its_worst_step(process):
    from jaxlm.recipes.use.reward_model import RewardModel

    def answer(*steps):
        record = {"prompt": "4+2=", "completion": "\n".join(steps)}
        return conversations.parse(record, "completion", ("assistant",))

    model = RewardModel(str(process), "--judge")
    one, two, both, blank = model.scores(
        [answer("4+1=5"), answer("4+1=5", "6"), answer("4+1=5", "6", "7"), answer("4+1=5", "", "6")]
    )
    assert one >= two >= both
    assert np.isfinite([one, two, both, blank]).all()


def test_steps_have_their_own_objective(config, tmp_path, capfd):
    assert train(config, tmp_path / "run", "--config.objective.name=reward") == 2
    assert "--config.objective.name=process" in capfd.readouterr().err
    assert train(config, tmp_path / "run", "--config.data.kind=pairs") == 2
    assert "--config.data.kind=steps" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("context=2", "fsdp=2"), ("data=2", "tensor=2")], ids=str)
def test_meshes_and_microbatches_agree(config, tmp_path, mesh):
    heads = "--config.model.kv_heads=2"
    flags = ["--cpu_devices=4", heads, "--config.train.microbatches=2"]
    flags += [f"--config.mesh.{axis}" for axis in mesh]
    assert train(config, tmp_path / "one", heads) == 0
    code, text = harness.run(harness.words(config, tmp_path / "run", *flags))
    assert code == 0, text
    pairs = zip(train_records(tmp_path / "run"), train_records(tmp_path / "one"), strict=True)
    for one, other in pairs:
        for name in ("loss_nats", "right_score", "wrong_score", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-5, abs=1e-7), name


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_to_the_same_bits(config, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(config, whole) == 0
    code, text = harness.run(harness.words(config, killed), "step.before:sigkill@4")
    assert code == -9, text
    assert train(config, killed) == 0
    assert losses(killed) == losses(whole)
