"""Averages by the command line: kept, saved, resumed, evaluated, used, made of checkpoints."""

import json
import math
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxlm
from jaxlm.cli.main import main
from jaxlm.recipes.compare import summary
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "checkpoint.every": 1,
    "checkpoint.keep_last": 20,
    "eval.every": 6,
    "average.name": "ema",
    "average.decay": 0.9,
    "average.begin": "3",
    "train.steps": 8,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "ema")


def params(run, step):
    """The parameters of a step, by path, in float64."""
    return {
        path.removeprefix("params/"): np.asarray(leaf, np.float64)
        for path, leaf in harness.store(run).arrays(step).items()
        if path.startswith("params/")
    }


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_saved_is_the_average_of_what_was_saved_before(run):
    arrays = harness.store(run).arrays(8)
    saved = params(run, 3)
    for n in range(1, 6):
        decay = min(0.9, (1 + n) / (10 + n))
        for path, p in params(run, 3 + n).items():
            saved[path] = decay * saved[path] + (1 - decay) * p
    for path, expected in saved.items():
        np.testing.assert_allclose(arrays[f"average/{path}"], expected, rtol=1e-5, atol=1e-7)
        assert (arrays[f"average/{path}"] != arrays[f"params/{path}"]).any()


@pytest.mark.slow
def test_stopping_and_going_on_changes_no_bit_of_it(config, run, tmp_path):
    assert main([*harness.words(config, tmp_path / "run"), "--stop_at=5"]) == 0
    assert main(harness.words(config, tmp_path / "run")) == 0
    assert harness.state_digest(tmp_path / "run") == harness.state_digest(run)
    assert harness.losses(tmp_path / "run") == harness.losses(run)


def test_it_is_evaluated_beside_the_parameters_and_on_demand(run, capsys):
    rows = {(r["split"], r["step"]): r for r in harness.records(run) if r["split"] != "train"}
    assert set(rows) == {(name, step) for name in ("val", "val.ema") for step in (6, 8)}
    losses = {
        name: answer(capsys, "eval", f"--workdir={run}", *flags)["loss_nats"]
        for name, flags in (("val", ()), ("val.ema", ("--weights=ema",)))
    }
    for name, loss in losses.items():
        assert loss == pytest.approx(rows[name, 8]["loss_nats"], rel=1e-6)
    assert abs(losses["val"] - losses["val.ema"]) > 1e-4


@pytest.mark.slow
def test_it_writes_text_and_is_exported(run, tmp_path, capsys):
    words = ["generate", f"--workdir={run}", "--temperature=0", "--max_tokens=4", "--prompt=one"]
    assert len(answer(capsys, *words, "--weights=ema")["samples"][0]["ids"]) > 0
    out = tmp_path / "hub"
    answer(capsys, "export", f"--workdir={run}", f"--out={out}", "--weights=ema")
    table = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    assert (table == harness.store(run).arrays(8)["average/embedding/table"]).all()


def test_a_model_that_was_loaded_with_the_average_exports_it(run, tmp_path):
    jaxlm.load(run, weights="ema").export(tmp_path / "ema")
    table = load_file(tmp_path / "ema/model.safetensors")["model.embed_tokens.weight"]
    assert (table == harness.store(run).arrays(8)["average/embedding/table"]).all()


def test_an_average_that_has_not_begun_is_named_as_such(run, capsys):
    words = ["eval", f"--workdir={run}", "--weights=ema"]
    assert main([*words, "--step=3"]) == 0
    assert "at step 3 the ema average is the parameters: it begins at 4" in capsys.readouterr().out
    assert main([*words, "--step=4"]) == 0
    assert "it begins" not in capsys.readouterr().out


def test_a_run_of_its_weights_names_no_average(run, tmp_path, capsys):
    words = ["prune", f"--workdir={run}", f"--out={tmp_path / 'small'}", "--keep=0"]
    answer(capsys, *words, "--weights=ema", "--batches=1")
    config = json.loads((tmp_path / "small/config.json").read_text())
    assert config["average"] == {"name": "none"}


def test_an_average_that_the_run_has_not_is_refused(run, capsys):
    assert main(["eval", f"--workdir={run}", "--weights=swa"]) == 2
    output = capsys.readouterr().err
    assert "stores no swa" in output
    assert "--weights=ema" in output


@pytest.mark.slow
def test_swa_from_a_step_on_its_own_schedule_is_evaluated_and_exported(config, tmp_path, capsys):
    """Cycles of two updates from the fourth on, at half of the peak and then a tenth.

    Their ends are averaged.
    """
    run = tmp_path / "run"
    settings = {"name": "swa", "begin": 4, "every": 2, "high": 0.5, "low": 0.1}
    flags = [f"--config.average.{name}={value}" for name, value in settings.items()]
    flags += ["--config.schedule.name=constant", "--config.schedule.warmup=0"]
    assert main(harness.words(config, run, *flags, "--config.optim.lr=0.01")) == 0
    train = [r for r in harness.records(run) if r["split"] == "train"]
    rates = [r["learning_rate"] for r in train]
    assert rates == pytest.approx([0.01] * 4 + [0.005, 0.001] * 2)
    arrays = harness.store(run).arrays(8)
    for path, last in params(run, 8).items():
        mean = (params(run, 6)[path] + last) / 2
        np.testing.assert_allclose(arrays[f"average/{path}"], mean, rtol=1e-5, atol=1e-7)
    losses = {r["split"]: r["loss_nats"] for r in harness.records(run) if r["step"] == 8}
    capsys.readouterr()
    loss = answer(capsys, "eval", f"--workdir={run}", "--weights=swa")["loss_nats"]
    assert loss == pytest.approx(losses["val.swa"], rel=1e-6)
    assert abs(loss - losses["val"]) > 1e-4
    out = tmp_path / "hub"
    answer(capsys, "export", f"--workdir={run}", f"--out={out}", "--weights=swa")
    table = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    assert (table == arrays["average/embedding/table"]).all()


