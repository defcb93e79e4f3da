"""Injected items are found, also with other line ends, and others are not."""

import random
import textwrap

import pytest

from jaxlm.evals.contamination import ItemIndex

WORDS = [f"{a}{b}" for a in "balinoterisumakedo" for b in ("", "ra", "nim", "stok", "el")]


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    return {f"item {n}": " ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for n in range(400)}


def changed(text, draw):
    """Return the text with other line ends, case and punctuation."""
    text = "\n  ".join(textwrap.wrap(text, draw.randint(20, 60)))
    return text.capitalize().replace(" ", ", ", 1) + "."


@pytest.mark.parametrize("is_changed", [False, True])
def test_injected_items_are_found_and_others_are_not(texts, is_changed):
    draw = random.Random(1)
    injected = set(draw.sample(sorted(texts), 200))
    documents = {}
    for item in injected:
        words = draw.choices(WORDS, k=300)
        text = changed(texts[item], draw) if is_changed else texts[item]
        words.insert(draw.randint(0, 300), text)
        documents[item] = " ".join(words)
    index = ItemIndex(texts)
    results = {item: index.items_in(document) for item, document in documents.items()}
    recall = sum(item in touched for item, touched in results.items()) / len(injected)
    alarms = sum(len(set(touched) - {item}) for item, touched in results.items())
    assert recall >= 0.99
    assert alarms <= 2  # pairs of 200 documents and 400 items


def test_part_of_a_long_item_is_enough_and_a_short_item_is_searched_whole():
    long = " ".join(f"word{n}" for n in range(30))
    index = ItemIndex({"long": long, "short": "one two three four five six", "least": "one two"})
    part = " ".join(f"word{n}" for n in range(9, 22))
    assert index.items_in(f"a {part} b") == ["long"]
    assert index.items_in(part.replace("word15", "other")) == []
    assert index.items_in("One two; three\nfour five SIX seven") == ["short"]
    assert index.items_in("one two three four five") == []
    assert index.too_short == ["least"]
