"""Records whose fields have other names become the tokens of those with the names of a kind."""

import json

import numpy as np
import pytest

from jaxlm.core.errors import DataError
from jaxlm.data import dataset, record_fields
from jaxlm.data.config import DataConfig
from jaxlm.data.conversations import NO_FIELD, OTHER_FORM, Rejected


def opened(tmp_path, records, name="a", **settings):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    shared = {"validation": (), "tokenizer": "bytes", "sequence": 64}
    config = DataConfig(train=(str(path),), **shared | settings)
    return dataset.open_data(config, seed=0, root=tmp_path / "cache")


def tokens(data):
    shards = data.train.shards
    ids = [shards.read(n, 0, int(size)) for n, size in enumerate(shards.lengths(0, 5))]
    weights = [shards.weights(n, 0, len(each)) for n, each in enumerate(ids)]
    return np.concatenate(ids).tolist(), np.concatenate(weights).tolist()


def turns(*contents):
    roles = ("system", "user", "assistant")[-len(contents) :] if len(contents) != 1 else ("user",)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


NUMBERS = range(5)


@pytest.mark.parametrize(
    ("kind", "fields", "records", "same"),
    [
        (
            "chat",
            ("assistant=answer", "user=question"),
            [{"question": f"{n}?", "answer": f"{n}!"} for n in NUMBERS],
            [{"messages": turns(f"{n}?", f"{n}!")} for n in NUMBERS],
        ),
        (
            "chat",
            ("user=instruction+input", "assistant=output", "system=system"),
            [
                {"system": ["", "s"][n % 2], "instruction": "i", "input": " x"[:n], "output": "o"}
                for n in NUMBERS
            ],
            [
                {"messages": turns(*["s"][: n % 2], "i" if n < 2 else "i\n\n x", "o")}
                for n in NUMBERS
            ],
        ),
        (
            "chat",
            ("messages=dialog",),
            [{"dialog": turns(f"{n}?", "!"), "messages": None} for n in NUMBERS],
            [{"messages": turns(f"{n}?", "!")} for n in NUMBERS],
        ),
        (
            "completion",
            ("prompt=question", "completion=answer"),
            [{"question": f"{n}?", "answer": "!", "prompt": "another"} for n in NUMBERS],
            [{"prompt": f"{n}?", "completion": "!"} for n in NUMBERS],
        ),
        (
            "pairs",
            ("user=question", "rejected=bad"),
            [{"question": f"{n}?", "chosen": "a", "bad": "b"} for n in NUMBERS],
            [{"prompt": turns(f"{n}?"), "chosen": "a", "rejected": "b"} for n in NUMBERS],
        ),
    ],
)
def test_the_ids_and_weights_are_those_of_records_with_the_usual_names(
    tmp_path, kind, fields, records, same
):
    renamed = opened(tmp_path, records, kind=kind, fields=fields)
    assert tokens(renamed) == tokens(opened(tmp_path, same, "same", kind=kind))
    assert renamed.train.shards.manifest.documents == len(records) * (1 + (kind == "pairs"))


def test_a_prompt_is_read_with_the_known_answer(tmp_path):
    records = [{"question": f"{n} + 1?", "solution": str(n + 1)} for n in NUMBERS]
    data = opened(tmp_path, records, kind="prompts", fields=("user=question", "answer=solution"))
    prompts = data.train.shards.prompts
    assert [(each.text, each.answer, each.is_plain) for each in prompts] == [
        (each["question"], each["solution"], False) for each in records
    ]


def test_the_cached_tokens_are_those_of_the_named_fields(tmp_path):
    records = [{"a": f"{n}?", "b": "left", "c": "right"} for n in NUMBERS]
    one = opened(tmp_path, records, kind="chat", fields=("user=a", "assistant=b"))
    other = opened(tmp_path, records, kind="chat", fields=("user=a", "assistant=c"))
    assert tokens(one) != tokens(other)


def test_a_record_without_a_named_field_is_refused_with_the_nearest_one(tmp_path):
    record = {"question": "?", "answer": "!"}
    fields = record_fields.parsed(("user=question", "assistant=anwser"))
    with pytest.raises(Rejected, match="reads assistant from anwser") as refused:
        record_fields.renamed(record, "chat", fields)
    assert refused.value.reason == NO_FIELD
    assert refused.value.fix == "--config.data.fields=user=question,assistant=answer"
    with pytest.raises(Rejected) as refused:
        record_fields.renamed(record, "chat", record_fields.parsed(("user=x", "assistant=answer")))
    assert refused.value.fix == "--config.data.fields=user=question,assistant=answer"
    with pytest.raises(Rejected) as refused:
        record_fields.renamed({"z": "?"}, "chat", fields)
    assert refused.value.fix == "'--config.data.fields=()'"
    joined = record_fields.parsed(("user=question+answer", "assistant=answer"))
    with pytest.raises(Rejected, match="joins texts, and one is a int") as refused:
        record_fields.renamed(record | {"answer": 3}, "chat", joined)
    assert refused.value.reason == OTHER_FORM
    with pytest.raises(DataError, match="without a field of data.kind") as caught:
        opened(tmp_path, [record] * 5, kind="chat", fields=("user=question", "assistant=anwser"))
    assert caught.value.fix == "--config.data.fields=user=question,assistant=answer"


