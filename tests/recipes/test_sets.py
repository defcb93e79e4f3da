"""Several validation sets: each has its name in the metrics, and one of them ranks checkpoints."""

import json
import re

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.recipes.config import Run
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {"train.steps": 4, "eval.every": 1, "checkpoint.every": 1, "eval.batches": 2}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "other.md").write_text("eleven twelve thirteen fourteen " * 20)
    sets = ("near=20%", f"far={folder}/*.md")
    return harness.write_config(folder, SETTINGS | {"data.validation": sets, "eval.follow": "far"})


@pytest.mark.slow
def test_the_followed_set_ranks_checkpoints_and_is_named(config, tmp_path, capsys):
    whole = "--config.eval.batches=all"
    assert main(harness.words(config, tmp_path / "run", "--json", whole)) == 0
    answer = json.loads(capsys.readouterr().out)
    losses = {
        (r["split"], r["step"]): r["loss_nats"]
        for r in harness.records(tmp_path / "run")
        if r["split"] != "train"
    }
    assert set(losses) == {(name, step) for name in ("near", "far") for step in range(1, 5)}
    assert answer["loss_nats"] == losses["far", 4] != losses["near", 4]
    record = harness.store(tmp_path / "run").record(4)
    assert record.loss_nats == losses["far", 4]
    best = record.meta["progress"]
    assert best["best_loss"] == losses["far", best["best_step"]]
    assert best["best_loss"] == min(losses["far", step] for step in range(1, 5))
    log = (tmp_path / "run/log.txt").read_text()
    assert "far ranks checkpoints" in log
    assert "nats on far" in log
    assert main(["eval", f"--workdir={tmp_path}/run", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["loss_nats"] == evaluated["sets"]["far"]["loss_nats"]

    # Another set to follow belongs to another run, or to one that starts counting again.
    more = ["--config.eval.follow=near", "--config.train.steps=5", whole]
    assert main(harness.words(config, tmp_path / "run", *more)) == 2
    assert "eval.follow: far -> near" in capsys.readouterr().err
    allowed = ["--allow_change=eval.follow,train.steps"]
    assert main(harness.words(config, tmp_path / "run", *more, *allowed)) == 0
    went_on = harness.store(tmp_path / "run").record(5)
    assert went_on.meta["progress"]["best_step"] == 5
    assert went_on.loss_nats == harness.records(tmp_path / "run")[-2]["loss_nats"]


@pytest.mark.slow
def test_like_is_ranked_with_like_and_what_is_of_a_part_says_so(config, tmp_path):
    """The last evaluation is of the whole set, the others of two batches: those rank.

    Another run has the last step in its middle.
    """
    seldom = "--config.eval.every=2"
    assert main(harness.words(config, tmp_path / "ended", seldom)) == 0
    longer = ("--config.train.steps=6", "--stop_at=5")
    assert main(harness.words(config, tmp_path / "stopped", seldom, *longer)) == 0
    ended, stopped = (
        {
            r["step"]: r
            for r in harness.records(tmp_path / name)
            if r["split"] == "far" and r["step"] in (2, 4)
        }
        for name in ("ended", "stopped")
    )
    share = stopped[4]["share"]
    assert 0 < share == ended[2]["share"] < ended[4]["share"] == 1
    assert ended[4]["tokens"] > stopped[4]["tokens"]
    assert ended[2]["loss_nats"] == stopped[2]["loss_nats"]
    assert ended[4]["loss_nats"] != stopped[4]["loss_nats"]
    record = harness.store(tmp_path / "ended").record(4)
    assert record.loss_nats == stopped[4]["loss_nats"]
    assert record.meta["progress"]["best_loss"] == min(r["loss_nats"] for r in stopped.values())

    assert stopped[4]["loss_stderr"] > 0 < ended[2]["loss_stderr"]
    assert "loss_stderr" not in ended[4]  # nothing of the set was left out
    error = f"{stopped[4]['loss_stderr']:.2g}"

    logs = {name: (tmp_path / name / "log.txt").read_text() for name in ("ended", "stopped")}
    assert re.search(r"^  this run +\d", logs["ended"], re.M)
    part = f"this run, after step 4, on {share:.1%} of the set"
    assert re.search(rf"^  {re.escape(part)} +\d", logs["stopped"], re.M)
    assert all("nats on far, 2 batches of it" in log for log in logs.values())
    assert "<td>this run, far</td>" in (tmp_path / "ended/report.html").read_text()
    assert f"\u00b1{error} on {share:.1%}" in logs["stopped"]
    page = (tmp_path / "stopped/report.html").read_text()
    assert f"{stopped[4]['loss_nats']:.4f} \u00b1 {error}</td>" in page
    assert f"<td>this run, far, after step 4, on {share:.1%} of the set</td>" in page


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({}, 9),  # of ten evaluations, each a third of the work of 9 of 1,000 steps
        ({"eval.every": "5%"}, 8),  # at least
        ({"eval.every": 500, "train.steps": 10_000}, 45),
        ({"eval.batch": 4}, 18),
        ({"data.validation": "a=5%,b=a.txt", "train.steps": 4000}, 18),
        ({"train.batch_warmup": "2@50%"}, 8),
        ({"eval.every": "10m"}, None),
        ({"eval.batches": "all"}, None),
        ({"eval.batches": 3}, 3),
    ],
)
def test_evaluations_between_steps_take_a_small_part_of_the_work(settings, batches):
    defaults = {"train.steps": 1000, "train.batch": 8}
    flags = [(name, str(value)) for name, value in (defaults | settings).items()]
    assert configs.load(Run, None, flags).value.evaluated_batches == batches


def test_few_rows_are_all_evaluated_each_time_and_rank_with_those_of_more_steps(config, tmp_path):
    """A run with more steps may read more batches of a larger set, but not of this one."""
    auto = "--config.eval.batches=auto"
    assert main(harness.words(config, tmp_path / "run", auto)) == 0
    steps = ("--config.train.steps=2000", "--allow_change=train.steps")
    more = (*steps, "--config.eval.every=5", "--stop_at=5")
    assert main(harness.words(config, tmp_path / "run", auto, *more)) == 0
    rows = [each for each in harness.records(tmp_path / "run") if each["split"] == "far"]
    assert [(each["step"], each["share"]) for each in rows] == [(n, 1.0) for n in range(1, 6)]
    best = harness.store(tmp_path / "run").record(5).meta["progress"]
    assert best["best_loss"] == min(each["loss_nats"] for each in rows)
    assert "best" not in (tmp_path / "run/warnings.jsonl").read_text()
    assert "batches of it" not in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (["--config.eval.follow=fra"], "the names are near, far", "--config.eval.follow=far"),
        (
            ["--config.eval.follow=far.masked"],
            "names the validation set",
            "--config.eval.follow=far",
        ),
        (
            ["--config.data.validation=train=5%", "--config.eval.follow=auto"],
            "metrics use the name train",
            "--config.data.validation=held=5%",
        ),
    ],
)
def test_a_set_that_is_not_there_is_refused_before_anything_is_compiled(
    flags, what, fix, config, tmp_path, capsys
):
    assert main(harness.words(config, tmp_path / "run", *flags)) == 2
    errors = capsys.readouterr().err
    assert what in errors
    assert fix in errors
    assert "compiling" not in errors
