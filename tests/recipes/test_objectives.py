"""Every objective by the command line: a few steps, an evaluation, a stop and a replay.

Impossible settings are refused.
"""

import json
import typing

import pytest

from jaxlm.cli.main import main
from jaxlm.core.sections import arm_name
from jaxlm.objectives.config import Objective
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

EVERY = ("causal", "prefix", "masked", "span", "ul2", "fim", "blank", "mtp")
SOME = ("masked", "fim")  # one that is evaluated as it is trained, and one as causal
PARTS = {"prefix", "masked", "span", "ul2", "blank"}  # those with an evaluation of their own
SHOWN = {
    "<|mask|>": ("masked", "blank"),
    "<|sentinel_0|>": ("span", "ul2", "blank"),
    "<|fim_middle|>": ("fim",),
}
SETTINGS = {
    "train.steps": 4,
    "data.sequence": 64,
    "checkpoint.every": 2,
    "sample.every": "100%",
    "sample.prompts": ("one",),
    "sample.max_tokens": 2,
    "eval.batches": 2,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


def losses(workdir):
    return {(r["split"], r["step"]): float(r["loss_nats"]).hex() for r in harness.records(workdir)}


def mixed(members):
    """Flags of a mixture in which each of some objectives has the same share."""
    shares = [f"--config.objective.weights.{name}=1" for name in members]
    return ["--config.objective.name=mixture", *shares]


def named():
    """Every objective with the members that it mixes; a mixture of some is quick to try."""
    yield pytest.param("mixture", SOME, id="mixture of some")
    for arm in typing.get_args(Objective):
        name = arm_name(arm)
        if name == "distill":  # needs a teacher: tests/recipes/train/test_teacher.py
            continue
        members = EVERY if name == "mixture" else ()
        yield pytest.param(name, members, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "members"), list(named()))
def test_an_objective_trains_evaluates_and_samples(name, members, config, tmp_path):
    flags = mixed(members) if members else [f"--config.objective.name={name}"]
    if members == SOME:
        flags.append("--config.data.sequence=32")  # as in other tests, for their programs
    assert main(harness.words(config, tmp_path / "run", *flags)) == 0
    records = harness.records(tmp_path / "run")
    first, *_, last = (r["loss_nats"] for r in records if r["split"] == "train")
    assert last < first
    splits = {r["split"] for r in records}
    assert splits == {"train", "val", *(f"val.{part}" for part in PARTS.intersection(members))}
    assert any("ahead_2_nats" in r for r in records) == ("mtp" in (name, *members))
    samples = (tmp_path / "run/samples.jsonl").read_text()
    assert bool(samples) == (name != "masked")
    log = (tmp_path / "run/log.txt").read_text()
    assert ("objective  " in log) == (name != "causal")
    assert ("evaluated as causal" in log) == (name in ("fim", "mixture", "mtp"))
    assert (tmp_path / "run/baselines.json").exists() == (
        name in ("causal", "fim", "mixture", "mtp")
    )


@pytest.mark.slow
def test_a_mixture_stopped_and_done_again_is_the_same_in_every_bit(config, tmp_path, capsys):
    flags = mixed(EVERY)
    assert main(harness.words(config, tmp_path / "whole", *flags)) == 0
    assert main(harness.words(config, tmp_path / "parts", *flags, "--stop_at=2")) == 0
    assert main(harness.words(config, tmp_path / "parts", *flags)) == 0
    whole = losses(tmp_path / "whole")
    assert whole == losses(tmp_path / "parts")
    assert {split for split, _ in whole} == {"train", "val", *(f"val.{part}" for part in PARTS)}
    capsys.readouterr()
    assert main(["replay", f"--workdir={tmp_path}/parts", "--step=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_as_logged"]


@pytest.mark.slow
def test_an_evaluation_of_its_own_reads_as_the_run_does(config, tmp_path, capsys):
    flags = ["--config.objective.name=span", "--config.eval.batches=all"]
    assert main(harness.words(config, tmp_path / "run", *flags)) == 0
    logged = [r for r in harness.records(tmp_path / "run") if r["split"] == "val"][-1]
    capsys.readouterr()
    assert main(["eval", f"--workdir={tmp_path}/run", "--json"]) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert repeated["tokens"] == logged["tokens"]
    assert repeated["loss_nats"] == pytest.approx(logged["loss_nats"], rel=1e-6)
    text = str(tmp_path / "text.txt")
    with open(text, "w") as file:
        file.write("one two three four five six " * 20)
    assert main(["eval", f"--workdir={tmp_path}/run", f"--text={text}", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["tokens"] < 200


@pytest.mark.slow
def test_a_model_that_fills_gaps_is_not_asked_to_go_on(config, tmp_path, capsys):
    run = tmp_path / "run"
    flags = ["--config.objective.name=masked", "--config.train.steps=1"]
    assert main(harness.words(config, run, *flags)) == 0
    assert "no samples: the model does not learn" in (run / "log.txt").read_text()
    capsys.readouterr()
    assert main(["generate", f"--workdir={run}", "--prompt=one", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "cannot continue a text" in error["what"]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", EVERY)
def test_peek_shows_what_is_read_and_what_is_predicted(name, config, capsys):
    flags = [f"--config={config}", f"--config.objective.name={name}", "--rows=8"]
    assert main(["data", "peek", *flags]) == 0
    output = capsys.readouterr().out
    assert "\u00ab" in output
    assert ("\u2039" in output) == (name not in ("causal", "fim", "mtp"))
    assert ("ahead_2: " in output) == (name == "mtp")
    for token, names in SHOWN.items():
        assert (token in output) == (name in names)


def test_rows_too_short_for_an_objective_are_refused_before_anything_compiles(config, capsys):
    flags = [f"--config={config}", "--config.objective.name=fim", "--config.data.sequence=8"]
    assert main(["data", "peek", *flags, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "too short for the objective fim" in error["what"]
    for line in error["fix"].splitlines():
        assert main(["data", "peek", *flags, line]) == 0
