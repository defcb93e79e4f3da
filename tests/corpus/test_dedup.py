"""Duplicates: the stated probability against exact Jaccard, clusters, spans."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from jaxlm.corpus.config import MinHash, Spans
from jaxlm.corpus.dedup.minhash import recall, signature, similar
from jaxlm.corpus.dedup.signatures import ranges, spans, without
from jaxlm.corpus.ngrams import words
from tests.corpus.recipes import kept, lines, prose, removed, run, write_lines

CONFIG = MinHash()
SIGNATURE = [573746022, 332079803, 1700173297, 924348503]
VOCABULARY = [f"word{number}" for number in range(5000)]


def shingles(text: str) -> set[tuple[str, ...]]:
    spoken = words(text)
    return {tuple(spoken[at : at + CONFIG.words]) for at in range(len(spoken) - CONFIG.words + 1)}


def jaccard(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def pairs(similarity: float, count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs of random texts; one has as many words changed as the similarity requires."""
    draw = random.Random(seed)
    size = 300
    # A changed word changes five runs of one text: s = (n - 5k) / (n + 5k).
    changed = round(size * (1 - similarity) / (1 + similarity) / CONFIG.words)
    pairs = []
    for _ in range(count):
        text = draw.choices(VOCABULARY, k=size)
        other = list(text)
        step = size // max(1, changed)
        for at in range(0, changed * step, step):
            other[at + draw.randrange(step - CONFIG.words + 1 if step > CONFIG.words else 1)] = (
                "changed"
            )
        pairs.append((" ".join(text), " ".join(other)))
    return pairs


def found_share(texts: list[tuple[str, str]]) -> float:
    """The share of pairs that are found, each looked for among all the others."""
    every = np.array([signature(text, CONFIG) for pair in texts for text in pair])
    got = {(a, b) for a, b, _ in similar(every, CONFIG)}
    assert all(b == a + 1 and a % 2 == 0 for a, b in got), "texts of different pairs share nothing"
    return len(got) / len(texts)


@pytest.mark.parametrize("similarity", [0.9, 0.8, 0.75])
def test_pairs_are_found_as_often_as_is_stated(similarity, record_property):
    texts = pairs(similarity, 150, seed=int(similarity * 100))
    exact = [jaccard(*pair) for pair in texts]
    stated = float(np.mean([recall(each, CONFIG) for each in exact]))
    measured = found_share(texts)
    record_property(
        "table",
        f"near duplicates of Jaccard {np.mean(exact):.3f}: found {measured:.3f}, stated at least "
        f"{stated:.3f}",
    )
    assert abs(np.mean(exact) - similarity) < 0.03
    error = (stated * (1 - stated) / len(texts)) ** 0.5
    assert measured >= stated - 3 * error - 1e-9


def test_the_curve_is_high_where_it_is_wanted_and_low_elsewhere():
    assert recall(0.9, CONFIG) > 0.99
    assert recall(0.8, CONFIG) > 0.93
    assert recall(1.0, CONFIG) == 1
    assert recall(0.3, CONFIG) == 0
    assert recall(0.8, MinHash(bands=32)) > recall(0.8, CONFIG)


def test_pairs_that_are_not_alike_are_left_alone():
    assert found_share(pairs(0.5, 150, seed=1)) <= 0.02


