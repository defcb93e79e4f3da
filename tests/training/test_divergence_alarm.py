"""A run whose loss is worse than that of coders without a model; through the front door."""

import json
import math
import shlex
import shutil

import pytest

from jaxlm.cli.main import main
from jaxlm.data.tokenizer import Bytes
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

SETTINGS = {
    "train.steps": 24,
    "eval.every": 4,
    "checkpoint.every": 6,
    "checkpoint.keep_last": 9,
}
HUGE = "--config.optim.lr=30"
STOP = "--config.guard.divergence=stop"
IDS = Bytes().size


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def diverged(config, tmp_path_factory):
    """A run at a huge rate, of fewer steps than the guard needs to know a spike."""
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "diverged", HUGE)


@pytest.fixture(scope="module")
def healthy(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "healthy")


def warned(workdir):
    return [
        record for record in harness.records(workdir, "warnings.jsonl") if "coder" in record["text"]
    ]


def test_the_run_is_worse_than_the_uniform_coder_indeed(diverged):
    rows = harness.records(diverged)
    assert max(row["loss_nats"] for row in rows) > 1000 * math.log(IDS)
    assert [r for r in rows if r["split"] == "val"][-1]["loss_nats"] > math.log(IDS)


def test_it_is_said_while_it_happens_with_the_cause_and_a_command(diverged):
    (warning,) = warned(diverged)
    assert warning["step"] <= 6, "not at the end"
    for part in (
        "worse than the uniform coder",
        f"{math.log(IDS):.2f} nats",
        "optim.lr = 30",
        "jaxlm lr-find --config=",
    ):
        assert part in warning["text"]
    log = (diverged / "log.txt").read_text()
    assert log.index(warning["text"].splitlines()[0]) < log.index("\ndone at step 24")


def test_each_row_since_then_has_a_mark(diverged):
    (warning,) = warned(diverged)
    rows = harness.records(diverged)
    marked = {(r["split"], r["step"]) for r in rows if r.get("worse_than") == "uniform"}
    later = {(r["split"], r["step"]) for r in rows if r["step"] > warning["step"]}
    assert later <= marked
    assert ("val", 24) in marked


def test_a_run_that_resumes_every_three_steps_has_the_same_marks_and_ends_at_the_same_step(
    config, diverged, tmp_path
):
    """The median is of four steps."""

    def codes(name, stops, *flags):
        words = harness.words(config, tmp_path / name, HUGE, *flags)
        return [main([*words, f"--stop_at={step}"]) for step in stops]

    assert codes("parts", range(3, 25, 3)) == [0] * 8
    marks = [
        [(r["split"], r["step"], r.get("worse_than")) for r in harness.records(workdir)]
        for workdir in (tmp_path / "parts", diverged)
    ]
    assert marks[0] == marks[1]
    counters = [
        harness.store(each).record(24).meta["progress"] for each in (tmp_path / "parts", diverged)
    ]
    for each in counters:
        del each["divergence"]["command"]  # has the run directory
    assert counters[0] == counters[1]
    flags = "--config.data.validation=()", STOP  # no evaluation is judged
    assert codes("stopped", [6], *flags) == [79]
    assert codes("stopped in parts", [3, 6], *flags) == [0, 79]
    steps = [
        [r["step"] for r in harness.records(tmp_path / name)]
        for name in ("stopped", "stopped in parts")
    ]
    assert steps[0] == steps[1]


def test_the_report_the_closing_block_and_exit_json_say_it(diverged):
    report = (diverged / "report.html").read_text()
    assert '<p class="worse">' in report
    verdict = report.split('<p class="worse">')[1].split("</p>")[0]
    assert "worse than the uniform coder" in verdict
    assert "lr-find" in verdict
    assert "<tr class=ours>" not in report, "no line of it is green"
    closing = (diverged / "log.txt").read_text().split("\ndone at step 24")[1]
    assert "diverged" in closing.splitlines()[0]
    assert "worse than the uniform coder" in closing
    ended = harness.exit_of(diverged)
    assert ended["code"] == 0
    assert "worse than the uniform coder" in ended["cause"]