@pytest.mark.slow
def test_a_run_may_begin_to_average_later_and_stop_to(config, run, tmp_path):
    """With the user's word. It begins at the parameters that are there."""
    workdir = tmp_path / "run"
    none = "--config.average.name=none"
    assert main([*harness.words(config, workdir), none, "--stop_at=4"]) == 0
    assert not any(path.startswith("average/") for path in harness.store(workdir).arrays(4))
    assert main(harness.words(config, workdir)) == 2
    allowed = [*harness.words(config, workdir), "--allow_change=average"]
    assert main([*allowed, "--stop_at=5"]) == 0
    before, arrays = params(workdir, 4), harness.store(workdir).arrays(5)
    decay = min(0.9, 3 / 12)
    for path, p in params(workdir, 5).items():
        expected = decay * before[path] + (1 - decay) * p
        np.testing.assert_allclose(arrays[f"average/{path}"], expected, rtol=1e-5, atol=1e-7)
    assert main([*allowed, none, "--stop_at=6"]) == 0
    assert not any(path.startswith("average/") for path in harness.store(workdir).arrays(6))
    assert params(workdir, 6).keys() == before.keys()
    for path, p in params(workdir, 6).items():
        np.testing.assert_array_equal(p, params(run, 6)[path])


@pytest.mark.slow
def test_a_run_from_anothers_weights_begins_its_average_there(config, run, tmp_path):
    workdir = tmp_path / "run"
    words = [*harness.words(config, workdir), f"--init_from={run}", "--stop_at=1"]
    assert main([*words, "--config.average.begin=0"]) == 0
    arrays = harness.store(workdir).arrays(0)
    for path, p in params(run, 8).items():
        np.testing.assert_array_equal(arrays[f"average/{path}"], p)
    assert math.isfinite(harness.records(workdir)[0]["loss_nats"])


def test_checkpoints_are_averaged_into_a_run_that_can_be_used(run, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["average", f"--workdir={run}", "--steps=6,7", f"--with={run}@8", "--proportions=1,2,5"]
    averaged = answer(capsys, *words, f"--out={out}")
    assert [each["share"] for each in averaged["of"]] == [1 / 8, 2 / 8, 5 / 8]
    mixed = [params(run, step) for step in (6, 7, 8)]
    for path, leaf in harness.store(out).arrays(0).items():
        p, q, r = (each[path.removeprefix("params/")] for each in mixed)
        assert (leaf == ((p + 2 * q + 5 * r) / 8).astype(np.float32)).all()
        assert leaf.dtype == np.float32
    assert averaged["parameters"] == sum(each.size for each in mixed[0].values())
    assert main(["eval", f"--workdir={out}"]) == 0
    assert "caution" not in capsys.readouterr().out
    facts = json.loads((out / "imported.json").read_text())
    facts["data"]["validation.val"] = "another digest"
    (out / "imported.json").write_text(json.dumps(facts))
    assert main(["eval", f"--workdir={out}"]) == 0
    assert "caution: val is not the set of the training" in capsys.readouterr().out
    assert summary.summarize(out).status == "averaged"
    assert main([*words, f"--out={out}"]) == 2, "nothing is overwritten"


def test_of_two_runs_the_newest_steps_are_averaged(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    words = ["average", f"--workdir={run}", f"--with={other}", f"--out={tmp_path / 'out'}"]
    newest = harness.store(run).steps()[-1]
    assert answer(capsys, *words)["of"] == [
        {"run": str(each), "step": newest, "share": 0.5} for each in (run, other)
    ]


def test_an_average_has_the_files_that_came_with_the_weights(run, tmp_path, capsys):
    """Without them it has no chat template, and an export of it no tokenizer."""
    copy, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, copy)
    (copy / "hub").mkdir()
    (copy / "hub/chat_template.jinja").write_text("{{ x }}")
    answer(capsys, "average", f"--workdir={copy}", "--steps=6,7", f"--out={out}")
    assert (out / "hub/chat_template.jinja").read_text() == "{{ x }}"


@pytest.mark.slow
def test_what_cannot_be_averaged_is_refused(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    changed = json.loads((other / "config.json").read_text())
    changed["model"]["norm_eps"] = 1e-3
    (other / "config.json").write_text(json.dumps(changed))

    def said(*flags):
        code = main(["average", f"--workdir={run}", f"--out={tmp_path / 'out'}", *flags])
        return code, capsys.readouterr().err

    for flags, code, word in (
        (("--steps=7", f"--with={other}@8"), 65, "model.norm_eps"),
        (("--newest=2", "--proportions=1,2,3"), 2, "jaxlm average --help"),
        (("--newest=2", "--proportions=1,-1"), 2, "at least zero"),
        (("--newest=2", "--proportions=1,x"), 2, "not a number"),
        (("--newest=99",), 2, "committed steps"),
        (("--steps=7",), 2, "several"),
        (("--steps=7,7",), 2, "several"),
        (("--steps=7,99",), 66, "no checkpoint of step 99"),
        ((), 2, "no step is named"),
    ):
        message = said(*flags)
        assert message[0] == code, (flags, message)
        assert word in message[1]
    assert not (tmp_path / "out").exists()
