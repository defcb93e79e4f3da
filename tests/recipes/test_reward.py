"""Runs of reward models: start, resuming, figures, adapters, and what such a run refuses."""

import json
import math

import pytest

from jaxlm.cli.main import main
from tests.faults import harness
from tests.recipes.train.test_reference import SETTINGS, losses, pairs, train, train_records

pytestmark = pytest.mark.usefixtures("one_device")
__all__ = ["pairs"]


@pytest.fixture(scope="module")
def config(pairs, tmp_path_factory):
    settings = {"data.train": (str(pairs),), "objective.name": "reward", "optim.lr": 0.01}
    return harness.write_config(tmp_path_factory.mktemp("config"), SETTINGS | settings)


@pytest.fixture(scope="module")
def reward(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "reward"
    assert train(config, workdir) == 0
    return workdir


def test_a_reward_model_begins_at_ln_2_and_learns(reward):
    first, *_, last = train_records(reward)
    assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-7)
    assert last["loss_nats"] < first["loss_nats"]
    assert {"margin", "preference_accuracy", "chosen_score", "rejected_score"} <= first.keys()


@pytest.mark.slow
def test_a_reward_model_that_stops_resumes_to_the_same_bits(config, reward, tmp_path):
    assert train(config, tmp_path / "parts", "--stop_at=2") == 0
    assert train(config, tmp_path / "parts") == 0
    assert losses(reward) == losses(tmp_path / "parts")