def test_pairs_that_are_taken_for_alike_are(record_property):
    """Precision among pairs of every similarity, with exact Jaccard as the judge; and recall.

    There are as many pairs of each similarity.
    """
    steps = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    texts = [pair for seed, step in enumerate(steps) for pair in pairs(step, 60, seed)]
    exact = np.array([jaccard(*pair) for pair in texts])
    every = np.array([signature(text, CONFIG) for pair in texts for text in pair])
    is_pair = np.zeros(len(texts), bool)
    for one, other, _ in similar(every, CONFIG):
        assert other == one ^ 1, "texts of different pairs share nothing"
        is_pair[one // 2] = True
    for threshold, least in (
        (0.7, 0.8),
        (0.65, 0.97),
    ):  # a signature's share has an error of a few hundredths
        is_alike = exact >= threshold
        precision = (is_pair & is_alike).sum() / is_pair.sum()
        record_property(
            "table",
            f"near duplicates of Jaccard {threshold:g} or more: precision {precision:.3f}, recall "
            f"{is_pair[is_alike].mean():.3f}; {is_pair.sum()} of {len(texts)} pairs of Jaccard 0.3 "
            "to 0.9 found",
        )
        assert precision >= least
    assert not is_pair[exact < 0.55].any()


def test_the_clusters_are_those_of_brute_force(here, capsys):
    """Families of edited texts, on several files; exact comparison is the reference."""
    draw = random.Random(5)
    texts = []
    for _ in range(12):
        text = draw.choices(VOCABULARY, k=300)
        for edits in (0, 1, 2, 3):
            other = list(text)
            for at in draw.sample(range(300), edits):
                other[at] = "edit"
            texts.append(" ".join(other))
    draw.shuffle(texts)
    for number in range(4):
        write_lines(
            here / f"in/{number}.jsonl", [{"text": text} for text in texts[number * 12 :][:12]]
        )
    run(
        capsys,
        *(
            "--config.source=in/*.jsonl",
            "--config.stages=()",
            "--config.dedup=near",
            "--config.unit_bytes=1",
        ),
    )
    stated = json.loads(Path("out/report.json").read_text())["near_recall_at_least"]
    assert stated == {f"{s:g}": round(recall(s, CONFIG), 4) for s in (0.7, 0.75, 0.8, 0.85, 0.9)}
    assert len(list(Path("out/units").iterdir())) == 4
    group = list(range(len(texts)))
    for a, b in itertools.combinations(range(len(texts)), 2):
        if jaccard(texts[a], texts[b]) >= 0.7:
            old, new = group[b], group[a]
            group = [new if each == old else each for each in group]
    first = sorted({group.index(each) for each in group})
    assert kept() == [texts[at] for at in first]
    assert len(first) == 12
    place = lambda at: {"file": f"in/{at // 12}.jsonl", "record": at % 12 + 1}  # noqa: E731
    assert [cluster["kept"] for cluster in lines("clusters.jsonl")] == [place(at) for at in first]
    assert all(each["agreement"] >= 0.7 for c in lines("clusters.jsonl") for each in c["removed"])
    assert "in/0.jsonl" in removed()["near"][0]["detail"]


def test_a_signature_is_the_same_on_every_machine():
    """Numbers of another machine: a change would let old and new corpora no longer be compared."""
    small = MinHash(bands=2, rows=2)
    assert signature("To be, or not to be: that is the question.", small).tolist() == SIGNATURE
    assert signature("to BE or not -- to be that is the question", small).tolist() == SIGNATURE
    assert signature("... !?", small) is None
    assert signature("two words", small) is not None


def test_texts_without_words_and_short_ones_are_no_near_duplicates_of_others(here, capsys):
    texts = ["... !", "!!! ?", "one two", "one three", "One, two!"]
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts])
    run(capsys, "--config.source=in/a.jsonl", "--config.stages=()", "--config.dedup=near")
    assert kept() == texts[:4]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_spans_make_up_the_text_and_those_that_are_cut_are_gone(unit):
    config = Spans(unit=unit, characters=3)
    text = "one\ntwo\n\n \n\nthree\nxx\n\n\nfour\n"
    assert "".join(spans(text, config)) == text
    assert without(text, ()) == text
    cut = without(text, ranges(text, config, {1}))
    assert cut == (
        "one\n\n \n\nthree\nxx\n\n\nfour\n" if unit == "line" else "one\ntwo\n\n \n\nfour\n"
    )


def test_spans_stay_where_they_stood_first_in_what_stays(here, capsys):
    note = (
        "This note stands at the end of every page of the site and is longer than a hundred "
        "characters, by some."
    )
    assert len(note) >= 100
    pages = [f"{prose(n)}\n\n{note}\n\n{prose(n + 50)}" for n in range(3)]
    rows = [prose(90), prose(90) + f"\n\n{note}", *pages, note, f"{note}\n\n{note}"]
    write_lines(here / "in/a.jsonl", [{"text": prose(91)}])
    write_lines(here / "in/b.jsonl", [{"text": text} for text in rows])
    answer = run(
        capsys,
        *(
            "--config.source=in/*.jsonl",
            "--config.stages=()",
            "--config.dedup=spans",
            "--config.unit_bytes=1",
        ),
    )
    # The second row's prose and the note's first place stay; all other repetitions go.
    assert kept() == [
        prose(91),
        prose(90),
        note,
        *(f"{prose(n)}\n\n{prose(n + 50)}" for n in range(3)),
    ]
    assert len(removed()["spans.nothing_left"]) == 2
    assert answer["notes"] == {"spans: cut out": 7}
    pieces = lines("cut/*.jsonl")
    assert [piece["text"].strip() for piece in pieces] == [prose(90), *[note] * 6]
    assert pieces[1] | {"text": ""} == {
        **{"text": "", "file": "in/b.jsonl", "record": 3, "meta": {}, "kind": "spans"},
        "begin": len(prose(0)) + 2,
    }
