"""Training by the command line, on real text on disk, and the files that it writes."""

import dataclasses
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.monitor import formatting, plots
from jaxlm.parallel import peers
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.recipes.config import Run
from jaxlm.recipes.train import resume
from jaxlm.recipes.train import run as training
from jaxlm.recipes.train.api import ResumeOptions, StartOptions
from tests import machine
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

# What is tested here beyond the harness: a schedule that is a share of the end, evaluations on the
# way, samples.
SETTINGS = {
    "optim.lr": 1e-2,
    "schedule.name": "cosine",
    "eval.every": 6,
    "checkpoint.every": 4,
    "sample.every": 5,
    "sample.prompts": ("one", "two three"),
    "sample.max_tokens": 8,
}


DRAW = plots.draw


@pytest.fixture
def with_plots(monkeypatch):
    """A run draws plots, other than those of this module."""
    monkeypatch.setattr(plots, "draw", DRAW)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


def train(config, workdir, *flags):
    return main(
        [
            "train",
            f"--config={config}",
            f"--workdir={workdir}",
            "--quiet",
            *flags,
        ]
    )


def records(workdir):
    return [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
    """Each logged loss with every digit, by split and step."""
    return {(r["split"], r["step"]): float(r["loss_nats"]).hex() for r in records(workdir)}


def final_state(workdir):
    store = Store(Path(workdir) / "checkpoints", CheckpointConfig(), read_only=True)
    return store.arrays(store.steps()[-1])


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    """A run that draws plots."""
    workdir = tmp_path_factory.mktemp("runs") / "unbroken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", DRAW)
        assert train(config, workdir) == 0
    return workdir


@pytest.mark.slow
def test_a_traced_window_is_summed_up_in_a_file_and_in_the_log(config, tmp_path):
    """Steps 7 and 8: the evaluation and the save between them are theirs too."""
    run = tmp_path / "run"
    assert train(config, run, "--config.profile.steps=6:8") == 0
    assert list((run / "profile").rglob("*.xplane.pb"))
    profile = json.loads((run / "profile/summary.json").read_text())
    shares = profile["shares"]
    assert set(shares) == {"matmul", "attention", "communication", "other", "data_wait", "python"}
    assert sum(shares.values()) == pytest.approx(1)
    assert profile["steps"] == 2
    assert profile["seconds"] > 0
    assert min(shares[kind] for kind in ("matmul", "attention", "other", "data_wait")) > 0
    assert shares["communication"] == 0, "there is one device"
    named = {each["kind"]: each for each in profile["operations"]}
    assert set(named) <= {"matmul", "attention", "other"}
    assert any(each["source"].startswith("jaxlm/") for each in profile["operations"])
    times = [each["seconds"] for each in profile["operations"]]
    assert times == sorted(times, reverse=True)
    assert min(times) > 0
    unknown, of = (int(word) for word in profile["not_told"][0].split() if word.isdecimal())
    assert unknown < of / 2, "the operations of the trace are those of the step's program"
    log = (run / "log.txt").read_text()
    assert "trace of 2 steps" in log
    assert "% matmul" in log
    assert "limits" in log
    assert "the trace has no summary" not in log


def test_a_run_leaves_everything_that_the_contract_names(unbroken):
    names = {path.name for path in unbroken.iterdir()}
    assert names >= {
        "config.json",
        "provenance.json",
        "environment.json",
        "command.sh",
        "metrics.jsonl",
        "samples.jsonl",
        "log.txt",
        "warnings.jsonl",
        "checkpoints",
        "exit.json",
        "plots",
        "report.html",
        "baselines.json",
        "tokenizer",
    }
    assert json.loads((unbroken / "exit.json").read_text())["code"] == 0
    assert {path.name for path in (unbroken / "plots").iterdir()} >= {"loss.png"}
    page = (unbroken / "report.html").read_text()
    assert "this run, val" in page
    assert "gzip" in page


def test_the_header_has_what_the_contract_names(unbroken):
    header, _, _ = (unbroken / "log.txt").read_text().partition("\n" + " " * 4 + "step")
    labels = [line.split()[0] for line in header.splitlines() if re.match(r"  \w", line)]
    assert labels[0] == "processes"
    assert {"devices", "model", "data", "memory", "plan", "checks"} <= set(labels)
    assert "space for checkpoints: ok" in header


def test_a_program_of_a_pause_is_named_before_it_is_compiled(unbroken):
    log = (unbroken / "log.txt").read_text()
    for program in ("evaluation", "sampler"):
        assert log.count(f"\ncompiling the {program} ...\n") == 1


