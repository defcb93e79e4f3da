"""The learning rate of a live run can be changed, and a replay repeats the change.

A file that is not understood changes nothing.
"""

import json
import os
import shutil

import pytest

from jaxlm.cli.main import main
from jaxlm.training import control
from jaxlm.training.control import Control, RateChange
from jaxlm.training.rundir import RunDir
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {"train.steps": 8, "train.control": 1, "checkpoint.keep_last": 9}
LR = 3e-3


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run that stopped after four steps, got another rate, and ended."""
    workdir = tmp_path_factory.mktemp("runs") / "controlled"
    assert main([*harness.words(config, workdir), "--stop_at=4"]) == 0
    (workdir / "control.json").write_text('{"lr": 1e-3}')
    assert main(harness.words(config, workdir)) == 0
    return workdir


def rates(run):
    return [r["learning_rate"] for r in harness.records(run) if r["split"] == "train"]


@pytest.mark.slow
def test_a_change_is_followed_from_the_next_update_on_said_and_written_down(run):
    assert rates(run)[1:] == pytest.approx([LR] * 3 + [1e-3] * 4)
    assert harness.records(run, "control.jsonl") == [{"step": 4, "lr": 1e-3}]
    assert "after step 4 the peak learning rate is 0.001" in (run / "log.txt").read_text()
    known = {step: harness.store(run).record(step).meta["control"] for step in (4, 6, 8)}
    assert known == {4: [], 6: [{"step": 4, "lr": 1e-3}], 8: [{"step": 4, "lr": 1e-3}]}


@pytest.mark.slow
def test_a_run_that_passes_it_again_is_the_same_in_every_bit(config, run, tmp_path, capsys):
    """From before the change, without a new request; and one of its steps alone."""
    repeated = tmp_path / "again"
    shutil.copytree(run, repeated)
    (repeated / "control.json").unlink()
    assert main([*harness.words(config, repeated), "--start_at=2", "--force"]) == 0
    assert harness.state_digest(repeated) == harness.state_digest(run)
    assert harness.losses(repeated) == harness.losses(run)
    capsys.readouterr()
    assert main(["replay", f"--workdir={run}", "--step=6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_as_logged"]


@pytest.mark.slow
def test_a_rate_of_the_config_that_has_no_effect_is_a_warning(config, run, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copytree(run, resumed)
    flags = ["--config.optim.lr=5e-4", "--allow_change=optim.lr", "--start_at=6", "--force"]
    assert main([*harness.words(config, resumed), *flags]) == 0
    assert rates(resumed)[6:] == pytest.approx([1e-3] * 2)
    warnings = harness.records(resumed, "warnings.jsonl")
    (line,) = [each["text"] for each in warnings if "has no effect" in each["text"]]
    assert [each["step"] for each in warnings if each["text"] == line] == [6]
    assert "optim.lr = 0.0005 has no effect" in line
    assert "is 0.001 since step 4" in line
    assert '{"lr": null}' in line


@pytest.fixture
def made(tmp_path):
    output = []

    def make(**options):
        directory = RunDir(tmp_path, **options)
        changes = control.load_changes(tmp_path, {}, lambda name, value: value)
        return Control(directory, LR, changes, output.append)

    return make, output, tmp_path


def look(control, step):
    control.poll(step, lambda value: value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"[" * 4000, ""),  # Python 3.11 and 3.13 have different messages
        (b'{"lr": 0}', "above zero"),
        (b'{"lr": -1}', "above zero"),
        (b'{"lr": NaN}', "above zero"),
        (b'{"lr": Infinity}', "above zero"),
        (b'{"lr": true}', "above zero"),
        (b'{"lr": "1e-3"}', "above zero"),
        (b'{"lr": 1e-3, "steps": 5}', "above zero"),
        (b"[1e-3]", "above zero"),
        (b" " * 5000, "more than 4096 bytes"),
        (b'{"lr": 1' + b"0" * 400 + b"}", "above zero"),
        (b"\xff\xff\xff", "decode"),
    ],
)
def test_what_is_not_understood_is_said_once_and_changes_nothing(content, why, made):
    make, output, folder = made
    control = make()
    (folder / "control.json").write_bytes(content)
    for step in range(3):
        look(control, step)
        assert control.lr_scale(step) == 1
    assert len(output) == 1
    assert "ignoring control.json" in output[0]
    assert why in output[0]
    assert not (folder / "control.jsonl").exists()
    (folder / "control.json").write_text('{"lr": 6e-3}')
    look(control, 3)
    assert control.lr_scale(3) == 2


def test_a_file_that_everybody_may_write_is_left_aside(made):
    make, output, folder = made
    (folder / "control.json").write_text('{"lr": 1e-3}')
    os.chmod(folder / "control.json", 0o666)
    control = make()
    look(control, 0)
    assert control.lr_scale(0) == 1
    assert "every user can write it" in output[0]


def test_a_later_change_gives_up_those_that_were_yet_to_come(made):
    make, _, folder = made
    first = make()
    for step, lr in ((2, 6e-3), (5, 1.5e-3)):
        (folder / "control.json").write_text(json.dumps({"lr": lr}))
        look(first, step)
    assert [first.lr_scale(step) for step in range(7)] == [1, 1, 2, 2, 2, 0.5, 0.5]
    resumed = make()  # resumed before both
    look(resumed, 1)
    assert [resumed.lr_scale(step) for step in range(7)] == [
        first.lr_scale(step) for step in range(7)
    ]
    (folder / "control.json").write_text('{"lr": null}')
    look(resumed, 3)
    assert [resumed.lr_scale(step) for step in range(7)] == [1, 1, 2, 1, 1, 1, 1]
    assert control.read_changes(folder) == [RateChange(2, 6e-3), RateChange(3, None)]


def test_processes_that_read_nothing_follow_the_first(made):
    make, _, folder = made
    (folder / "control.json").write_text('{"lr": 6e-3}')
    other = make(is_writer=False)
    other.poll(1, lambda value: {"lr": 1.5e-3} if value is None else value)
    assert other.lr_scale(1) == 0.5
    assert not (folder / "control.jsonl").exists()


def test_a_lost_record_is_made_up_for_by_the_checkpoint(tmp_path):
    meta = {"control": [{"step": 4, "lr": 6e-3}]}
    changes = control.load_changes(tmp_path, meta, lambda name, value: value)
    assert [control.lr_scale(changes, step, LR) for step in (3, 4)] == [1, 2]
