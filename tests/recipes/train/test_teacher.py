"""Runs with a frozen teacher, by the command line: learning, resuming, replay, and refusals."""

import json
import re
import shutil

import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import ConfigError
from jaxlm.recipes.train import reference
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "train.steps": 6,
    "checkpoint.every": 2,
    "sample.prompts": (),
    "eval.batches": 2,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def teacher(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "teacher")


def distill(teacher, *flags):
    return ["--config.objective.name=distill", f"--config.objective.teacher={teacher}", *flags]


def files_of(workdir):
    return {path: path.read_bytes() for path in sorted(workdir.rglob("*")) if path.is_file()}


def test_a_student_learns_from_a_run_which_stays_as_it_is(config, teacher, tmp_path):
    before = files_of(teacher)
    assert main(harness.words(config, tmp_path / "run", *distill(teacher))) == 0
    assert files_of(teacher) == before
    records = harness.records(tmp_path / "run")
    first, *_, last = (r for r in records if r["split"] == "train")
    assert last["teacher_kl_nats"] < first["teacher_kl_nats"]
    assert last["loss_nats"] < first["loss_nats"]
    validation = [r for r in records if r["split"] == "val"]
    assert validation
    assert all("bits_per_byte" in r for r in validation)
    assert all(0 <= r["draft_greedy"] <= 1 <= r["draft_greedy_tokens"] for r in validation)
    log = (tmp_path / "run/log.txt").read_text()
    assert f"distill; teacher {teacher}; evaluated as causal" in log
    assert "of teacher" in log  # the memory of its parameters
    assert re.search(r"best +step 6, [\d.]+ nats on val", log)


@pytest.mark.slow
def test_a_smaller_student_of_another_family_in_microbatches(config, teacher, tmp_path):
    flags = ["--config.model.family=gpt2", "--config.model.width=32", "--config.model.depth=1"]
    flags += ["--config.model.heads=2", "--config.train.microbatches=2", "--config.loss.chunk=32"]
    assert main(harness.words(config, tmp_path / "run", *distill(teacher), *flags)) == 0
    assert "teacher_kl_nats" in harness.records(tmp_path / "run")[0]


@pytest.mark.slow
def test_a_distillation_that_stops_resumes_to_the_same_bits(config, teacher, tmp_path):
    def losses(workdir):
        return [float(r["loss_nats"]).hex() for r in harness.records(workdir)]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(harness.words(config, whole, *distill(teacher))) == 0
    assert main(harness.words(config, parts, *distill(teacher), "--stop_at=2")) == 0
    assert main(harness.words(config, parts, *distill(teacher))) == 0
    assert losses(whole) == losses(parts)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ([], 2, "--config.objective.teacher=RUN"),
        (["--config.objective.teacher=missing"], 66, "there is no config.json"),
        (["--config.objective.teacher=TEACHER@100"], 66, "no checkpoint of step 100"),
        (
            ["--config.objective.teacher=TEACHER", "--config.model.vocab=1024"],
            2,
            "--config.model.vocab=",
        ),
        (
            ["--config.objective.teacher=TEACHER", "--config.data.tokenizer=bpe:300"],
            2,
            "--config.data.tokenizer=",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(
    config, teacher, tmp_path, capsys, flags, code, text
):
    flags = [flag.replace("TEACHER", str(teacher)) for flag in flags]
    words = harness.words(config, tmp_path / "run", "--config.objective.name=distill", *flags)
    assert main(words) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.parametrize("kind", ["masked", pytest.param("prefix", marks=pytest.mark.slow)])
def test_a_run_that_predicts_no_next_token_teaches_nothing(config, teacher, tmp_path, capsys, kind):
    """It is no teacher, and no reference of preferences and policies."""
    copy = tmp_path / kind
    shutil.copytree(teacher, copy)
    settings = json.loads((copy / "config.json").read_text())
    settings["objective"] = {"name": kind}
    (copy / "config.json").write_text(json.dumps(settings))
    text = f"it was trained with the objective {kind}"
    assert main(harness.words(config, tmp_path / "run", *distill(copy))) == 2
    assert text in capsys.readouterr().err
    words = [f"--workdir={copy}", f"--config={config}", f"--out={tmp_path / 'rows'}"]
    assert main(["teach", *words]) == 2
    assert text in capsys.readouterr().err
    with pytest.raises(ConfigError, match="does not predict each token") as caught:
        reference.find_named(str(copy), "", print)
    assert caught.value.fix == "name a --config.objective.reference of the objective causal"


def deleted(copy):
    shutil.rmtree(copy)


def replaced(copy):
    """The newest step is another one, of the same path."""
    shutil.rmtree(copy / "checkpoints/6")


def in_another_precision(copy):
    file = copy / "config.json"
    file.write_text(file.read_text().replace('"products": "compute"', '"products": "int8"'))


@pytest.mark.slow
def test_a_teacher_that_changed_is_refused_when_the_run_resumes(config, teacher, tmp_path, capsys):
    """Resumed with another teacher, a run would minimize another loss from one step to the next."""
    run, copy = tmp_path / "run", tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    assert main(harness.words(config, run, *distill(copy), "--stop_at=2")) == 0
    for change, code, text in (
        (in_another_precision, 2, "data (teacher.precision)"),
        (replaced, 2, "data (teacher)"),
        (deleted, 66, "there is no config.json"),
    ):
        shutil.rmtree(copy)
        shutil.copytree(teacher, copy)
        change(copy)
        capsys.readouterr()
        assert main(harness.words(config, run, *distill(copy))) == code, text
        assert text in capsys.readouterr().err
    assert main(harness.words(config, run, *distill(f"{teacher}@4"))) == 2
    assert "objective.teacher" in capsys.readouterr().err
    exits = json.loads((run / "exit.json").read_text())
    assert exits["code"] == 0


@pytest.mark.slow
def test_a_step_of_a_distillation_is_replayed_to_the_same_loss(config, teacher, tmp_path, capsys):
    assert main(harness.words(config, tmp_path / "run", *distill(teacher))) == 0
    capsys.readouterr()
    assert main(["replay", f"--workdir={tmp_path / 'run'}", "--step=3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    logged = {
        r["step"]: r["loss_nats"]
        for r in harness.records(tmp_path / "run")
        if r["split"] == "train"
    }
    assert answer["loss_nats"] == logged[3]


def test_a_command_that_opens_no_teacher_refuses_the_objective(config, teacher):
    words = ["check", f"--config={config}", *distill(teacher), "--config.mesh.fsdp=2"]
    code, output = harness.run(words)
    assert code == 2, output
    assert "--config.objective.name=causal" in output


def test_a_plan_counts_the_teacher(config, teacher, capsys):
    words = ["plan", f"--config={config}", "--on=cpu", "--json"]
    plans = []
    for flags in ([], distill(teacher), distill("elsewhere")):
        assert main([*words, *flags]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    plain, known, unknown = plans
    assert "teacher" not in plain["bytes_per_device"]
    assert known["bytes_per_device"]["teacher"] > 4 * known["parameters"]
    assert known["step_seconds"][0] > plain["step_seconds"][0]
    assert known["bytes_per_device"]["teacher"] == unknown["bytes_per_device"]["teacher"]
    assert any("not on this machine" in line for line in unknown["assumed"])
