"""Lists of words and a classifier of the user: categories, with precision and recall."""

import random
from pathlib import Path

import numpy as np
import pytest

from jaxlm.corpus.filters.linear import Features, LinearClassifier
from tests.corpus.recipes import WORDS, kept, prose, removed, run, write_lines

STAGE = ("--config.source=in/*.jsonl", "--config.stages=harmful", "--config.dedup=()")
LISTS = ("--config.harmful.words=lists/*.txt",)
# Made-up words: what a list holds is not the matter of this test.
WORDS_OF = {"cruel": ["grumph", "snarl worb", "Höhn"], "lewd": ["blorp", "zeem-oon vraff"]}


@pytest.fixture
def lists(here):
    (here / "lists").mkdir()
    for name, entries in WORDS_OF.items():
        (here / f"lists/{name}.txt").write_text("# a list\n" + "\n".join(entries) + "  # so\n\n")
    return here


def test_documents_with_more_words_of_a_list_than_may_be_go_by_category(lists, capsys):
    draw = random.Random(1)
    texts, truth = [], []
    for number in range(300):
        spoken = prose(number).split()
        kind = draw.choice([None, None, "cruel", "lewd"])
        hits = draw.randrange(3) if kind is None else draw.randrange(3, 7)
        for _ in range(hits):
            entry = draw.choice(WORDS_OF[kind or "cruel"])
            spoken.insert(
                draw.randrange(len(spoken)), entry.upper() if draw.random() < 0.5 else entry
            )
        spoken.insert(0, "grumphing unworb blorps")  # others that only hold them
        texts.append(" ".join(spoken))
        truth.append(kind)
    write_lines(lists / "in/a.jsonl", [{"text": text} for text in texts])
    answer = run(capsys, *STAGE, *LISTS, "--config.harmful.hits=2")
    assert kept() == [text for text, kind in zip(texts, truth, strict=True) if kind is None]
    for kind in ("cruel", "lewd"):
        removals = {row["text"] for row in removed()[f"harmful.{kind}"]}
        assert removals == {text for text, each in zip(texts, truth, strict=True) if each == kind}
        assert answer["removed"][f"harmful.{kind}"] == len(removals)
    assert answer["funnel"][1]["reasons"] == {
        kind.removeprefix("harmful."): count for kind, count in answer["removed"].items()
    }
    detail = removed()["harmful.lewd"][0]["detail"]
    assert "of its words: " in detail
    assert "blorp" in detail or "zeem oon vraff" in detail


def test_a_word_between_two_of_an_entry_makes_it_none(lists, capsys):
    texts = ["snarl, worb", "snarl and worb", "zeem oon; VRAFF", "zeem oon", "höhn", "HÖHN"]
    write_lines(lists / "in/a.jsonl", [{"text": text} for text in texts])
    run(capsys, *STAGE, *LISTS, "--config.harmful.hits=0")
    assert kept() == ["snarl and worb", "zeem oon"]


def write_classifier(folder: Path, labels: tuple[str, ...]) -> None:
    """One that looks for one word a label."""
    features = Features(buckets=2**12, run=1)
    weights = np.zeros((features.buckets, len(labels)), np.float32)
    for number, label in enumerate(labels):
        weights[features.of(label), number] = 30.0
    folder.mkdir()
    LinearClassifier(labels, features, weights, np.zeros(len(labels), np.float32)).write(folder, {})


def test_a_classifier_names_the_category_and_what_is_harmless_stays(lists, capsys):
    write_classifier(lists / "model", ("harmless", "threat", "hate"))
    texts = [
        f"{word} {' '.join(WORDS[:4])}" for word in ("harmless", "threat", "hate", "threat hate")
    ]
    write_lines(lists / "in/a.jsonl", [{"text": text} for text in texts])
    answer = run(capsys, *STAGE, *LISTS, "--config.harmful.model=model")
    # Of two that are as likely neither is above a half.
    assert answer["removed"] == {"harmful.hate": 1, "harmful.threat": 1}
    assert kept() == [texts[0], texts[3]]
    assert removed()["harmful.hate"][0]["detail"] == "probability 1.000"


def test_lists_and_classifiers_that_cannot_be_used_are_refused(lists, capsys):
    write_lines(lists / "in/a.jsonl", [{"text": "some"}])
    assert run(capsys, *STAGE, code=2)["error"]["fix"] == "jaxlm config explain harmful.words"
    assert run(capsys, *STAGE, "--config.harmful.words=none", code=66)
    write_classifier(lists / "model", ("good", "../../outside"))
    chosen = "--config.harmful.model=model"
    assert "good" in run(capsys, *STAGE, chosen, code=2)["error"]["fix"]
    error = run(capsys, *STAGE, chosen, "--config.harmful.harmless=good", code=65)["error"]
    assert "'../../outside'" in error["why"]
    Path("lists/a b.txt").write_text("x")
    assert "'a b'" in run(capsys, *STAGE, *LISTS, code=65)["error"]["why"]
    Path("lists/a b.txt").unlink()
    Path("lists/cruel.txt").write_text("fine\n***\n")
    assert "line 2" in run(capsys, *STAGE, *LISTS, code=65)["error"]["where"]
    Path("lists/cruel.txt").write_bytes(b"\xff\xfe")
    assert "UTF-8" in run(capsys, *STAGE, *LISTS, code=65)["error"]["what"]
    assert not Path("out").exists()
