"""Texts scored by a run: against float64, and as a stage of a recipe."""

import json
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.special

from jaxlm.cli.main import main
from jaxlm.corpus.config import Perplexity
from jaxlm.recipes.use import evaluate, load
from tests.corpus.recipes import kept, lines, removed, run, tree, write_lines
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

WORDS = "one two three four five six seven eight nine ten".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run that has learnt ten words, letter by letter."""
    folder = tmp_path_factory.mktemp("texts")
    settings = {"model.dropout": 0.0, "optim.lr": 1e-2, "train.steps": 40, "eval.every": "100%"}
    config = harness.write_config(folder, settings | {"checkpoint.every": 40})
    workdir = folder / "run"
    assert main(["train", f"--config={config}", f"--workdir={workdir}", "--quiet"]) == 0
    return workdir


def like_those(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(5, 40))) for _ in range(count)]


def noise(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    letters = "".join(WORDS) + "     "
    return ["".join(draw.choices(letters, k=draw.randrange(20, 160))) for _ in range(count)]


def reference(opened, text: str, most: int) -> float:
    """Row by row without padding, from logits, in float64."""
    ids = np.array([1, *opened.tokenizer.encode(text)][:most], np.int32)
    nll, length = [], opened.run.data.sequence

    @jax.jit
    def forward(params, tokens, positions):
        model = opened.model.blueprint.merge(params)
        return model(tokens, positions=positions, segments=np.ones(tokens.shape, np.int32))

    for begin in range(0, len(ids) - 1, length):
        row = ids[begin : begin + length + 1]
        positions = np.arange(len(row) - 1, dtype=np.int32)[None]
        logits = np.asarray(forward(opened.params, row[None, :-1], positions), np.float64)[0]
        logp = scipy.special.log_softmax(logits, axis=1)
        nll += (-logp[np.arange(len(row) - 1), row[1:]]).tolist()
    return float(np.exp(np.mean(nll)))


def test_the_perplexity_is_that_of_float64(model):
    opened = load.load_run(model)
    score = evaluate.scorer(Perplexity(run=str(model), tokens=75))
    # 32 tokens a row: exactly one and two, and beyond what is looked at.
    for size in (32, 64, 200):
        text = ("one two three four five six " * 8)[:size]
        with jax.set_mesh(opened.model.mesh):
            expected = reference(opened, text, 75)
        assert score(text) == pytest.approx(expected, rel=2e-5)
    assert score("") is None


@pytest.mark.slow
def test_noise_is_told_from_what_the_run_has_learnt(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good, bad = like_those(40, 1), noise(40, 2)
    write_lines(tmp_path / "in/a.jsonl", [{"text": text} for text in (*good[:20], *bad, "")])
    write_lines(tmp_path / "in/b.jsonl", [{"text": text} for text in good[20:]])
    words = ["--config.source=in/*.jsonl", "--config.stages=perplexity", "--config.unit_bytes=1"]
    words += [f"--config.perplexity.run={model}", "--config.perplexity.most=8"]
    answer = run(capsys, *words)
    report = kept()
    right = sum(text in good for text in report)
    assert right / len(report) >= 0.95, "precision"
    assert right / len(good) >= 0.95, "recall"
    assert answer["removed"]["perplexity.high"] == len(removed()["perplexity.high"])
    assert all(1 < row["meta"]["perplexity"] <= 8 for row in lines("kept/*.jsonl"))
    shutil.rmtree("out")
    least = ("--config.perplexity.most=1e9", "--config.perplexity.least=8")
    assert run(capsys, *words, *least)["removed"]["perplexity.low"] == len(report)


@pytest.mark.slow
def test_processes_that_each_open_the_run_write_the_same_bytes(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        texts = (*like_those(10, number), *noise(10, number))
        write_lines(tmp_path / f"in/{number}.jsonl", [{"text": text} for text in texts])
    words = ["--config.source=in/*.jsonl", "--config.stages=perplexity", "--config.unit_bytes=1"]
    words += [f"--config.perplexity.run={model}", "--config.perplexity.most=8"]
    run(capsys, *words)
    first = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *words, "--workers=2")
    assert tree(Path("out")) == first


def test_what_cannot_score_is_refused_before_anything_is_written(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in/a.jsonl", [{"text": "one"}])
    words = ["--config.source=in/a.jsonl", "--config.stages=perplexity"]
    assert run(capsys, *words, code=2)["error"]["fix"] == "jaxlm config explain perplexity.run"
    error = run(capsys, *words, "--config.perplexity.run=none", code=66)["error"]
    assert error["what"] == "there is no run in none"
    limits = ("--config.perplexity.least=9", "--config.perplexity.most=3")
    assert run(capsys, *words, f"--config.perplexity.run={model}", *limits, code=2)
    assert not Path("out").exists()
    both_ways = tmp_path / "masked"
    shutil.copytree(model, both_ways)
    config = json.loads((both_ways / "config.json").read_text())
    config["objective"] = {"name": "masked"}
    (both_ways / "config.json").write_text(json.dumps(config))
    error = run(capsys, *words, f"--config.perplexity.run={both_ways}", code=2)["error"]
    assert "bidirectional" in error["what"]