@pytest.mark.slow
def test_the_command_that_is_printed_works(diverged, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (warning,) = warned(diverged)
    (line,) = [line for line in warning["text"].splitlines() if "jaxlm lr-find" in line]
    words = shlex.split(line[line.index("jaxlm lr-find") :])[1:]
    assert main([*words, "--steps=12", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["curve"]


@pytest.mark.slow
def test_json_says_it(diverged, config, capsys):
    run = diverged.parent / "json"
    assert main([*harness.words(config, run, HUGE), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["divergence"]["worse_than"] == "uniform"
    assert answer["complete"] is True
    before = harness.exit_of(run)
    for _ in range(2):  # a run that is over is not well afterwards
        assert main(harness.words(config, run, HUGE)) == 0
        assert "already complete at step 24" in (output := capsys.readouterr().out)
        assert "worse than the uniform coder" in output
        assert harness.exit_of(run) == before


@pytest.mark.slow
def test_a_healthy_run_is_warned_of_nothing_and_is_what_it_was(healthy):
    assert not warned(healthy)
    assert not any("worse_than" in record for record in harness.records(healthy))
    assert not (healthy / "divergence.json").exists()
    report = (healthy / "report.html").read_text()
    assert '<p class="worse">' not in report
    assert "<tr class=ours>" in report
    assert harness.exit_of(healthy)["cause"] == "finished"


@pytest.mark.slow
def test_stop_ends_the_run_with_79_and_keeps_what_was_saved_before(config, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(harness.words(config, run, HUGE, STOP)) == 79
    output = capsys.readouterr().err
    assert "worse than the uniform coder" in output
    assert "jaxlm lr-find --config=" in output
    ended = harness.exit_of(run)
    assert ended["code"] == 79
    assert "worse than the uniform coder" in ended["cause"]
    (warning,) = warned(run)
    assert all(step < warning["step"] for step in harness.steps(run))
    assert '<p class="worse">' in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_stopped_run_goes_on_if_only_a_warning_is_asked_for(config, diverged, tmp_path):
    run = tmp_path / "run"
    assert main(harness.words(config, run, HUGE, STOP)) == 79
    shutil.copytree(run, tmp_path / "again")
    assert main(harness.words(config, tmp_path / "again", HUGE, STOP)) == 79
    assert main(harness.words(config, run, HUGE)) == 0
    assert harness.losses(run) == harness.losses(diverged)
    assert harness.exit_of(run)["code"] == 0


@pytest.mark.slow
def test_a_run_that_is_resumed_after_it_diverged_still_says_so(config, tmp_path):
    run = tmp_path / "run"
    assert main(harness.words(config, run, HUGE, "--stop_at=18")) == 0
    assert main(harness.words(config, run, HUGE)) == 0
    assert "worse than the uniform coder" in harness.exit_of(run)["cause"]


@pytest.mark.slow
def test_a_run_that_learns_nothing_is_worse_than_the_unigram_coder_from_its_middle_on(
    config, tmp_path
):
    """At a rate of nothing the loss stays where it begins, near that of the uniform coder."""
    settings = ("--config.train.steps=120", "--config.eval.every=20", "--config.optim.lr=1e-9")
    run = tmp_path / "run"
    assert main(harness.words(config, run, *settings, "--config.checkpoint.every=60")) == 0
    output = warned(run)
    assert output
    assert min(record["step"] for record in output) == 60
    assert "unigram" in output[0]["text"] or "uniform" in output[0]["text"]
    assert "<tr class=ours>" not in (run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("objective", ["masked", "span", "prefix", "mtp"])
def test_tiny_runs_of_other_objectives_raise_no_alarm(objective, config, tmp_path):
    run = tmp_path / "run"
    named = f"--config.objective.name={objective}"
    assert main(harness.words(config, run, named, "--config.train.steps=8")) == 0
    assert not warned(run)


@pytest.mark.slow
def test_without_a_validation_set_the_training_loss_is_judged(config, tmp_path):
    run = tmp_path / "run"
    assert main(harness.words(config, run, HUGE, "--config.data.validation=()")) == 0
    (warning,) = warned(run)
    assert warning["step"] < 24
    assert "worse than the uniform coder" in harness.exit_of(run)["cause"]