@pytest.mark.parametrize(
    ("kind", "record", "fix"),
    [
        ("chat", {"question": "?", "answer": "!"}, "user=question,assistant=answer"),
        (
            "chat",
            {"instruction": "?", "input": "", "output": "!"},
            "user=instruction+input,assistant=output",
        ),
        ("chat", {"id": "7", "turns": turns("?", "!"), "tools": [{"a": 1}]}, "messages=turns"),
        (
            "chat",
            {"id": "7", "log": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
            "messages=log",
        ),
        (
            "pairs",
            {"question": "?", "good": "a", "bad": "b"},
            "prompt=question,chosen=good,rejected=bad",
        ),
        ("pairs", {"prompt": "?", "chosen": "a", "worse": "b"}, "rejected=worse"),
        ("completion", {"query": "?", "response": "!"}, "prompt=query,completion=response"),
        ("completion", {"prompt": "?", "response": "!"}, "prompt=prompt,completion=response"),
        ("prompts", {"problem": "?", "solution": "!"}, "user=problem,answer=solution"),
        ("prompts", {"question": "?", "answer": "!"}, "user=question"),
    ],
)
def test_the_error_of_other_names_has_the_setting_that_reads_them(tmp_path, kind, record, fix):
    with pytest.raises(DataError) as caught:
        opened(tmp_path, [record] * 5, kind=kind)
    first = caught.value.fix.splitlines()[0]
    assert first == f"--config.data.fields={fix}"
    fields = tuple(first.partition("fields=")[2].split(","))
    read = opened(tmp_path, [record] * 5, kind=kind, fields=fields).train.shards
    assert read.documents == 5 * (1 + (kind == "pairs"))


@pytest.mark.parametrize(
    ("kind", "record", "fix"),
    [
        (
            "chat",
            {"turns": [{"speaker": "a", "text": "b"}], "id": 7},
            "--config.data.fields=messages=turns",
        ),
        (
            "chat",
            {"text": "a", "turns": turns("?", "!")},
            "--config.data.fields=messages=turns",
        ),
        ("chat", {"text": "a", "links": [{"url": "a"}]}, "--config.data.kind=text"),
        ("chat", {"a": [{"x": "b"}], "b": [{"x": "b"}]}, "one conversation a line"),
        ("chat", {"a, b": [{"x": "b"}]}, "one conversation a line"),
        (
            "pairs",
            {"ask": "?", "one": "a", "two": ["b"], "id": 7},
            "name the fields in --config.data.fields=prompt=FIELD,chosen=FIELD,rejected=FIELD, "
            "each FIELD one of ask, one, two",
        ),
        ("pairs", {"messages": turns("?", "!")}, "one pair a line"),
        ("text", {"turns": turns("?", "!")}, "--config.data.kind=chat --config.data.fields=mess"),
        ("text", {"links": [{"url": "a"}]}, "one JSON object a line"),
    ],
)
def test_the_error_of_fields_without_usual_names_has_the_form_of_the_setting(
    tmp_path, kind, record, fix
):
    with pytest.raises(DataError) as caught:
        opened(tmp_path, [record] * 5, kind=kind)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("text", ("user=a",), "data.kind is text"),
        ("chat", ("user",), "'user' is not NAME=FIELD"),
        ("chat", ("user=a+", "assistant=b"), "is not NAME=FIELD"),
        ("chat", ("usr=a", "assistant=b"), "usr is none of: messages, system"),
        ("chat", ("prompt=a", "completion=b"), "prompt is none of"),
        ("chat", ("user=a", "user=b", "assistant=c"), "a name is set twice"),
        ("chat", ("messages=a", "system=b"), "messages has the turns"),
        ("chat", ("user=a",), "has a user and an assistant"),
        ("pairs", ("prompt=a", "user=b"), "prompt has the turns"),
    ],
)
def test_settings_that_nothing_can_use_are_refused_with_some_that_can(kind, fields, why):
    (problem,) = DataConfig(train=("a.jsonl",), kind=kind, fields=fields).problems()
    assert problem[0] == "fields"
    assert why in problem[1]
    for line in problem[2].splitlines():
        flags = [flag.strip("'").removeprefix("--config.data.") for flag in line.split()]
        changed = {"kind": kind, "fields": ",".join(fields)} | dict(f.split("=", 1) for f in flags)
        entries = changed.pop("fields").removeprefix("()")
        config = DataConfig(
            train=("a.jsonl",), fields=tuple(filter(None, entries.split(","))), **changed
        )
        assert changed["kind"] != kind or not list(config.problems())
