"""Pairs and labels become rows of whole pairs; what cannot be used is counted by reason."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import conversations, dataset, preferred
from jaxlm.data.config import DataConfig
from jaxlm.data.conversations import Rejected

ASKED = {"role": "user", "content": "q"}


def said(text):
    return {"role": "assistant", "content": text}


def parsed(record, kind="pairs"):
    return preferred.parse(record, kind, ("assistant",))


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(path)


def opened(tmp_path, records, lines=None, **settings):
    config = {"kind": "pairs", "validation": (), "tokenizer": "bytes", "sequence": 64} | settings
    train, lines = write(tmp_path / "pairs.jsonl", records), [] if lines is None else lines
    root = tmp_path / "cache"
    return dataset.open_data(
        DataConfig(train=(train,), **config), seed=0, root=root, log=lines.append, warn=lines.append
    )


def pairs_of(batch):
    """Each pair of a batch as (row, chosen ids, rejected ids, margin)."""
    answers = batch.answers
    for row, first in zip(*np.nonzero(answers.sides[:, ::2]), strict=True):
        texts = [batch.targets[row][batch.segments[row] == 2 * first + n].tolist() for n in (1, 2)]
        sides = answers.sides[row, 2 * first : 2 * first + 2].tolist()
        assert sides == [1, -1]
        yield row, *texts, answers.margins[row, 2 * first]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ["q", "a", "b"]),
        (
            {"chosen": "Q: hi A: good", "rejected": "Q: hi A: great"},
            ["Q: hi A:", " good", " great"],
        ),
        ({"prompt": [ASKED], "chosen": [said("a")], "rejected": [said("b")]}, ["q", "a", "b"]),
        ({"prompt": "q", "chosen": [said("a")], "rejected": [said("b")]}, ["q", "a", "b"]),
        ({"chosen": [ASKED, said("a")], "rejected": [ASKED, said("b")]}, ["q", "a", "b"]),
        (
            {"prompt": "q", "chosen": [ASKED, said("a")], "rejected": [ASKED, said("b")]},
            ["q", "a", "b"],
        ),
    ],
)
def test_a_pair_has_one_prompt_and_two_answers_in_every_form(record, messages):
    chosen = parsed(record | {"margin": 2})
    rejected = chosen.rejected
    assert [m["content"] for m in (*chosen.messages, rejected.messages[-1])] == messages
    assert chosen.messages[:-1] == rejected.messages[:-1]
    assert (chosen.side, rejected.side, chosen.margin) == (1, -1, 2.0)
    assert list(chosen.weights) == list(rejected.weights) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "record", "missing"),
    [
        ("labeled", {"prompt": "q", "chosen": "a", "rejected": "b"}, "completion"),
        ("labeled", {"completion": "a", "label": True}, "prompt"),
        ("steps", {"steps": ["a"], "labels": [True]}, "prompt"),
    ],
)
def test_a_missing_field_is_named_with_the_form_of_the_kind(kind, record, missing):
    with pytest.raises(Rejected) as caught:
        parsed(record, kind)
    assert caught.value.why == f"it has no {missing}; its fields are {', '.join(record)}"
    assert caught.value.fix == preferred.FORMS[kind]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], conversations.NO_MESSAGES),
        ({"prompt": "q", "chosen": "a"}, conversations.NO_FIELD),
        ({"prompt": "q", "chosen": "a", "rejected": [said("b")]}, conversations.OTHER_FORM),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, conversations.OTHER_FORM),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, conversations.EQUAL),
        ({"prompt": "q", "chosen": "", "rejected": "a"}, conversations.EMPTY_TURN),
        ({"chosen": "a", "rejected": "b"}, conversations.OTHER_PROMPT),
        (
            {"chosen": [ASKED, said("a")], "rejected": [{**ASKED, "content": "p"}, said("b")]},
            conversations.OTHER_PROMPT,
        ),
        (
            {"prompt": "p", "chosen": [ASKED, said("a")], "rejected": [ASKED, said("b")]},
            conversations.OTHER_PROMPT,
        ),
        ({"chosen": [ASKED], "rejected": [ASKED, said("b")]}, conversations.EMPTY_TURN),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")},
            conversations.BAD_MARGIN,
        ),
    ],
)
def test_a_pair_that_cannot_be_used_has_a_reason(record, reason):
    with pytest.raises(Rejected) as error:
        parsed(record)
    assert error.value.reason == reason


def test_a_label_is_true_or_false():
    record = {"prompt": "q", "completion": "a"}
    assert [parsed(record | {"label": x}, "labeled").side for x in (True, False, 1)] == [1, -1, 1]
    for label in (None, "yes", 2):
        with pytest.raises(Rejected) as error:
            parsed(record | {"label": label}, "labeled")
        assert error.value.reason == conversations.BAD_LABEL


def test_rows_hold_whole_pairs_and_others_are_counted(tmp_path):
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 12, (40, 2)).tolist()
    records = [
        {"prompt": f"{n} ", "chosen": "a" * one, "rejected": "b" * two, "margin": n}
        for n, (one, two) in enumerate(sizes)
    ]
    wrong = [
        {"prompt": "q", "chosen": "a" * 40, "rejected": "b" * 40},
        {"prompt": "q", "chosen": "a" * 90, "rejected": "b" * 90},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "", "rejected": "a"},
        {"chosen": "a", "rejected": "b"},
    ]
    lines: list[str] = []
    data = opened(tmp_path, [*records, *wrong], lines)
    loader, manifest = data.train, data.train.shards.manifest
    batch = next(loader.evaluation(batch=loader.plan.rows))
    pairs = list(pairs_of(batch))
    assert sorted(margin for *_, margin in pairs) == list(range(40))
    for _, chosen, rejected, margin in pairs:
        one, two = sizes[int(margin)]
        prompt = len(f"{int(margin)} ")
        assert [len(chosen), len(rejected)] == [prompt + one + 1, prompt + two + 1]
    assert manifest.left_out == {
        conversations.TOO_LONG: 2,
        conversations.EQUAL: 1,
        conversations.EMPTY_TURN: 1,
        conversations.OTHER_PROMPT: 1,
    }
    assert (manifest.figures["pairs"], manifest.figures["chosen"]) == (40, 40)
    assert manifest.figures["chosen_tokens"] == sum(one + 1 for one, _ in sizes)
    total = sum(len(chosen) + len(rejected) for _, chosen, rejected, _ in pairs)
    assert total <= loader.plan.rows * 64 < 1.2 * total  # best fit


def test_labels_of_one_kind_are_no_preference(tmp_path):
    record = {"prompt": "q", "completion": "a"}
    for labels in ([True, True], [False, False]):
        with pytest.raises(DataError, match="labels of all answers are equal"):
            opened(tmp_path, [record | {"label": x} for x in labels], kind="labeled")
    data = opened(tmp_path, [record | {"label": x} for x in (True, False)], kind="labeled")
    batch = next(data.train.evaluation(batch=1))
    assert sorted(batch.answers.sides[0, :3].tolist()) == [-1, 0, 1]


def test_a_row_holds_more_answers_than_devices_can_split_and_another_row_fewer(tmp_path):
    records = [{"prompt": "q", "chosen": "a", "rejected": f"{n}"} for n in range(30)]
    records[0] |= {"prompt": "q" * 90}
    data = opened(tmp_path, records, sequence=256)
    batch = next(data.train.evaluation(batch=data.train.plan.rows))
    assert batch.answers.sides.shape[1] == 64
    assert (batch.answers.sides != 0).sum(1).max() > 32
    rejected = [data.tokenizer.decode(ids)[-2:].strip("q") for _, _, ids, _ in pairs_of(batch)]
    assert sorted(map(int, rejected)) == list(range(30))


def test_sources_of_pairs_are_mixed_and_each_answer_keeps_its_score(tmp_path):
    files = {
        name: write(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{name}{n}", "chosen": "a", "rejected": name * 9} for n in range(count)],
        )
        for name, count in (("x", 20), ("y", 10))
    }
    config = DataConfig(
        train=tuple(f"{name}={path}" for name, path in files.items()),
        kind="pairs", validation=("20%",), tokenizer="bytes", sequence=64,
    )  # fmt: skip
    data = dataset.open_data(config, seed=0, root=tmp_path / "cache", rows=100)
    assert sorted(data.validation) == ["val_x", "val_y"]
    scores = np.arange(data.train.shards.documents, dtype=np.float32) + 1
    loader = dataclasses.replace(data.train, reference=scores)
    read = loader.at(0, batch=40, rows=slice(0, 40))
    expected = [
        [scores[document] for document in loader.plan.pieces(key.row)["document"]]
        for key in loader.keys(0, 40)
    ]
    seen = [
        row[: len(of)].tolist() for row, of in zip(read.answers.reference, expected, strict=True)
    ]
    assert seen == expected
    assert {data.train.source(key) for key in loader.keys(0, 40)} == {"x", "y"}


def test_sources_with_labels_of_one_kind_each_are_a_preference(tmp_path):
    files = [
        write(tmp_path / f"{label}.jsonl", [{"prompt": "q", "completion": "a", "label": label}] * 9)
        for label in (True, False)
    ]
    config = DataConfig(
        train=tuple(f"{name}={path}" for name, path in zip("ab", files, strict=True)),
        kind="labeled", validation=(), tokenizer="bytes", sequence=64,
    )  # fmt: skip
    data = dataset.open_data(config, seed=0, root=tmp_path / "cache", rows=100)
    sides = data.train.at(0, batch=8, rows=slice(0, 8)).answers.sides
    assert {-1.0, 1.0} <= set(sides.ravel().tolist())


def test_shards_of_pairs_are_read_as_pairs_alone(tmp_path):
    records = [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(4)]
    train = write(tmp_path / "pairs.jsonl", records)
    config = DataConfig(train=(train,), kind="pairs", validation=(), tokenizer="bytes", sequence=64)
    dataset.tokenize(config, tmp_path / "out", lambda _: None, lambda *_: None)
    folder = str(tmp_path / "out/train")
    for kind in ("pairs", "chat"):
        config = DataConfig(
            train=(folder,), kind=kind, validation=(), tokenizer="bytes", sequence=64
        )
        if kind == "pairs":
            data = dataset.open_data(config, seed=0, root=tmp_path / "cache")
            assert len(list(pairs_of(next(data.train.evaluation(batch=1))))) == 4
        else:
            with pytest.raises(ConfigError, match=r"written with data\.kind = pairs"):
                dataset.open_data(config, seed=0, root=tmp_path / "cache")
