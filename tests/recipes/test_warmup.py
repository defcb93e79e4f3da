"""Batches that grow in rows and in length, through the front door."""

import itertools
import json
import shlex
import shutil

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.recipes.config import Run
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "train.steps": 8,
    "train.batch_warmup": ("4@2",),
    "data.sequence_warmup": ("16@50%",),
    "data.packing": "concat",
    "schedule.warmup": "512tok",
    "checkpoint.every": 1,
    "checkpoint.keep_last": 9,
}
SHAPES = ["8 rows x 16 tokens", "16 rows x 16 tokens", "8 rows x 32 tokens"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "unbroken")


@pytest.mark.slow
def test_each_stage_is_said_compiled_once_and_counted(unbroken):
    log = (unbroken / "log.txt").read_text()
    # Each is reported at its beginning and at its end.
    assert [log.count(f"compiling the step for {shape}") for shape in SHAPES] == [2, 2, 2]
    assert log.count("compiling the step") == 6
    assert "steps 1 to 2: 8 rows x 16 tokens, 128 a step" in log
    assert "steps 5 to 8: 8 rows x 32 tokens, 256 a step" in log
    trained = [r for r in harness.records(unbroken) if r["split"] == "train"]
    slots = [128, 256, 512, 768, 1024, 1280, 1536, 1792]
    padding = [all_ - r["tokens"] for all_, r in zip(slots, trained, strict=True)]
    assert padding == sorted(padding)
    assert 0 <= padding[0] <= padding[-1] < 32, "of the one row that ends the text"
    # 512 tokens are over after 3 steps: the steps of the 4 parts of the warm-up.
    rates = [r["learning_rate"] / 3e-3 for r in trained]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    work = [r["flops_per_second"] * r["step_seconds"] for r in trained]
    seen = [0, *(r["tokens"] for r in trained)]
    each = [flops / (b - a) for flops, (a, b) in zip(work, itertools.pairwise(seen), strict=True)]
    assert each[0] == pytest.approx(each[1]) == pytest.approx(each[2]), "padding is no work"
    assert each[2] < each[4] == pytest.approx(each[7]), "longer rows attend to more"


@pytest.mark.slow
def test_going_on_from_inside_a_stage_changes_no_bit(config, unbroken, tmp_path):
    """From step 3 of a copy of the run, over the beginning of the last stage.

    Later steps of the copy are cut.
    """
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    assert main(harness.words(config, run, "--start_at=3", "--force", "--stop_at=5")) == 0
    losses, expected = harness.losses(run), harness.losses(unbroken)
    assert list(losses) == [("train", step) for step in range(1, 6)]
    assert losses == {key: expected[key] for key in losses}
    assert harness.state_digest(run) == harness.state_digest(unbroken, 5)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3])
def test_stopping_inside_a_stage_and_going_on_changes_no_bit(stop, config, unbroken, tmp_path):
    assert main(harness.words(config, tmp_path / "run", f"--stop_at={stop}")) == 0
    assert main(harness.words(config, tmp_path / "run")) == 0
    assert harness.losses(tmp_path / "run") == harness.losses(unbroken)
    assert harness.state_digest(tmp_path / "run") == harness.state_digest(unbroken)


@pytest.mark.slow
def test_rows_that_predict_further_tokens_are_cut_too(config, unbroken, tmp_path):
    """The rows are those of causal, and so is the first loss of the next token."""
    run = tmp_path / "run"
    assert main(harness.words(config, run, "--config.objective.name=mtp", "--stop_at=6")) == 0
    rows = [r for r in harness.records(run) if r["split"] == "train"]
    plain = [r for r in harness.records(unbroken) if r["split"] == "train"]
    assert [r["tokens"] for r in rows] == [r["tokens"] for r in plain[:6]]
    assert rows[0]["loss_nats"] == pytest.approx(plain[0]["loss_nats"], rel=1e-6)
    assert all(0 < r["ahead_2_nats"] < 9 for r in rows)


@pytest.mark.slow
def test_a_step_of_an_early_stage_is_done_again(unbroken, capsys):
    assert main(["replay", f"--workdir={unbroken}", "--step=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_as_logged"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["train.batch_warmup=4"], "'4' is not SIZE@SPAN"),
        (["train.batch_warmup=4@2,16@4"], "4, 16 rows do not grow to train.batch = 8"),
        (["train.batch_warmup=3@2", "train.microbatches=2"], "3 rows do not divide by 2"),
        (["train.batch_warmup=4@10"], "4@10 ends at step 10"),
        (["data.sequence_warmup=12@2"], "the lengths 12 must grow and divide 32"),
        (["data.sequence_warmup=16@1h"], "ends at a time"),
        (["objective.name=masked"], "masked changes the rows, which then cannot be cut"),
    ],
)
def test_a_warmup_that_is_none_is_named_with_a_fix(flags, why, config, capsys):
    words = ["config", "validate", f"--config={config}"]
    assert main([*words, *(f"--config.{flag}" for flag in flags)]) == 2
    output = "".join(capsys.readouterr())
    assert why in output
    fix = next(line.split("fix")[1].strip() for line in output.splitlines() if " fix " in line)
    settings = dict(flag.split("=", 1) for flag in flags)
    path, _, value = shlex.split(fix)[0].removeprefix("--config.").partition("=")
    loaded = configs.load(Run, config, list((settings | {path: value}).items()))
    assert loaded.value.train.steps == 8


def test_rows_that_do_not_divide_over_devices_are_refused_with_a_fix(config, tmp_path, capsys):
    flags = ["--config.mesh.data=1", "--config.mesh.fsdp=1", "--config.train.microbatches=8"]
    assert main(harness.words(config, tmp_path / "run", *flags)) == 2
    assert "4 rows do not divide by 8 micro-batches" in capsys.readouterr().err
