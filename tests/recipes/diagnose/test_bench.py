"""bench measures the step of standard sizes, and compares with an earlier time."""

import json

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.models.cost import model_cost
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import bench


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_bench_measures_and_compares(tmp_path, capsys):
    words = ["bench", "--sizes=0.8M", "--seconds=0.1", "--config.model.depth=1"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (row,) = answer["rows"]
    assert row["steps"] >= bench.MIN_STEPS
    low, middle, high = row["step_seconds"]
    assert 0 < low <= middle <= high
    assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / middle)
    assert row["mfu"] is None  # no CPU has a published peak
    assert 0.5 < row["planned_bytes_per_device"] / row["bytes_per_device"] < 2
    assert 0 < row["loss_nats"] < 10
    assert answer["environment"]["packages"]["jax"]
    row["tokens_per_second"] *= 2
    (tmp_path / "before.json").write_text(json.dumps(answer))
    assert main([*words, f"--compare={tmp_path}/before.json"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[-2].split()[:2] == ["size", "parameters"]
    assert 0.01 < float(table[-1].split()[-1]) < 5


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "settings",
    [
        {"tune.name": "dora"},
        {"tune.name": "qlora", "objective.name": "distill", "objective.teacher": "RUN"},
        {"model.family": "t5", "objective.name": "span"},
        {"objective.name": "masked", "model.family": "bert"},
    ],
)
def test_a_step_of_any_kind_is_measured(settings, capsys):
    words = [f"--config.{path}={value}" for path, value in settings.items()]
    words += ["--sizes=0.8M", "--seconds=0.1", "--config.model.depth=1", "--json"]
    assert main(["bench", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < row["loss_nats"] < 20


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("0.8M", 0.7e6, 0.9e6), ("4M", 3e6, 5e6), ("124M", 123e6, 126e6), ("1B", 1.2e9, 1.3e9)],
)
def test_sizes_are_named_by_their_parameters(name, least, most):
    run = config.load(Run, None, list(bench.SIZES[name].items())).value
    assert least < model_cost.parameters(run.model.build()) < most


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--sizes=2M"], 2, "size '2M' does not exist"),
        (["--config=configs/quickstart.py"], 2, "bench takes no --config"),
        (["--compare=nowhere.json"], 66, "the bench file does not exist"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, code, message, capsys):
    assert main(["bench", *words]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rows": [{}]}', '{"rows": [{"size": "4M", "tokens_per_second": "many"}]}']
)
def test_a_file_that_is_no_bench_is_refused(text, tmp_path, capsys):
    (tmp_path / "b.json").write_text(text)
    assert main(["bench", f"--compare={tmp_path}/b.json"]) == 65
    what = "is not a bench result" if text else "cannot be read"
    assert f"the bench file {what}" in capsys.readouterr().err
