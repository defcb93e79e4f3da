"""`jaxlm checkpoint`: list, inspect, diff and verify, on a tiny run and on broken copies."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps that saved every second, and resumed at the fourth with longer samples."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "texts").mkdir()
    config = harness.write_config(folder / "texts")
    evaluation = "--config.eval.every=4", "--config.eval.batches=all"
    words = harness.words(config, folder / "a", *evaluation, "--config.train.steps=6")
    assert main([*words, "--stop_at=4"]) == 0
    assert main([*words, "--config.sample.max_tokens=7"]) == 0
    return folder / "a"


@pytest.fixture
def broken(run, tmp_path):
    """A copy of the run with one flipped bit in an array of step 4, and the name of the file."""
    shutil.copytree(run, tmp_path / "a")
    step = tmp_path / "a/checkpoints/4"
    largest = max(
        (path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return tmp_path / "a", largest.relative_to(step).as_posix()


def answer(capsys, *words, code=0):
    """The JSON output of the verb."""
    assert main(["checkpoint", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def snapshot(folder: Path):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def test_the_list_has_every_step_with_its_marks(run, capsys):
    report = answer(capsys, "list", f"--workdir={run}")
    assert [row["step"] for row in report["steps"]] == [2, 4, 6]
    assert (report["newest"], report["quarantine"]) == (6, [])
    losses = {row["step"]: row["loss_nats"] for row in report["steps"]}
    evaluated = {r["step"]: r["loss_nats"] for r in harness.records(run) if r["split"] == "val"}
    assert losses == {2: None} | evaluated
    assert report["best"] == min(evaluated, key=evaluated.get)
    for row in report["steps"]:
        folder = run / "checkpoints" / str(row["step"])
        files = json.loads((folder / "digests.json").read_text())["files"]
        assert row["bytes"] == sum((folder / name).stat().st_size for name in files) > 100_000
        assert row["healthy"]
    assert main(["checkpoint", "list", f"--workdir={run}"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[0] == "6"


def test_the_list_says_what_is_wrong_and_what_lies_in_the_quarantine(broken, capsys):
    workdir, _ = broken
    (workdir / "checkpoints/2/digests.json").write_text("{}")
    folder = workdir / "quarantine/3"
    folder.mkdir(parents=True)
    (workdir / "quarantine/3.reason.txt").write_text("abandoned by the rewind to 2\n")
    report = answer(capsys, "list", f"--workdir={workdir}")
    assert "digests.json does not match its own digest" in report["steps"][0]["problem"]
    assert [row["problem"] for row in report["steps"][1:]] == [None, None]
    assert report["quarantine"] == [{"path": str(folder), "reason": "abandoned by the rewind to 2"}]
    assert main(["checkpoint", "list", f"--workdir={workdir}"]) == 0
    shown = capsys.readouterr().out
    assert "digests.json does not" in shown
    assert f"{folder}: abandoned by the rewind to 2" in shown


def test_inspect_tells_what_was_saved_and_the_layout_of_every_array(run, capsys):
    report = answer(capsys, "inspect", f"--workdir={run}", "--step=4")
    record = harness.store(run).record(4)
    assert {name: report[name] for name in ("data", "progress", "evaluation", "rewinds")} == {
        name: record.meta[name] for name in ("data", "progress", "evaluation", "rewinds")
    }
    arrays = harness.store(run).arrays(4)
    assert {leaf["path"]: (leaf["dtype"], tuple(leaf["shape"])) for leaf in report["leaves"]} == {
        path: (array.dtype.name, array.shape) for path, array in arrays.items()
    }
    assert report["state_bytes"] == sum(array.nbytes for array in arrays.values())
    assert list(report["groups"]) == ["guard", "opt_state", "params", "step"]
    assert sum(report["groups"].values()) == report["state_bytes"]
    assert answer(capsys, "inspect", f"--workdir={run}")["step"] == 6
    assert main(["checkpoint", "inspect", f"--workdir={run}", "--step=4"]) == 0
    shown = capsys.readouterr().out
    assert all(path in shown for path in arrays)
    assert record.owner in shown


def test_a_step_differs_from_itself_in_nothing(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "copy")
    words = (f"--workdir={run}", "--step=4", f"--other_workdir={tmp_path}/copy")
    report = answer(capsys, "diff", *words)
    assert report["is_identical"]
    assert report["identical"] > 20
    assert (report["different"], report["layouts"], report["config"]) == ([], [], [])


def test_two_steps_differ_where_their_arrays_and_settings_do(run, capsys):
    words = (f"--workdir={run}", "--step=4", "--other=6")
    report = answer(capsys, "diff", *words)
    assert not report["is_identical"]
    assert report["config"] == [{"path": "sample.max_tokens", "old": 64, "new": 7}]
    a, b = (harness.store(run).arrays(step) for step in (4, 6))
    unequal = {path for path in a if a[path].tobytes() != b[path].tobytes()}
    assert {leaf["path"] for leaf in report["different"]} == unequal
    assert any(path.startswith("params/") for path in unequal)
    for leaf in report["different"]:
        gap = np.abs(a[leaf["path"]].astype(np.float64) - b[leaf["path"]])
        assert leaf["max_abs_difference"] == gap.max() > 0
        assert leaf["of"] == gap.size
    (number,) = (leaf for leaf in report["different"] if leaf["path"] == "step")
    assert (number["max_abs_difference"], number["elements"], number["of"]) == (2, 1, 1)
    assert report["identical"] == len(a) - len(unequal)
    assert main(["checkpoint", "diff", *words]) == 0
    assert "sample.max_tokens: 64 -> 7" in capsys.readouterr().out


def test_a_diff_with_nothing_is_refused(run, capsys):
    error = answer(capsys, "diff", f"--workdir={run}", "--step=2", code=2)["error"]
    assert "--other=" in error["fix"]


def test_verify_reads_every_byte_and_modifies_nothing(run, capsys):
    before = snapshot(run)
    report = answer(capsys, "verify", f"--workdir={run}")
    assert report == {"sound": [2, 4, 6], "damaged": {}}
    assert snapshot(run) == before


def test_a_flipped_bit_ends_verify_with_65_and_names_the_file_and_the_step(broken, capsys):
    workdir, name = broken
    before = snapshot(workdir)
    report = answer(capsys, "verify", f"--workdir={workdir}", code=65)
    assert report == {
        "sound": [2, 6],
        "damaged": {"4": [f"{name} has other contents than were written"]},
    }
    assert snapshot(workdir) == before
    assert main(["checkpoint", "verify", f"--workdir={workdir}", "--step=4", "--quiet"]) == 65
    assert f"step 4: {name} has other contents" in capsys.readouterr().out
    assert main(["checkpoint", "verify", f"--workdir={workdir}", "--step=6"]) == 0


@pytest.mark.slow
def test_a_step_that_its_run_removes_meanwhile_is_not_called_damaged(
    run, tmp_path, capsys, monkeypatch
):
    shutil.copytree(run, tmp_path / "a")
    problems = Store.problems

    def late(store, step):
        if step == 2:
            shutil.rmtree(tmp_path / "a/checkpoints/2")
        return problems(store, step)

    monkeypatch.setattr(Store, "problems", late)
    report = answer(capsys, "verify", f"--workdir={tmp_path}/a")
    assert report == {"sound": [4, 6], "damaged": {}}


def test_a_damaged_step_is_not_opened(broken, capsys):
    workdir, name = broken
    for words in (["inspect", "--step=4"], ["diff", "--step=6", "--other=4"]):
        error = answer(capsys, *words, f"--workdir={workdir}", code=65)["error"]
        assert name in error["why"]


def test_what_is_not_there_ends_with_66_and_the_steps_that_are(run, tmp_path, capsys):
    for action in ("inspect", "verify"):
        error = answer(capsys, action, f"--workdir={run}", "--step=3", code=66)["error"]
        assert error["why"] == "committed steps: 2, 4, 6"
        answer(capsys, action, f"--workdir={run}", error["fix"])
    for action in ("list", "verify"):
        error = answer(capsys, action, f"--workdir={tmp_path}", code=66)["error"]
        assert str(tmp_path) in error["where"]
