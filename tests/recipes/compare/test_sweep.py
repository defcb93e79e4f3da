"""`jaxlm sweep`: real runs of all combinations, their directories, resuming and errors."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.recipes.compare import sweep
from jaxlm.recipes.config import Run
from tests import forked
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")
VARY = "--vary=optim.lr=1e-3,3e-3"
NAMES = {f"lr={lr},seed=0" for lr in ("0.001", "0.003")}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    settings = {"train.steps": 4, "eval.batches": 2, "eval.every": 2}
    return harness.write_config(tmp_path_factory.mktemp("texts"), settings)


def words(config, workdir, *flags):
    return ["sweep", f"--config={config}", f"--workdir={workdir}", *flags]


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory):
    """A sweep of two runs, whose processes are forked from one that has imported everything."""
    folder = tmp_path_factory.mktemp("sweep") / "lr"
    processes = types.SimpleNamespace(**vars(subprocess) | {"Popen": forked.Process})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "subprocess", processes)
        assert main(words(config, folder, VARY, "--parallel=2", "--quiet")) == 0
    return folder


@pytest.mark.slow
def test_each_combination_is_a_run_with_its_own_settings(swept):
    folders = {path.parent.name: path for path in swept.glob("*/config.json")}
    assert set(folders) == NAMES
    for name, path in folders.items():
        stored = json.loads(path.read_text())
        assert f"lr={stored['optim']['lr']},seed={stored['seed']}" == name
        end = json.loads((path.parent / "exit.json").read_text())
        assert (end["code"], end["step"]) == (0, 4)


def test_it_ends_in_a_comparison_and_a_second_start_trains_nothing(config, swept, capsys):
    before = {path: path.stat().st_mtime_ns for path in swept.glob("*/*.json*")}
    capsys.readouterr()
    assert main(words(config, swept, VARY, "--json")) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert {name for each in answer["results"] for name in each["runs"]} == NAMES
    assert set(answer["differences"]) == {"optim.lr"}
    assert set(answer["codes"].values()) == {0}
    assert answer["page"] == str(swept / "compare.html")
    assert (swept / "compare.html").is_file()
    assert printed.err.count("not started again") == 2
    assert before == {path: path.stat().st_mtime_ns for path in swept.glob("*/*.json*")}


@pytest.mark.slow
def test_the_comparison_joins_the_seeds_of_a_sweep(config, tmp_path, capsys):
    assert main(words(config, tmp_path / "sweep", VARY, "--seeds=2", "--json")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["doubt_of"] for each in answer["results"]] == ["seeds", "seeds"]
    for each in answer["results"]:
        assert len({name.split(",")[0] for name in each["runs"]}) == 1
        assert len(each["runs"]) == 2
    assert set(answer["differences"]) == {"seed", "optim.lr"}


@pytest.mark.slow
def test_a_sweep_of_more_values_keeps_the_runs_that_it_has(config, swept):
    more = sweep.members(config, [], ["optim.lr=0.001,0.01,3e-3"], 2, swept)
    assert {each.path.name for each in more} > NAMES
    assert len(more) == 6


@pytest.mark.slow
def test_runs_are_those_of_separate_commands(config, swept, tmp_path):
    assert main(harness.words(config, tmp_path / "run", "--config.optim.lr=3e-3")) == 0
    assert harness.losses(tmp_path / "run") == harness.losses(swept / "lr=0.003,seed=0")


def test_values_with_commas_are_separated_by_semicolons(config, tmp_path):
    flag = "optim.freeze=embedding/*,final_norm/*;final_norm/*"
    first, second = sweep.members(config, [], [flag], 1, tmp_path)
    assert first.run.optim.freeze == ("embedding/*", "final_norm/*")
    assert second.run.optim.freeze == ("final_norm/*",)
    assert first.path.name != second.path.name
    assert "/" not in first.path.name
    with pytest.raises(CommandError, match="ambiguous") as caught:
        sweep.members(config, [], ["optim.freeze=embedding/*,final_norm/*"], 1, tmp_path)
    assert caught.value.fix == "'--vary=optim.freeze=embedding/*;final_norm/*'"
    assert "--config.optim.freeze gives to all runs" in caught.value.why


def test_equal_ends_of_paths_give_different_names(config, tmp_path):
    vary = ["model.width=16,32", "model.dropout=0.0,0.1"]
    names = {each.path.name for each in sweep.members(config, [], vary, 1, tmp_path)}
    assert "width=16,dropout=0.1,seed=0" in names
    assert len(names) == 4
    vary = ["eval.every=1,2", "checkpoint.every=1,2"]
    names = {each.path.name for each in sweep.members(config, [], vary, 1, tmp_path)}
    assert "eval.every=1,checkpoint.every=2,seed=0" in names


@pytest.mark.parametrize(
    ("vary", "fix"),
    [
        ("optim.lrr=1e-3,3e-3", "--vary=optim.lr=1e-3,3e-3"),
        ("lr=1e-3,3e-3", "--vary=optim.lr=1e-3,3e-3"),
        ("train.step=1k,2", "--vary=train.steps=1000,2"),
        ("train.steps=2,1k", "--vary=train.steps=2,1000"),
        ("optim.name=lion,adamv", "--vary=optim.name=lion,adamw"),
        ("optim.frobnicate=1,2", "jaxlm config explain optim"),
        ("optim.freez=a/*,b/*;a/*", "'--vary=optim.freeze=a/*,b/*;a/*'"),
        ("optim.lr=1e-3,much", "jaxlm config explain optim.lr"),
    ],
)
def test_the_error_of_a_varied_setting_is_about_the_flag_that_was_typed(
    vary, fix, config, tmp_path
):
    """The fix was --config with one value, in place of the sweep."""
    with pytest.raises(ConfigError) as caught:
        sweep.members(config, [], ["seed=1,2", vary], 1, tmp_path)
    assert caught.value.where == f"--vary={vary}"
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (("--vary=optim.lr",), "--vary needs a setting", "--vary=optim.lr=1e-3,3e-3"),
        (("--vary=optim.lr=1e-3",), "a sweep needs two runs", "--seeds=2"),
        (("--seeds=0",), "--seeds=0 is below 1", "jaxlm sweep --help"),
        ((VARY, VARY), "optim.lr is varied twice", "jaxlm sweep --help"),
        (("--vary=optim.lr=1e-3,much",), "optim.lr", "jaxlm config explain optim.lr"),
        (("--config.optim.lr=1e-3,3e-3",), "has several values", "--vary=optim.lr=1e-3,3e-3"),
    ],
)
def test_a_wrong_sweep_is_refused_before_any_run(flags, what, fix, config, tmp_path, capsys):
    assert main(words(config, tmp_path / "new", *flags)) == 2
    printed = capsys.readouterr().err
    assert what in printed
    assert fix in printed
    assert not (tmp_path / "new").exists()


def test_a_folder_with_runs_of_other_settings_is_refused(config, swept, capsys):
    assert main(words(config, swept, VARY, "--config.train.steps=5")) == 2
    printed = capsys.readouterr().err
    assert "the folder contains a run with other settings" in printed
    assert f"--workdir={swept}-2" in printed


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_a_run_chose_when_it_began_is_no_other_setting(compute, config, tmp_path):
    """The same command was refused: its runs store the dtype in place of auto."""
    auto = [("precision.compute", "auto")]
    for member in sweep.members(config, auto, ["seed=1,2"], 1, tmp_path):
        member.path.mkdir()
        stored = configs.to_json(member.run.with_compute(compute))
        (member.path / "config.json").write_text(json.dumps(stored))
    assert len(sweep.members(config, auto, ["seed=1,2"], 1, tmp_path)) == 2
    with pytest.raises(ConfigError) as caught:
        sweep.members(config, [*auto, ("train.steps", "5")], ["seed=1,2"], 1, tmp_path)
    assert caught.value.why == "train.steps: 4 -> 5"
    with pytest.raises(ConfigError, match="other settings"):
        sweep.members(config, [("precision.compute", "float16")], ["seed=1,2"], 1, tmp_path)


def test_what_epochs_limited_is_no_other_setting_unless_it_is_typed(config, tmp_path):
    limit, vary = [("train.epochs", "2")], ["seed=1,2"]
    for member in sweep.members(config, limit, vary, 1, tmp_path):
        member.path.mkdir()
        shorter = member.run.changed({"train.steps": 3, "train.batch": 2})
        (member.path / "config.json").write_text(json.dumps(configs.to_json(shorter)))
    assert len(sweep.members(config, limit, vary, 1, tmp_path)) == 2
    for typed in (("train.steps", "4"), ("train.epochs", "3")):
        with pytest.raises(ConfigError, match="other settings"):
            sweep.members(config, [*limit, typed], vary, 1, tmp_path)


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others_and_its_code_is_that_of_the_sweep(
    config, tmp_path, capsys
):
    vary = "--vary=data.tokenizer=bytes;none.model;bytes"
    code = main(words(config, tmp_path / "s", vary, "--seeds=2", "--json"))
    answer = json.loads(capsys.readouterr().out)
    codes = {Path(path).name: each for path, each in answer["codes"].items()}
    failed = {each for name, each in codes.items() if "none" in name}
    assert failed == {code}
    assert code not in (0, 70)
    assert [each for name, each in codes.items() if "none" not in name] == [0, 0]


@pytest.mark.slow
def test_an_interrupted_sweep_saves_and_resumes_to_the_same_bits(config, tmp_path, swept):
    long = "--config.train.steps=400"
    command = words(config, tmp_path / "cut", VARY, long)
    process = harness.start(command)
    until = time.monotonic() + 200
    while not any(harness.records(p) for p in (tmp_path / "cut").glob("*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 75, printed
    assert "the sweep was interrupted" in printed
    (first, *others) = sorted((tmp_path / "cut").glob("lr=*"))
    assert others == []
    assert json.loads((first / "exit.json").read_text())["code"] == 75
    assert main([*command, "--quiet"]) == 0
    whole = tmp_path / "whole"
    flags = (f"--config.optim.lr={json.loads((first / 'config.json').read_text())['optim']['lr']}",)
    assert main(harness.words(config, whole, long, *flags)) == 0
    assert harness.losses(whole) == harness.losses(first)


def test_the_command_and_its_runs_use_the_same_python(monkeypatch, tmp_path, config):
    started = []
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda command, **_: started.append(command))
    (member, _) = sweep.members(config, [], ["seed=1,2"], 1, tmp_path)
    job = sweep._start(member, config, [("train.steps", "3")], ["--init_from=runs/a"], 1)
    job.output.close()
    (command,) = started
    assert command[:4] == [sys.executable, "-m", "jaxlm", "train"]
    assert {"--config.train.steps=3", "--config.seed=1", "--init_from=runs/a"} <= set(command)
    assert member.path.name == "seed=1"


def test_each_run_has_its_own_prefix_of_an_object_store(config, tmp_path):
    stored = [("checkpoint.directory", "s3://bucket/swept/")]
    runs = sweep.members(config, stored, ["optim.lr=0.1,0.2"], 1, tmp_path)
    assert [each.run.checkpoint.directory for each in runs] == [
        "s3://bucket/swept/lr=0.1,seed=0",
        "s3://bucket/swept/lr=0.2,seed=0",
    ]
    settings = [*stored, *runs[1].settings]
    assert configs.load(Run, config, settings).value == runs[1].run