def test_an_evaluation_has_the_accuracy_with_its_interval(reward, capsys):
    assert main(["eval", f"--workdir={reward}", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["sets"]["val"]
    logged = train_records(reward, "val")[-1]
    for name in ("loss_nats", "margin", "preference_accuracy", "chosen_score"):
        assert figures[name] == pytest.approx(logged[name], rel=1e-5), name
    low, high = (figures[f"preference_accuracy_{each}"] for each in ("low", "high"))
    assert 0 <= low <= figures["preference_accuracy"] <= high <= 1
    assert low < high
    assert figures["pairs"] == 14
    assert main(["eval", f"--workdir={reward}"]) == 0
    assert "95% interval" in capsys.readouterr().out


def test_scores_at_use_are_those_of_packed_pairs_in_training(config, reward, pairs, capsys):
    from jaxlm.data import preferred
    from jaxlm.recipes import setup
    from jaxlm.recipes.use import load
    from jaxlm.recipes.use.reward_model import RewardModel

    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    data = setup.open_data(load.read_config(reward))
    shards = data.validation["val"].shards
    held_out = [records[shards.origin(n)[1] - 1] for n in range(0, shards.documents, 2)]
    chosen = [preferred.parse(each, "pairs", ("assistant",)) for each in held_out]
    too_long = preferred.parse(records[0] | {"chosen": "1" * 60}, "pairs", ("assistant",))
    model = RewardModel(str(reward), "--judge")
    *scores, missing = model.scores([*chosen, too_long])
    assert missing is None
    assert model.scores(chosen[:1]) == scores[:1]
    logged = train_records(reward, "val")[-1]
    assert sum(scores) / len(scores) == pytest.approx(logged["chosen_score"], rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("verb", "flags", "code", "text"),
    [
        ("generate", ["--prompt=1"], 2, "jaxlm eval"),
        ("export", ["--out=OUT", "--to=gguf"], 2, "--to=hf"),
        ("eval", ["--text=TEXT"], 2, "its own pairs"),
    ],
)
def test_what_a_reward_model_cannot_do_is_refused(reward, tmp_path, capfd, verb, flags, code, text):
    (tmp_path / "a.txt").write_text("text\n")
    flags = [each.replace("OUT", f"{tmp_path}/out") for each in flags]
    flags = [each.replace("TEXT", f"{tmp_path}/a.txt") for each in flags]
    assert main([verb, f"--workdir={reward}", *flags]) == code
    assert text in capfd.readouterr().err


def test_an_export_is_a_classifier_of_one_label(reward, tmp_path, capfd):
    import jax
    import safetensors.numpy

    from jaxlm.recipes.use import load

    out = tmp_path / "out"
    assert main(["export", f"--workdir={reward}", f"--out={out}", "--json"]) == 0
    parity = json.loads(capfd.readouterr().out)["parity"]
    assert parity["is_bit_identical"]
    attributes = json.loads((out / "config.json").read_text())
    assert attributes["architectures"] == ["LlamaForSequenceClassification"]
    assert len(attributes["id2label"]) == 1
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors
    weight = jax.device_get(load.load_run(reward).params["reward"]["weight"])
    assert tensors["score.weight"].shape == (1, 16)
    assert (tensors["score.weight"][0] == weight).all()


@pytest.mark.slow
def test_labels_and_a_start_of_another_objective_are_refused(config, reward, tmp_path, capfd):
    assert train(config, tmp_path / "run", "--config.data.kind=labeled") == 2
    assert "--config.objective.loss=kto" in capfd.readouterr().err
    flags = ("--config.objective.name=preference", f"--init_from={reward}")
    assert train(config, tmp_path / "run", *flags) == 2
    assert "--config.objective.name=reward" in capfd.readouterr().err


@pytest.mark.slow
def test_an_adapter_trains_a_new_head_on_a_base_without_one(config, tmp_path, capsys):
    base, tuned, merged = tmp_path / "base", tmp_path / "tuned", tmp_path / "merged"
    orpo = ("--config.objective.name=preference", "--config.objective.loss=orpo")
    assert train(config, base, *orpo) == 0
    lora = ("--config.tune.name=lora", "--config.tune.rank=2", f"--init_from={base}")
    assert train(config, tuned, *lora) == 0
    first = train_records(tuned)[0]
    assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-7)
    whole = tmp_path / "whole"
    assert train(config, whole, f"--init_from={base}") == 0
    assert train_records(whole)[0]["loss_nats"] == pytest.approx(math.log(2), abs=1e-7)
    capsys.readouterr()
    assert main(["merge", f"--workdir={tuned}", f"--out={merged}"]) == 0
    assert "scores differ by " in capsys.readouterr().out
    assert main(["eval", f"--workdir={base}", f"--adapter={tuned}"]) == 2
    output = capsys.readouterr().err
    assert "objective.name = reward" in output
    assert f"jaxlm eval --workdir={tuned}" in output
    figures = []
    for workdir in (tuned, merged):
        capsys.readouterr()
        assert main(["eval", f"--workdir={workdir}", "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out)["sets"]["val"]["loss_nats"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


@pytest.mark.slow
def test_a_quantized_reward_model_is_compared_by_its_scores(reward, tmp_path, capsys):
    words = [f"--workdir={reward}", f"--out={tmp_path / 'codes'}", "--scheme=int8"]
    assert main(["quantize", *words, "--allow=loss:50%"]) == 0
    output = capsys.readouterr().out
    assert "loss_nats" in output
    assert "bits_per_byte" not in output
    assert "KL" not in output


def test_a_replayed_step_has_no_rows_of_tokens(reward, capsys):
    """A reward model's logits were never trained."""
    assert main(["replay", f"--workdir={reward}", "--step=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_as_logged"]
    assert report["rows"] == []


def test_layers_of_a_reward_model_are_not_left_out(reward, tmp_path, capsys):
    words = ["prune", f"--workdir={reward}", f"--out={tmp_path / 'small'}", "--keep=0"]
    assert main(words) == 2
    assert "this model scores answers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("context=2", "fsdp=2"), ("data=2",)])
def test_meshes_and_microbatches_agree(config, reward, tmp_path, mesh):
    flags = [f"--cpu_devices={2 ** len(mesh)}", *(f"--config.mesh.{axis}" for axis in mesh)]
    flags += ["--config.train.microbatches=2"]
    code, text = harness.run(harness.words(config, tmp_path / "run", *flags))
    assert code == 0, text
    for one, other in zip(train_records(tmp_path / "run"), train_records(reward), strict=True):
        for name in ("loss_nats", "margin", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--config.objective.name=preference",)])
def test_a_run_that_is_killed_resumes_to_the_same_bits(config, tmp_path, flags):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(config, whole, *flags) == 0
    code, text = harness.run(harness.words(config, killed, *flags), "step.before:sigkill@4")
    assert code == -9, text
    assert train(config, killed, *flags) == 0
    assert losses(killed) == losses(whole)
