"""A classifier from examples: its step, its answers on new texts, and stages that use it."""

import functools
import json
import random
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jaxlm.cli.main import main
from jaxlm.corpus.filters.linear import Features, LinearClassifier
from jaxlm.recipes import train_classifier
from tests.corpus.recipes import run, write_lines

PROSE = [f"prose{n}" for n in range(300)]
SPAM = [f"spam{n}" for n in range(300)]
BOTH = [f"both{n}" for n in range(300)]


def texts(first: list[str], other: list[str], count: int, seed: str, share: float) -> list[str]:
    """Texts of 30 words from two lists and a shared rest.

    Args:
      first: words of this label: a share of each text.
      other: words of the other label: a fifth of the share.
      count: number of texts.
      seed: seed of the draw.
      share: fraction of words from `first`.
    """
    draw = random.Random(seed)
    pools, weights = (first, other, BOTH), (share, share / 5, 1 - 1.2 * share)
    return [
        " ".join(draw.choice(draw.choices(pools, weights)[0]) for _ in range(30))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with examples and a classifier of them, and the answer of the command."""
    here = tmp_path_factory.mktemp("classifier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        for name, words, other in (("good", PROSE, SPAM), ("bad", SPAM, PROSE)):
            write_lines(
                here / f"{name}.jsonl",
                [{"text": text} for text in texts(words, other, 500, name, 0.3)],
            )
        with open("good.jsonl", "a") as file:
            file.write(json.dumps({"text": texts(SPAM, PROSE, 1, "bad", 0.3)[0]}) + '\n{"tex\n')
        assert main(_command("classifier")) == 0
    return here


def _command(out: str) -> list[str]:
    words = ["--examples=good=good.jsonl", "--examples=bad=bad.jsonl", f"--out={out}"]
    return ["data", "train-classifier", "--json", "--held_out=20%", "--buckets=8192", *words]


@pytest.fixture
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def test_texts_it_never_saw_are_told_apart_as_well_as_it_says(here, record_property):
    about = json.loads(Path("classifier/classifier.json").read_text())
    stated = about["measured"]
    assert stated["left_out"] == {"broken: not JSON": 1, "under two labels": 1}
    assert 380 <= stated["examples"]["good"] <= 420
    model = LinearClassifier.read(Path("classifier"), "quality.model")
    good, bad = texts(PROSE, SPAM, 1000, "new good", 0.3), texts(SPAM, PROSE, 1000, "new bad", 0.3)
    output = np.array([model.probabilities(text)[0] >= 0.5 for text in (*good, *bad)])
    precision, recall = output[:1000].sum() / output.sum(), output[:1000].mean()
    figures = stated["labels"]["good"]
    record_property(
        "table",
        f"a classifier on 2,000 new texts: precision {precision:.3f}, recall {recall:.3f}; "
        f"stated on {sum(stated['held_out'].values())}: {figures['precision']:.3f}, "
        f"{figures['recall']:.3f}",
    )
    assert min(precision, recall) > 0.9
    # Three standard deviations of a share of about 100.
    assert abs(precision - figures["precision"]) < 0.09
    assert abs(recall - figures["recall"]) < 0.09
    assert figures["thresholds"]["0.5"]["recall"] == figures["recall"]
    recalls = [each["recall"] for each in figures["thresholds"].values()]
    assert recalls == sorted(recalls, reverse=True)


def test_the_stage_keeps_what_is_likely_enough_and_says_how_likely(here, capsys):
    good, bad = texts(PROSE, SPAM, 20, "a", 0.6), texts(SPAM, PROSE, 20, "b", 0.6)
    write_lines(here / "in/a.jsonl", [{"text": text} for text in (*good, *bad)])
    words = ("--config.source=in/a.jsonl", "--config.stages=quality", "--config.dedup=()")
    answer = run(capsys, *words, "--config.quality.model=classifier", "--out=quality")
    assert answer["removed"] == {"quality.low": 20}
    rows = [json.loads(line) for line in Path("quality/kept/00000.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == good
    model = LinearClassifier.read(Path("classifier"), "quality.model")
    for row in rows:
        assert row["meta"]["quality"] == pytest.approx(_reference(model, row["text"])[0], abs=1e-4)
    error = run(capsys, *words, "--out=other", code=2)["error"]
    assert error["fix"] == "jaxlm config explain quality.model"
    error = run(capsys, *words, "--config.quality.model=none", "--out=other", code=66)["error"]
    assert error["fix"] == "find . -name classifier.json"
    chosen = ("--config.quality.model=classifier", "--config.quality.label=fine")
    assert "good, bad" in run(capsys, *words, *chosen, "--out=other", code=2)["error"]["why"]


def test_what_comes_next_works_when_it_is_pasted(here, capsys):
    """The flags are pasted into a command line of `jaxlm data run`."""
    shutil.copy("good.jsonl", "in/good.jsonl")
    words = [word for word in _command("new classifier") if word != "--json"]
    words = [word.replace("=good=", "=quite good=") for word in words]
    assert main(words) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("next: "))
    flags, verb = line.removeprefix("next: ").split("    # of ")
    assert verb == "jaxlm data run"
    answer = run(capsys, "--config.source=in/good.jsonl", *shlex.split(flags), "--out=chosen")
    assert answer["kept"] > 300
    recipe = json.loads(Path("chosen/recipe.json").read_text())["recipe"]
    assert recipe["quality"]["model"] == "new classifier"
    assert recipe["quality"]["label"] == "quite good"


def _reference(model: LinearClassifier, text: str) -> np.ndarray:
    """The probabilities in float64, bucket by bucket."""
    features = sorted(set(model.features.of(text).tolist()))
    logits = model.bias.astype(np.float64)
    for bucket in features:
        logits = logits + model.weights[bucket].astype(np.float64) / len(features) ** 0.5
    return np.exp(logits) / np.exp(logits).sum()


def test_the_same_examples_make_the_same_classifier_and_none_is_overwritten(here, capsys):
    assert main(_command("again")) == 0
    for name in ("classifier.json", "classifier.safetensors"):
        assert Path("again", name).read_bytes() == Path("classifier", name).read_bytes()
    capsys.readouterr()
    assert main(_command("again")) == 73
    assert json.loads(capsys.readouterr().out)["error"]["fix"] == "--out=again-2"


def test_a_step_goes_down_the_gradient_in_float64():
    draw = np.random.default_rng(5)
    buckets, count, labels = 12, 6, 3
    params = {
        "weights": draw.normal(size=(buckets, labels)).astype(np.float32),
        "bias": draw.normal(size=labels).astype(np.float32),
    }
    rows = [np.sort(draw.choice(buckets, n, replace=False)) for n in (1, 3, 5, 0, 2, 4)]
    ids = np.full((count, 6), buckets, np.int32)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
    targets, weights = draw.integers(0, labels, count), draw.random(count)
    weights[-1] = 0  # a row that only fills the batch
    optimizer = optax.sgd(1.0)
    after, _ = jax.jit(functools.partial(train_classifier._step, optimizer))(
        params,
        optimizer.init(params),
        ids,
        targets.astype(np.int32),
        weights.astype(np.float32),
    )
    gradient = {name: np.zeros(value.shape) for name, value in params.items()}
    for row, target, weight in zip(rows, targets, weights, strict=True):
        scale = max(1, len(row)) ** -0.5
        logits = params["weights"][row].astype(np.float64).sum(0) * scale + params["bias"]
        error = np.exp(logits) / np.exp(logits).sum() - np.eye(labels)[target]
        gradient["weights"][row] += weight / weights.sum() * scale * error
        gradient["bias"] += weight / weights.sum() * error
    for name, value in gradient.items():
        np.testing.assert_allclose(params[name] - after[name], value, rtol=1e-5, atol=1e-6)


def test_runs_of_words_are_hashed_each_once():
    features = Features(buckets=2**40, run=2)
    assert len(features.of("one two one two")) == 4  # one, two, one two, two one
    assert set(features.of("two one")) < set(features.of("one two one"))
    assert len(Features(words=3).of("a b c d e f")) == 5
    assert len(features.of("")) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--examples=good=good.jsonl"], 2, "needs two labels"),
        (["--examples=good.jsonl"], 2, "names no label"),
        (["--examples=good=good.jsonl", "--examples=bad=none"], 66, "no file matches none"),
        (["--examples=good=good.jsonl", "--examples=few=few.jsonl"], 65, "few has "),
        (["--epochs=0"], 2, "is below 1"),
        (["--held_out=90%"], 2, "is not a share"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(here, capsys, words, code, what):
    write_lines(here / "few.jsonl", [{"text": f"text {n}"} for n in range(15)])
    assert main(["data", "train-classifier", "--json", "--out=new", *words]) == code
    assert what in json.loads(capsys.readouterr().out)["error"]["what"]
    assert not Path("new").exists()


def test_a_damaged_classifier_is_refused(here, tmp_path, capsys):
    for name in ("classifier.json", "classifier.safetensors"):
        (tmp_path / name).write_bytes(Path("classifier", name).read_bytes())
    data = bytearray((tmp_path / "classifier.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "classifier.safetensors").write_bytes(data)
    write_lines(here / "in/b.jsonl", [{"text": "some"}])
    words = ["--config.source=in/b.jsonl", "--config.stages=quality", "--out=other"]
    error = run(capsys, *words, f"--config.quality.model={tmp_path}", code=65)["error"]
    assert "is not the one" in error["why"]
