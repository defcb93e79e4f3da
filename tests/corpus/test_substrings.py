"""Runs of words that occur twice equal brute force, for all units and processes.

Earlier runs and removal are tested too.
"""

import random
import re
import shutil
from pathlib import Path

import pytest

from jaxlm.corpus.config import Substrings
from jaxlm.corpus.dedup.substrings import fingerprints
from tests.corpus.recipes import kept, lines, removed, run, tree, write_lines

WORDS = 6
SET = (
    *("--config.source=in/*.jsonl", "--config.stages=()", "--config.dedup=substrings"),
    *(f"--config.substrings.words={WORDS}", "--config.unit_bytes=1000"),
)


def brute_force(texts: list[str], words: int) -> list[str]:
    """Each text without the words of every run that stood before, by a set of all runs."""
    seen, left = set(), []
    for text in texts:
        places = [match.span() for match in re.finditer(r"\w+", text)]
        spoken = [text[begin:end].lower() for begin, end in places]
        gone = set()
        for at in range(len(spoken) - words + 1):
            each = tuple(spoken[at : at + words])
            if each in seen:
                gone.update(range(at, at + words))
            seen.add(each)
        rest, end = "", 0
        for number, (begin, after) in enumerate(places):
            # What is between two words goes where both go.
            rest += "" if {number - 1, number} <= gone else text[end:begin]
            rest += "" if number in gone else text[begin:after]
            end = after
        left.append((rest + text[end:]).strip("\n") if gone else text)
    return [text for text in left if text.strip()]


def corpus(seed: int, count: int = 60) -> list[str]:
    """Texts of few words with stretches of each other, in other case and with other marks."""
    draw = random.Random(seed)
    vocabulary = [f"Word{n}" for n in range(40)] + ["ÉTÉ", "İki", "naïve"]
    texts = []
    for _ in range(count):
        spoken = draw.choices(vocabulary, k=draw.randrange(2, 60))
        for _ in range(draw.randrange(4)):
            other = re.findall(r"\w+", draw.choice(texts)) if texts else spoken
            begin = draw.randrange(max(1, len(other) - 12))
            piece = other[begin : begin + draw.randrange(3, 20)]
            at = draw.randrange(len(spoken) + 1)
            spoken[at:at] = [word.upper() for word in piece] if draw.random() < 0.3 else piece
        texts.append("".join(word + draw.choice((" ", ", ", "\n", " -- ")) for word in spoken))
    texts.append("again and " * 30)
    return texts


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_cut_is_what_brute_force_cuts(here, capsys, seed):
    texts = corpus(seed)
    for number in range(3):
        part = [{"text": text} for text in texts[number::3]]
        write_lines(here / f"in/{number}.jsonl", part)
    ordered = [text for number in range(3) for text in texts[number::3]]
    answer = run(capsys, *SET)
    assert kept() == brute_force(ordered, WORDS)
    assert answer["notes"]["substrings: cut out"] == len(lines("cut/*.jsonl")) > 20
    assert len(list(Path("out/units").iterdir())) == 3


def test_the_bytes_are_the_same_with_several_processes(here, capsys):
    write_lines(here / "in/a.jsonl", [{"text": text} for text in corpus(3)])
    write_lines(here / "in/b.jsonl", [{"text": text} for text in corpus(4)])
    run(capsys, *SET)
    first = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *SET, "--workers=2")
    assert tree(Path("out")) == first


def test_what_stands_in_an_earlier_run_is_cut_and_chains_of_cuts_lose_nothing(here, capsys):
    texts = corpus(5)
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts[:30]])
    run(capsys, *SET)
    before = kept()
    shutil.move("out", "before")
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts[30:]])
    run(capsys, *SET, "--config.against=before")
    assert [*before, *kept()] == brute_force([*before, *texts[30:]], WORDS)
    path = next(Path("before/kept").iterdir())
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    words = ("--config.against=before", "--out=other")
    assert run(capsys, *SET, *words, code=65)["error"]["where"] == str(path)


def test_documents_that_consist_of_what_stood_before_can_be_removed_whole(here, capsys):
    one = " ".join(f"first{n}" for n in range(40))
    two = " ".join(f"second{n}" for n in range(40))
    texts = [one, f"{one} {two}", two, f"new {two[: len(two) // 4]}", f"{two} again"]
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts])
    answer = run(capsys, *SET, "--config.substrings.action=remove", "--config.substrings.share=0.4")
    # The words of the second alone went with it, so the third is the first to have them.
    assert kept() == [one, two]
    assert answer["removed"] == {"substrings.repeated": 3}
    assert removed()["substrings.repeated"][0]["detail"] == "50.0% of its words occur elsewhere"


def test_spans_and_runs_of_words_are_cut_out_of_one_text(here, capsys):
    line = " ".join(f"word{n}" for n in range(30))
    texts = [f"{line}\nThe first ends.", f"Before.\n{line}\nMore {line} after.", line]
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts])
    answer = run(capsys, *SET, "--config.dedup=spans,substrings", "--config.spans.unit=line")
    assert kept() == [texts[0], "Before.\nMore  after."]
    assert answer["removed"] == {"substrings.nothing_left": 1}
    assert answer["notes"] == {"spans: cut out": 2, "substrings: cut out": 3}


def test_texts_that_share_a_run_share_a_fingerprint_and_those_are_few():
    draw = random.Random(6)
    config = Substrings(words=20)
    for _ in range(200):
        shared = [f"w{draw.randrange(10**6)}" for _ in range(20)]
        one, two = (
            [f"w{draw.randrange(10**6)}" for _ in range(draw.randrange(40))] for _ in range(2)
        )
        texts = (" ".join([*words[::2], *shared, *words[1::2]]) for words in (one, two))
        a, b = (set(fingerprints(text, config).tolist()) for text in texts)
        assert a & b
    text = " ".join(f"w{draw.randrange(10**9)}" for _ in range(5000))
    assert len(fingerprints(text, config)) / 5000 == pytest.approx(2 / 12, rel=0.1)
    assert len(fingerprints("too short to be looked at", config)) == 0
