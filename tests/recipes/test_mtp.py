"""Multi-token prediction through the front door: trained, resumed, evaluated, exported, planned."""

import json
import re

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.core import tree
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "train.steps": 4,
    "train.microbatches": 2,
    "data.sequence": 64,
    "objective.name": "mtp",
    "objective.weights": (0.3, 0.1),
    "eval.batches": 2,
}
SHARES = {"causal": 1, "fim": 0, "mtp": 1}
MIXED = [
    "--config.objective.name=mixture",
    *(f"--config.objective.weights.{name}={weight}" for name, weight in SHARES.items()),
    "--config.objective.mtp.weights=0.3",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "mtp")


def answer(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_next_token_is_what_is_compared_and_the_others_are_told(run, capsys):
    rows = [r for r in harness.records(run) if r["split"] == "train"]
    assert all(r["ahead_2_nats"] > 0 and r["ahead_3_nats"] > 0 for r in rows)
    assert all(0 <= r["ahead_2_accuracy"] <= 1 for r in rows)
    assert rows[-1]["loss_nats"] < rows[0]["loss_nats"]
    assert rows[-1]["ahead_2_nats"] < rows[0]["ahead_2_nats"]
    last = [r for r in harness.records(run) if r["split"] == "val"][-1]
    assert answer(capsys, "eval", f"--workdir={run}")["loss_nats"] == pytest.approx(
        last["loss_nats"], rel=1e-6
    )
    assert any(path.startswith("params/heads/1/") for path in harness.store(run).arrays(4))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--config.tune.name=lora",)])
def test_another_objective_begins_without_the_heads(config, run, tmp_path, flags):
    causal = ("--config.objective.name=causal", f"--init_from={run}", "--stop_at=1")
    begun = harness.trained(config, tmp_path / "run", *causal, *flags)
    first = next(r for r in harness.records(begun) if r["split"] == "val")
    (last,) = (r for r in harness.records(run) if (r["split"], r["step"]) == ("val", 4))
    assert (first["step"], first["loss_nats"]) == (0, pytest.approx(last["loss_nats"], rel=1e-5))
    assert f"left out: the heads for later tokens of {run}" in (begun / "log.txt").read_text()


@pytest.mark.slow
def test_heads_begin_at_random_on_a_model_without_them(config, tmp_path):
    plain = ("--config.objective.name=causal", "--config.train.steps=2")
    base = harness.trained(config, tmp_path / "base", *plain)
    begun = harness.trained(config, tmp_path / "run", f"--init_from={base}", "--stop_at=1")
    losses = [
        next(r["loss_nats"] for r in harness.records(each) if (r["split"], r["step"]) == at)
        for each, at in ((base, ("val", 2)), (begun, ("val", 0)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "random at first: the heads for later tokens" in (begun / "log.txt").read_text()


@pytest.mark.slow
def test_an_export_says_that_it_leaves_the_heads_out(run, tmp_path, capsys):
    assert main(["export", f"--workdir={run}", f"--out={tmp_path / 'hub'}"]) == 0
    assert "left out: 2 heads" in capsys.readouterr().out
    parity = json.loads((tmp_path / "hub/parity.json").read_text())
    assert parity["is_bit_identical"]


def test_the_plan_counts_the_heads(config, capsys):
    words = ["plan", f"--config={config}", "--on=cpu", "--config.model.vocab=320"]
    plan = answer(capsys, *words)
    plain = answer(capsys, *words, "--config.objective.name=causal")
    trained = configs.load(Run, config).value
    model = setup.build_sharded_model(trained, 320, setup.build_mesh_for(trained))
    params = tree.leaves(setup.abstract_params(model))
    heads = sum(leaf.size for path, leaf in params.items() if path.startswith("heads/"))
    assert plan["parameters"] - plain["parameters"] == heads
    for name in ("parameters", "gradients", "optimizer", "logits", "activations"):
        assert plan["bytes_per_device"][name] > plain["bytes_per_device"][name]
    assert plan["flops_per_token"] > plain["flops_per_token"]


@pytest.mark.slow
def test_peek_shows_what_each_head_predicts(config, capsys):
    """Each segment has the same text; the head k tokens ahead begins k tokens later.

    In a mixture the head is idle in some rows.
    """
    rows = answer(capsys, "data", "peek", f"--config={config}", "--rows=4")["rows"]
    for segment in (segment for row in rows for segment in row):
        first, marked = segment["text"].rstrip("\u00bb").split("\u00ab")
        tokens = re.findall(r"<\|\w+\|>|.", marked)
        for k in (1, 2):
            seen, rest = "".join(tokens[:k]), "".join(tokens[k:])
            assert segment[f"ahead_{k + 1}"] == first + seen + (rest and f"\u00ab{rest}\u00bb")
    rows = answer(capsys, "data", "peek", f"--config={config}", "--rows=8", *MIXED)["rows"]
    assert {tuple(sorted(row[0])) for row in rows} == {
        ("source", "text"),
        ("ahead_2", "source", "text"),
    }


@pytest.mark.slow
def test_a_batch_of_a_mixture_without_such_a_row_says_nothing_of_further_tokens(config, tmp_path):
    flags = ["--config.train.batch=1", "--config.train.microbatches=1", "--config.train.steps=8"]
    assert main(harness.words(config, tmp_path / "run", *MIXED, *flags)) == 0
    rows = [r for r in harness.records(tmp_path / "run") if r["split"] == "train"]
    known = [r["ahead_2_nats"] for r in rows]
    assert None in known
    assert any(nats is not None and nats > 1 for nats in known)
    assert all(r["loss_nats"] > 1 for r in rows)
    arrays = harness.store(tmp_path / "run").arrays(8)
    assert any(path.startswith("params/heads/0/") for path in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["sequential", "parallel"])
def test_stopping_and_going_on_changes_no_bit(heads, config, tmp_path):
    words = [f"--config.objective.heads={heads}", "--config.model.dropout=0.1"]
    assert main(harness.words(config, tmp_path / "whole", *words)) == 0
    assert main(harness.words(config, tmp_path / "parts", *words, "--stop_at=2")) == 0
    assert main(harness.words(config, tmp_path / "parts", *words)) == 0
    assert harness.state_digest(tmp_path / "whole") == harness.state_digest(tmp_path / "parts")
    assert harness.losses(tmp_path / "whole") == harness.losses(tmp_path / "parts")


def test_what_cannot_be_is_refused(config, tmp_path, capsys):
    assert main(harness.words(config, tmp_path / "run", "--config.objective.weights=()")) == 2
    assert "which is the objective causal" in capsys.readouterr().err
    for flags in ((), MIXED):
        words = harness.words(config, tmp_path / "run", *flags, "--config.optim.name=sophia")
        assert main(words) == 2
        assert "next-token loss only, not of further heads" in capsys.readouterr().err
