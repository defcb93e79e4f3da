"""Prompts become rows without a loss, each with its answer for a reward."""

import dataclasses
import json
import math
import re

import pytest

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import dataset, prompts
from jaxlm.data.config import DataConfig
from jaxlm.data.conversations import Rejected
from jaxlm.data.mixture_config import MixtureWeights, Temperature
from jaxlm.data.prompts import Prompt

ASKED = {"role": "user", "content": "q"}


def opened(tmp_path, records, lines=None, reserved=0, **settings):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    config = {"validation": (), "tokenizer": "bytes", "sequence": 64} | settings
    return dataset.open_data(
        DataConfig(train=(str(path),), kind="prompts", **config),
        seed=0,
        reserved=reserved,
        root=tmp_path / "cache",
        warn=(lines if lines is not None else []).append,
    )


def ids_of(data, document):
    shards = data.train.shards
    return shards.read(document, 0, int(shards.lengths(document, document + 1)[0])).tolist()


def test_a_text_is_continued_as_it_is_and_messages_end_with_the_header_of_an_answer(tmp_path):
    """Both as training on answers has them, so that samples begin where answers did."""
    records = [
        {"prompt": "1+1=", "answer": 2, "info": {"level": [1]}},
        {"prompt": [ASKED], "answer": "a"},
        {"prompt": "no answer"},
    ]
    data = opened(tmp_path, records)
    assert data.train.shards.prompts == [
        Prompt("1+1=", "2", {"level": [1]}, is_plain=True),
        Prompt("q", "a", None),
        Prompt("no answer", None, None, is_plain=True),
    ]
    text, chat, _ = (ids_of(data, n) for n in range(3))
    tokenizer = data.tokenizer
    assert text == [*tokenizer.before, *tokenizer.encode("1+1=")]
    rendered = tokenizer.decode(chat)
    assert rendered == "userq\nassistant"
    assert not data.train.shards.weights(1, 0, len(chat)).any()
    conversations = [{"messages": [ASKED, {"role": "assistant", "content": "a"}]}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(conversations[0]) + "\n")
    config = DataConfig(
        train=(str(path),), kind="chat", validation=(), tokenizer="bytes", sequence=64
    )
    answered = dataset.open_data(config, seed=0, root=tmp_path / "cache")
    assert ids_of(answered, 0)[: len(chat)] == chat


def test_prompts_that_leave_no_slots_for_an_answer_are_left_out_and_counted(tmp_path):
    lines = []
    records = [{"prompt": "x" * size} for size in (5, 40, 60)] + [{"prompt": "  "}]
    data = opened(tmp_path, records, lines, reserved=16)
    assert len(data.train.shards.prompts) == data.train.shards.documents == 2
    (line,) = lines
    assert re.sub(r" \(.*?\)", "", line) == (
        "left out of train: 1 longer than a row, 1 with an empty turn"
    )


def test_a_prompt_that_is_read_twice_is_two_prompts(tmp_path):
    """Each has its own group of samples, and may have its own answer."""
    lines = []
    records = [{"prompt": "1+1=", "answer": answer} for answer in ("2", "2", "two")]
    shards = opened(tmp_path, records, lines).train.shards
    assert [each.answer for each in shards.prompts] == ["2", "2", "two"]
    assert shards.documents == 3
    assert lines == []


def test_another_answer_is_other_data(tmp_path):
    """A run does not resume on it unless it is allowed."""
    one, other = (
        opened(tmp_path / name, [{"prompt": "1+1=", "answer": name}]).fingerprint
        for name in ("2", "3")
        if (tmp_path / name).mkdir() is None
    )
    assert one["train"] != other["train"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"completion": "a"}, "its fields are completion"),
        ([1], "it is a list"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "no list of messages"),
        ({"prompt": 3}, "no list of messages"),
        ({"prompt": "q", "answer": True}, "answer is a bool"),
        ({"prompt": "q", "answer": math.nan}, "answer is nan"),
        ({"prompt": "q", "answer": -math.inf}, "answer is -inf"),
        ({"prompt": [ASKED, {"role": "assistant", "content": "a"}]}, "the last turn"),
        ({"prompt": [{"role": "user", "content": " "}]}, "has no text"),
    ],
)
def test_records_of_another_form_are_refused_with_the_form(record, why):
    with pytest.raises(Rejected, match=why):
        prompts.parse(record)


def test_files_without_prompts_are_refused(tmp_path):
    with pytest.raises(DataError, match="without a field of data.kind") as refused:
        opened(tmp_path, [{"text": "a"}])
    assert prompts.ONE_PROMPT in refused.value.fix


def test_a_prompt_of_both_sets_is_refused(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(DataError, match="prompts that are trained on"):
        opened(tmp_path, [{"prompt": f"{n}+1="} for n in range(9)], validation=(str(other),))


def test_prompts_of_a_mixture_have_its_shares_and_their_own_epochs(tmp_path):
    """A source of few long prompts has its share of prompts, not of tokens."""
    for name, count in (("many", 9), ("few", 3)):
        times = 3 if name == "few" else 1
        lines = [json.dumps({"prompt": f"{name}{n}" * times}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = DataConfig(
        train=tuple(f"{name}={tmp_path}/{name}.jsonl" for name in ("many", "few")),
        validation=(),
        kind="prompts",
        tokenizer="bytes",
        sequence=64,
    )
    assert not [*config.problems()]

    def opened(**settings):
        changed = dataclasses.replace(config, **settings)
        options = {"seed": 0, "root": tmp_path / "cache"}
        return dataset.open_data(changed, samples=4, rows=80, **options).train

    even = opened()  # each prompt once in an epoch of all, as of one source
    assert sorted(even.documents(0, 12)) == [*range(12)]
    half = opened(mixture=MixtureWeights(weights=("many=0.5", "few=0.5")))
    names = [half.source_of(n) for n in half.documents(0, 12)]
    assert names.count("few") == 6
    assert sorted(half.documents(0, 12))[-6:] == [9, 9, 10, 10, 11, 11]  # two epochs
    assert half.documents(5, 9) == half.documents(0, 12)[5:9]
    redrawn = half.documents(0, 12, attempt=1)
    assert redrawn != half.documents(0, 12)
    assert [half.source_of(n) for n in redrawn] == names
    assert {name: rows for name, (rows, _) in half.read(0, 48).items()} == {"many": 6, "few": 6}
    assert half.seen(48)["few"] == {"read_rows": 6, "share": 0.5, "epochs": 2.0}
    limited = opened(mixture=MixtureWeights(weights=("many=0.5", "few=0.5"), epochs=("few=1",)))
    names = [limited.source_of(n) for n in limited.documents(0, 12)]
    assert names.count("few") == 3
    assert [*limited.ended(0, 48)] == ["few"]
    with pytest.raises(ConfigError, match="the run takes 20 rows, and the sources have 12"):
        opened(mixture=Temperature(epochs=("many=1", "few=1")))
