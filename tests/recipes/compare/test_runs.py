"""`jaxlm runs`: the state of real runs, from their files alone."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import faults
from jaxlm.core.errors import InputMissing
from jaxlm.recipes.compare import summary
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")
ROW = r"{0} +{1} +{2} +\S+ +\S+ +\d{{4}}-\d\d-\d\d \d\d:\d\d"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    settings = {"train.steps": 4, "eval.batches": 2, "eval.every": 2}
    return harness.write_config(tmp_path_factory.mktemp("texts"), settings)


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    """Runs that finished, stopped and diverged, and a folder that is no run."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(harness.words(config, folder / "whole")) == 0
    assert main(harness.words(config, folder / "deep/stopped", "--stop_at=2")) == 0
    wild = ("--config.guard.budget=2", "--config.guard.rewinds=0", "--config.train.steps=20")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_faults", faults.parse("batch:nan@3-99"))
        assert main(harness.words(config, folder / "wild", *wild)) == 79
    (folder / "notes").mkdir()
    (folder / "notes/config.json").write_text("{}")
    return folder


def listed(capsys, *words):
    capsys.readouterr()
    assert main(["runs", *map(str, words), "--json"]) == 0
    return {run["path"]: run for run in json.loads(capsys.readouterr().out)["runs"]}


def test_each_run_is_listed_with_its_state_and_its_results(folder, capsys):
    runs = listed(capsys, folder)
    names = ("whole", "deep/stopped", "wild")
    assert set(runs) == {str(folder / name) for name in names}
    whole, stopped, wild = (runs[str(folder / name)] for name in names)
    assert (whole["status"], whole["code"], whole["step"], whole["steps"]) == ("finished", 0, 4, 4)
    assert whole["best"] == harness.store(folder / "whole").record(4).meta["progress"]["best_loss"]
    evaluations = [r for r in harness.records(folder / "whole") if r["split"] == "val"]
    first, last = (each for each in evaluations if each["step"])
    assert "ranking_loss_nats" not in first, "its loss is that of two batches"
    assert last["ranking_loss_nats"] != last["loss_nats"], "its loss is that of the whole set"
    assert whole["best"] == min(first["loss_nats"], last["ranking_loss_nats"])
    assert whole["tokens_per_second"] > 0
    assert abs(whole["time_unix"] - time.time()) < 3600
    assert (stopped["status"], stopped["step"], stopped["steps"]) == ("stopped", 2, 4)
    assert (wild["status"], wild["code"]) == ("failed", 79)


def test_the_list_is_a_row_for_each_run_the_newest_first(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["runs"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == ["run", "status", "step", "best nats", "tokens/s", "when"]
    assert re.match(ROW.format("wild", r"failed \(79\)", r"\d+/20"), rows[0])
    assert any(re.match(ROW.format("deep/stopped", "stopped", "2/4"), row) for row in rows)
    assert any(re.match(ROW.format("whole", "finished", "4/4"), row) for row in rows)
    assert [run.path.name for run in summary.find(folder)] == ["wild", "stopped", "whole"]


def test_a_run_with_rewards_is_listed_with_its_best_reward(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    lines = [{"step": 1, "split": "val", "reward": each, "loss_nats": -each} for each in (0.5, 0)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines[:1]))
    assert main(["runs", str(tmp_path)]) == 0
    assert "  reward 0.5  " in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(lines[1])}\n")
    assert main(["runs", str(tmp_path)]) == 0
    assert "  reward 0  " in capsys.readouterr().out


def test_a_run_that_trains_is_running_and_one_that_was_killed_is_not(config, tmp_path, capsys):
    steps = "--config.train.steps=100000"
    process = harness.start(harness.words(config, tmp_path / "run", steps))
    try:
        until = time.monotonic() + 120
        while not harness.records(tmp_path / "run") and time.monotonic() < until:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        (run,) = listed(capsys, tmp_path).values()
        assert (run["status"], run["code"], run["steps"]) == ("running", None, 100000)
        assert run["step"] > 0
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    (run,) = listed(capsys, tmp_path).values()
    assert run["status"] == "killed"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "exit.json"])
def test_a_damaged_run_is_listed_as_such(name, config, folder, tmp_path, capsys):
    run = tmp_path / "broken"
    run.mkdir()
    for each in ("config.json", "metrics.jsonl", "exit.json"):
        text = (folder / "whole" / each).read_text()
        (run / each).write_text(f"[\n{text}" if each == name else text)
    assert listed(capsys, tmp_path)[str(run)]["status"] == "damaged"
    assert main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "damaged" in printed.splitlines()[1]
    assert f"{run}: {run / name}" in printed


def test_an_imported_model_is_listed_as_imported(folder, tmp_path, capsys):
    words = ["export", f"--workdir={folder / 'whole'}", f"--out={tmp_path / 'hf'}", "--quiet"]
    assert main(words) == 0
    words = ["import", f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'again'}", "--quiet"]
    assert main(words) == 0
    (run,) = listed(capsys, tmp_path).values()
    assert (run["path"], run["status"]) == (str(tmp_path / "again"), "imported")


def test_a_folder_without_runs_is_none_and_a_missing_one_an_error(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "none")]) == 66
    assert "there is no such folder" in capsys.readouterr().err


def test_the_list_imports_no_jax(folder):
    code = (
        "import sys; from jaxlm.cli.main import main; "
        f"main(['runs', {str(folder)!r}, '--quiet']); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_run_of_rewards_without_an_evaluation_is_a_row(monkeypatch, capsys):
    listing = [summary.RunSummary(path=Path("r"), status="stopped", step=3, is_rewarded=True)]
    monkeypatch.setattr(summary, "find", lambda folder: listing)
    assert main(["runs"]) == 0
    assert re.search(r"^r +stopped +3 +- ", capsys.readouterr().out, re.MULTILINE)


def test_a_folder_that_cannot_be_listed_is_an_error_or_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs/closed").mkdir(parents=True)
    scan, closed = os.scandir, str(tmp_path / "runs/closed")

    def scandir(path):
        if str(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), closed)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert listed(capsys, tmp_path)[closed]["cause"] == "Permission denied"
    assert main(["runs", closed]) == InputMissing.code
    assert f"fix    ls -ld {closed}" in capsys.readouterr().err
