import json
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from jaxlm.core.errors import ConfigError, Diverged, InputMissing, InUse, NotWritable
from jaxlm.training import rundir
from jaxlm.training.rundir import RunDir, read_json
from tests import machine


def error(kind):
    return kind("no", where="here", why="so", fix="--mend")


def test_a_way_out_is_written_with_its_code(tmp_path):
    with RunDir(tmp_path / "a") as run:
        run.step = 7
    assert read_json(tmp_path / "a", "exit.json") | {"time_unix": 0} == {
        "code": 0,
        "step": 7,
        "cause": "finished",
        "time_unix": 0,
    }
    for failure, code in ((error(Diverged), 79), (KeyboardInterrupt(), 130), (ValueError("x"), 70)):
        with pytest.raises(type(failure)), RunDir(tmp_path / "a") as run:
            raise failure
        assert read_json(tmp_path / "a", "exit.json")["code"] == code


def test_who_finds_the_run_finished_leaves_its_note_as_it_was(tmp_path):
    def enter(step):
        with RunDir(tmp_path) as run:
            run.step = step
        return (tmp_path / "exit.json").read_bytes()

    left = enter(7)
    assert enter(7) == left
    assert enter(8) != left
    (tmp_path / "exit.json").write_text("[")
    assert json.loads(enter(8))["step"] == 8


def test_a_refusal_leaves_the_note_of_the_run_that_was_there_before(tmp_path):
    def fail(kind, *, has_begun):
        with pytest.raises(kind), RunDir(tmp_path) as run:
            run.has_begun = has_begun
            raise error(kind)
        return read_json(tmp_path, "exit.json")["code"]

    assert fail(ConfigError, has_begun=False) == 2, "there was no run"
    (tmp_path / "config.json").write_text("{}")
    assert fail(InputMissing, has_begun=False) == 2
    assert fail(Diverged, has_begun=False) == 79, "no refusal: it went wrong on its way"
    assert fail(InputMissing, has_begun=True) == 66


def test_what_went_wrong_first_is_told_also_where_it_cannot_be_written_down(tmp_path):
    (tmp_path / "exit.json").mkdir()
    with pytest.raises(Diverged), RunDir(tmp_path):
        raise error(Diverged)
    with pytest.raises(NotWritable), RunDir(tmp_path):
        pass


def test_a_second_process_is_told_who_holds_the_directory(tmp_path):
    code = f"from jaxlm.training.rundir import RunDir; RunDir({str(tmp_path)!r}).__enter__()"
    with RunDir(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert f"pid {os.getpid()} on" in done.stderr
        assert "InUse" in done.stderr
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_lock_is_private_and_let_go_of_by_a_killed_process(tmp_path):
    code = (
        "import os, signal\nfrom jaxlm.training.rundir import RunDir\n"
        f"RunDir({str(tmp_path)!r}).__enter__()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    with RunDir(tmp_path):
        pass


def test_a_path_that_is_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable) as caught:
        RunDir(tmp_path / "file").__enter__()
    assert caught.value.code == 73


def test_in_use_has_its_code(tmp_path):
    with RunDir(tmp_path), pytest.raises(InUse) as caught:
        RunDir(tmp_path).__enter__()
    assert caught.value.code == 77


def test_who_does_not_get_the_lock_leaves_no_mark(tmp_path):
    with RunDir(tmp_path):
        with pytest.raises(InUse), RunDir(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_files_are_replaced_whole_and_a_missing_one_is_named(tmp_path):
    with RunDir(tmp_path) as run:
        run.write_json("a.json", {"x": 0.1})
        run.write_json("a.json", {"x": 0.2})
        assert json.loads((tmp_path / "a.json").read_text()) == {"x": 0.2}
        assert not list(tmp_path.glob(".*.tmp"))
        run.write_command(["train", "--config=first.py"])
        run.write_command(["train", "--config=a b.py"])
        run.write_command(["train", "--workdir=a"])
        assert (tmp_path / "command.sh").read_text().splitlines()[
            1
        ] == "jaxlm train '--config=a b.py'"
    with pytest.raises(InputMissing):
        read_json(tmp_path, "config.json")


def test_an_end_that_was_not_well_has_a_report_that_neither_delays_it_nor_changes_its_code(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rundir, "REPORT_SECONDS", 0.2)
    reports = []

    def end(report, *, kind=Diverged, has_begun=True):
        with pytest.raises(kind), RunDir(tmp_path) as run:
            run.has_begun, run.report = has_begun, report
            raise error(kind)
        assert read_json(tmp_path, "exit.json")["code"] == kind.code

    end(lambda: reports.append(read_json(tmp_path, "exit.json")["code"]))
    assert reports == [79], "how it ended is written down before"
    end(lambda: reports.append("not begun"), kind=InputMissing, has_begun=False)
    with RunDir(tmp_path) as run:
        run.has_begun, run.report = True, lambda: reports.append("all went well")
    assert reports == [79]
    end(lambda: 1 / 0)
    begun = time.monotonic()
    end(threading.Event().wait)
    machine.require_clock(time.monotonic() - begun, 5)