def test_the_run_stands_among_the_four_yardsticks_at_its_end(unbroken):
    log = (unbroken / "log.txt").read_text()
    _, _, block = log.partition("validation set val, bits per byte\n")
    rows = [re.fullmatch(r"  (\S.*?) +([\d.]+)( <)?", line) for line in block.splitlines()[:5]]
    marks = {row[1]: float(row[2]) for row in rows}
    assert set(marks) == {"unigram", "gzip -9", "bz2 -9", "xz -9e", "this run"}
    assert list(marks.values()) == sorted(marks.values(), reverse=True)
    assert [row[1] for row in rows if row[3]] == ["this run"]
    known = json.loads((unbroken / "baselines.json").read_text())
    assert {name: round(bits, 4) for name, bits in known.items()} == {
        name: bits for name, bits in marks.items() if name != "this run"
    }


def test_the_report_sets_what_was_forecast_beside_what_was(unbroken):
    plan = json.loads((unbroken / "forecast.json").read_text())
    page = (unbroken / "report.html").read_text()
    cells = "<td class=number>([^<]+)</td>"
    table = {
        name: (forecast, actual)
        for name, forecast, actual in re.findall(f"<tr><td>([^<]+)</td>{cells}{cells}</tr>", page)
    }
    steps = [r for r in records(unbroken) if r["split"] == "train"]

    def median(name):
        return statistics.median(r[name] for r in steps if r[name] is not None)

    low, high = plan["step_seconds"]
    assert 0 < low < high
    assert table["seconds per step"] == (
        f"{low:.3g} to {high:.3g}",
        f"{median('step_seconds'):.3g}",
    )
    low, high = plan["tokens_per_second"]
    forecast, actual = table["tokens per second"]
    assert forecast == f"{formatting.count(low)} to {formatting.count(high)}"
    assert actual == formatting.count(median("tokens_per_second"))
    planned, compiled = (
        formatting.size(plan[name]["total"])
        for name in ("bytes_per_device", "compiled_bytes_per_device")
    )
    assert table["memory per device"] == (planned, compiled)


def test_every_step_is_logged_with_the_names_of_the_contract(unbroken):
    steps = [r for r in records(unbroken) if r["split"] == "train"]
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert set(steps[0]) >= {
        "step",
        "time_unix",
        "split",
        "loss_nats",
        "tokens",
        "learning_rate",
        "grad_norm",
        "param_norm",
        "update_ratio",
        "step_seconds",
        "data_wait_seconds",
        "tokens_per_second",
        "flops_per_second",
        "mfu",
        "skipped_total",
        "peak_bytes",
    }
    assert steps[0]["mfu"] is None  # the peak of a CPU is not known
    tokens = [r["tokens"] for r in steps]
    assert tokens == sorted(tokens)
    assert 0 < tokens[0] <= 8 * 32
    evals = [r for r in records(unbroken) if r["split"] == "val"]
    assert [r["step"] for r in evals] == [6, 12]
    assert set(evals[0]) >= {"perplexity", "bits_per_byte", "token_accuracy", "calibration_error"}


def test_it_learns(unbroken):
    first, *_, last = [r["loss_nats"] for r in records(unbroken) if r["split"] == "train"]
    assert last < first - 0.2


def test_the_same_prompts_are_sampled_whenever_that_is_due(unbroken):
    """Evaluations have another cadence."""
    assert [(s["step"], s["prompt"]) for s in harness.records(unbroken, "samples.jsonl")] == [
        (step, p) for step in (5, 10, 12) for p in ("one", "two three")
    ]


@pytest.mark.slow
def test_stopping_and_going_on_changes_no_bit(config, unbroken, tmp_path):
    """With dropout, packing and an evaluation on the way. tests/faults has one process per part."""
    assert train(config, tmp_path / "run", "--stop_at=5") == 0
    assert json.loads((tmp_path / "run/exit.json").read_text())["step"] == 5
    assert [r["step"] for r in records(tmp_path / "run") if r["split"] == "train"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert train(config, tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(unbroken)
    assert len(losses(unbroken)) == 14
    samples = [harness.records(at, "samples.jsonl") for at in (tmp_path / "run", unbroken)]
    assert samples[0] == samples[1]
    mine, theirs = final_state(tmp_path / "run"), final_state(unbroken)
    assert len(mine) > 20
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        assert leaf.tobytes() == theirs[path].tobytes(), path


@pytest.mark.slow
def test_what_is_left_out_is_said_at_every_start_and_samples_need_no_validation(config, tmp_path):
    texts = ["one two three " * 9, ""] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    flags = [f"--config.data.train={tmp_path}/a.jsonl", "--config.data.validation=()"]
    flags += ["--config.train.steps=4", "--config.sample.every=3", "--config.schedule.end=8"]
    run = tmp_path / "run"
    run.mkdir()
    for name in ("a.csv", "b.csv", "c.csv", "d.csv"):
        (run / name).touch()
    warning = f"left out of train: 20 empty (first {tmp_path}/a.jsonl, line 2)"
    assert train(config, run, *flags, "--stop_at=2") == 0
    assert train(config, run, *flags) == 0
    lines = (run / "log.txt").read_text().splitlines()
    assert lines.count(warning) == 2
    others = f"caution: {run} has other files, which stay (a.csv, b.csv, c.csv, ...)"
    assert lines.count(others) == 1  # at the first start
    assert all((run / name).exists() for name in ("a.csv", "d.csv"))
    warnings = harness.records(run, "warnings.jsonl")
    assert [each["step"] for each in warnings] == [0, 0, 2, 2]
    assert [each["text"] for each in warnings[1::2]] == [warning, warning]
    for each in warnings[::2]:
        assert "the schedule ends at step 8 and the run at 4" in each["text"]
        assert each["text"].endswith("--config.schedule.end=100%")
    assert f"step 0, 2 times: {warning}" in (run / "report.html").read_text()
    assert {s["step"] for s in harness.records(run, "samples.jsonl")} == {3, 4}


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh_and_the_losses_stay(config, unbroken, tmp_path):
    assert train(config, tmp_path / "run", "--stop_at=5") == 0
    mesh = [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "tensor")]
    words = harness.words(config, tmp_path / "run", *mesh)
    eight = f"{harness.FLAGS} --xla_force_host_platform_device_count=8"
    code, output = harness.run(words, XLA_FLAGS=eight)
    assert code == 0, output
    mine, theirs = losses(tmp_path / "run"), losses(unbroken)
    for key, loss in theirs.items():
        np.testing.assert_allclose(
            float.fromhex(mine[key]), float.fromhex(loss), rtol=1e-5, err_msg=str(key)
        )
    assert [s.config["mesh"]["tensor"] for s in resume.read_starts(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_terminated_run_saves_says_75_and_goes_on(config, tmp_path):
    run = tmp_path / "run"
    words = [
        *("train", f"--config={config}", f"--workdir={run}", "--quiet"),
        *("--config.train.steps=100000", "--config.checkpoint.every=50000", "--config.log.every=1"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlm", *words], stderr=subprocess.PIPE, text=True
    )
    begun = time.monotonic()
    while (
        not (run / "metrics.jsonl").exists()
        or len((run / "metrics.jsonl").read_bytes().splitlines()) < 3
    ):
        assert process.poll() is None, process.stderr.read()
        machine.require_clock(time.monotonic() - begun, 120)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 75, output
    ended = json.loads((run / "exit.json").read_text())
    assert ended["code"] == 75
    assert Store(run / "checkpoints", CheckpointConfig(), read_only=True).steps() == [ended["step"]]
    assert f"after step {ended['step']}, which is saved" in output
    assert main([*words, f"--stop_at={ended['step'] + 1}"]) == 0
    steps = [r["step"] for r in records(run) if r["split"] == "train"]
    assert steps == list(range(1, ended["step"] + 2))


def test_a_finished_run_says_so_and_writes_nothing(config, unbroken, capsys):
    before = {
        path: path.stat().st_mtime_ns
        for path in unbroken.rglob("*")
        if path.is_file() and path.name != "lock"
    }
    assert train(config, unbroken) == 0
    assert "already complete at step 12" in capsys.readouterr().out
    after = {
        path: path.stat().st_mtime_ns
        for path in unbroken.rglob("*")
        if path.is_file() and path.name != "lock"
    }
    assert before == after


def test_another_config_in_the_same_directory_is_refused_with_the_difference(
    config, unbroken, capsys
):
    assert train(config, unbroken, "--config.optim.lr=0.5", "--config.log.every=2") == 2
    output = capsys.readouterr().err
    assert "optim.lr: 0.01 -> 0.5" in output
    assert "log.every" not in output
    assert "--allow_change=optim.lr" in output


def test_a_refused_change_of_a_run_is_a_run_with_its_config_and_shapes_are_not_allowed(
    unbroken, capsys
):
    words = ["train", f"--workdir={unbroken}"]
    another = f"--config={unbroken} --workdir=runs/another"
    for change, fixes in (
        ("--config.optim.lr=0.5", [another, "--allow_change=optim.lr"]),
        ("--config.model.width=64", [another]),
    ):
        assert main([*words, change]) == 2
        _, _, lines = capsys.readouterr().err.partition("  fix    ")
        assert [line.strip() for line in lines.splitlines()] == fixes


@pytest.mark.slow
def test_more_steps_need_a_word_where_the_schedule_is_a_share_of_the_end(
    config, unbroken, capsys, tmp_path
):
    assert train(config, unbroken, "--config.train.steps=14") == 2
    assert "train.steps: 12 -> 14" in capsys.readouterr().err
    flat = (
        "--config.schedule.name=constant",
        "--config.schedule.warmup=1",
        "--config.eval.every=50",
    )
    assert train(config, tmp_path / "run", "--config.train.steps=2", *flat) == 0
    assert train(config, tmp_path / "run", "--config.train.steps=3", *flat) == 0
    assert [r["step"] for r in records(tmp_path / "run") if r["split"] == "train"] == [1, 2, 3]


@pytest.mark.slow
def test_early_stopping_ends_the_run_for_good(config, tmp_path, capsys):
    flags = ("--config.train.patience=1", "--config.eval.every=1", "--config.optim.lr=1e-12")
    assert train(config, tmp_path / "run", *flags) == 0
    last = max(r["step"] for r in records(tmp_path / "run"))
    assert last < 12
    capsys.readouterr()
    assert train(config, tmp_path / "run", *flags) == 0
    assert max(r["step"] for r in records(tmp_path / "run")) == last


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_ends_with_79_and_commits_nothing(
    config, with_plots, tmp_path, capsys
):
    flags = (
        "--config.optim.lr=1e30",
        "--config.optim.clip_norm=none",
        "--config.schedule.warmup=1",
        "--config.guard.rewinds=0",
        "--config.guard.budget=2",
    )
    assert train(config, tmp_path / "run", *flags, "--config.checkpoint.every=1") == 79
    assert "not finite" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == 79
    page = (tmp_path / "run/report.html").read_text()
    assert "ended with code 79: Diverged: no step after" in page
    assert (tmp_path / "run/plots/loss.png").exists()
    assert page.count("<figure") == len(list((tmp_path / "run/plots").iterdir())) > 1


def test_eval_agrees_with_the_last_evaluation_of_the_run(unbroken, capsys):
    last = [r for r in records(unbroken) if r["split"] == "val"][-1]
    for batch in ("8", "3"):
        assert main(["eval", f"--workdir={unbroken}", "--json", f"--batch={batch}"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["tokens"], answer["bytes"]) == (last["tokens"], last["bytes"])
        np.testing.assert_allclose(answer["loss_nats"], last["loss_nats"], rtol=1e-6)
    assert sum(answer["sets"]["val"]["reliability"]["count"]) == pytest.approx(last["tokens"])


@pytest.mark.slow
def test_eval_of_any_text_counts_its_bytes(unbroken, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("five six seven")
    words = ["eval", f"--workdir={unbroken}", "--json", f"--text={tmp_path}/*.txt", "--sequence=16"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes"] == 14
    assert answer["tokens"] == 15  # and the end of the document
    assert main([*words[:3], f"--text={tmp_path}/none/*.txt"]) == 66
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["where"], error["fix"]) == ("--text", f"ls {tmp_path}")


@pytest.mark.slow
def test_generate_is_repeatable_and_greedy_at_temperature_zero(unbroken, capsys):
    words = [
        "generate",
        f"--workdir={unbroken}",
        "--json",
        "--prompt=one",
        "--prompt=two three",
        "--max_tokens=6",
    ]
    outs = []
    for flags in ([], [], ["--seed=1"], ["--temperature=0"], ["--temperature=0", "--seed=1"]):
        assert main([*words, *flags]) == 0
        outs.append([sample["ids"] for sample in json.loads(capsys.readouterr().out)["samples"]])
    assert outs[0] == outs[1] != outs[2]
    assert outs[3] == outs[4]


def test_ranks_that_were_told_other_flags_differ_by_their_names(tmp_path):
    """Each flag that changes the work of a rank is compared; local flags may differ."""
    flags = {"workdir": tmp_path / "b", "init_from": "runs/a@3", "stop_at": 0}
    resumed = {"start_at": 0, "force": True, "reset_optimizer": True, "cast": True}
    resumed |= {"allow_change": ("optim.lr",)}
    local = {"arguments", "process", "cpu_devices", "quiet", "verbose"}
    assert {field.name for field in dataclasses.fields(ResumeOptions)} == resumed.keys()
    assert {field.name for field in dataclasses.fields(StartOptions)} == {*flags, "resume", *local}
    loaded = configs.load(Run, None, [])
    one = StartOptions(
        workdir=tmp_path / "a", arguments=[], resume=ResumeOptions(), process=ProcessSpec()
    )
    others = [(name, dataclasses.replace(one, **{name: flags[name]})) for name in flags]
    others += [
        (name, dataclasses.replace(one, resume=ResumeOptions(**{name: value})))
        for name, value in resumed.items()
    ]
    first = training._identity(loaded, one)
    for name, other in others:
        (line,) = peers._diff(1, first, training._identity(loaded, other))
        assert line.startswith(f"--{name}: ")
    alike = dataclasses.replace(one, quiet=True, verbose=True, arguments=["train"], cpu_devices=2)
    assert training._identity(loaded, alike) == first
