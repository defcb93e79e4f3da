"""Conversations in files become rows: weights, lengths, splits, mixtures, and what is left out."""

import dataclasses
import itertools
import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import chat_templates, dataset, peek
from jaxlm.data.config import DataConfig
from jaxlm.data.corrupt.rows import Corruption, RowChanges, causal
from jaxlm.data.tokenizer import Bytes

END = Bytes().eos


def pair(asked, answered, **more):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered, **more}]


def write(path, conversations, key="messages"):
    path.write_text("".join(json.dumps({key: each}) + "\n" for each in conversations))
    return str(path)


@pytest.fixture
def chats(tmp_path):
    """Sixty conversations of one to three exchanges."""
    names = [[f"{n} {k}" for k in range(n % 3 + 1)] for n in range(60)]
    turns = [[turn for k in each for turn in pair(f"q{k}", f"a{k}")] for each in names]
    return write(tmp_path / "chat.jsonl", turns)


def opened(tmp_path, train, output=None, **settings):
    config = {"kind": "chat", "validation": (), "tokenizer": "bytes", "sequence": 128} | settings
    train = (train,) if isinstance(train, str) else train
    root, output = tmp_path / "cache", [] if output is None else output
    return dataset.open_data(
        DataConfig(train=train, **config), seed=0, root=root, log=output.append, warn=output.append
    )


def rows(data, loader=None):
    loader = loader or data.train
    return next(loader.evaluation(batch=loader.plan.rows))


def trained(data, batch):
    """The texts that a batch is trained on."""
    texts = []
    for row in range(len(batch.tokens)):
        for text in peek.render_segments(batch, data.tokenizer, row):
            texts += [part.partition("\u00bb")[0] for part in text.split("\u00ab")[1:]]
    return texts


def test_rows_hold_whole_conversations_and_train_their_answers(chats, tmp_path):
    data = opened(tmp_path, chats)
    batch = rows(data)
    answers = [f"a{n} {k}<|eos|>" for n in range(60) for k in range(n % 3 + 1)]
    assert sorted(trained(data, batch)) == sorted(answers)
    figures = data.train.shards.manifest.figures
    assert figures["trained_tokens"] == batch.weights.sum() == (batch.weights > 0).sum()
    assert (figures["turns"], figures["trained_turns"]) == (240, 120)
    firsts = batch.tokens[(batch.positions == 0) & (batch.segments > 0)]
    assert len(firsts) == 60  # no text is cut
    assert set(firsts.tolist()) == {1}
    assert (batch.tokens == 1).sum() == 60
    weights = np.where(batch.targets == END, batch.weights, -1)
    assert (weights == 1).sum() == 120


def test_a_set_is_prepared_once_for_each_template_length_and_form(chats, tmp_path):
    output = []
    for settings in (
        {},
        {"template": "chatml"},  # which auto is here
        {"sequence": 200},
        {"roles": ("user", "assistant")},
        {"overlong": "left"},
    ):
        opened(tmp_path, chats, output, **settings)
        opened(tmp_path, chats, output, **settings)
    assert [line for line in output if "tokenizing" in line] == ["tokenizing train: 1 file"] * 4


def test_weights_are_kept_exactly_and_travel_with_mixtures(tmp_path):
    one = write(tmp_path / "one.jsonl", [pair("a", "b", weight=0.3), pair("c", "d")] * 4)
    two = write(tmp_path / "two.jsonl", [pair("e", "f", weight=7)] * 4)
    data = opened(tmp_path, (f"one={one}", f"two={two}"), sequence=64)
    assert set(rows(data).weights.ravel().tolist()) == {0.0, float(np.float32(0.3)), 1.0, 7.0}
    assert data.train.shards.manifest.trained == 12 * 2
    batches = data.train.batches(0, batch=2)
    seen = np.concatenate([next(batches).weights for _ in range(6)])
    assert {0.0, 1.0, 7.0} < set(seen.ravel().tolist())


def test_conversations_too_long_for_a_row_are_dropped_cut_or_an_error(tmp_path):
    turns = [{"role": "system", "content": "s"}, *pair("first", "one"), *pair("second", "two")]
    train = write(tmp_path / "chat.jsonl", [turns, pair("a", "b"), pair("a", "x" * 100)])
    output = []
    data = opened(tmp_path, train, output, sequence=60)
    assert trained(data, rows(data)) == ["b<|eos|>"]
    assert f"left out of train: 2 longer than a row (first {train}, line 1)" in output
    data = opened(tmp_path, train, output, sequence=60, overlong="left")
    assert sorted(trained(data, rows(data))) == ["b<|eos|>", "two<|eos|>"]
    manifest = data.train.shards.manifest
    assert (manifest.figures["turns_cut"], manifest.left_out) == (2, {"longer than a row": 1})
    text = peek.render_segments(rows(data), data.tokenizer, 0)[0]
    assert "system<|sentinel_30|>s" in text
    assert "first" not in text
    with pytest.raises(DataError, match="longer than a row") as caught:
        opened(tmp_path, train, sequence=60, overlong="error")
    assert caught.value.where == f"{train}, line 1"
    assert caught.value.fix.startswith("--config.data.sequence=")


def test_a_conversation_cut_before_its_first_answer_is_left_out_and_counted(tmp_path):
    """The cut leaves a question, and an answer that is not trained: no token has a loss."""
    late = pair("then", "two")
    late[1]["train"] = False
    long = pair("first", "x" * 100)
    train = write(tmp_path / "chat.jsonl", [[*long, *late], [*long, late[0]], pair("a", "b")])
    data = opened(tmp_path, train, sequence=60, overlong="left")
    assert trained(data, rows(data)) == ["b<|eos|>"]
    manifest = data.train.shards.manifest
    assert manifest.left_out == {"longer than a row": 2}
    assert manifest.figures.get("turns_cut", 0) == 0


def test_equal_prompts_are_on_one_side_of_a_split(tmp_path):
    asked = [f"q{n % 20}" for n in range(200)]
    turns = [pair(each, f"a{n}") for n, each in enumerate(asked)]
    data = opened(tmp_path, write(tmp_path / "chat.jsonl", turns), validation=("20%",))
    sides = [trained(data, rows(data, each)) for each in (data.train, data.validation["val"])]
    prompts = [{asked[int(a.removesuffix("<|eos|>")[1:])] for a in side} for side in sides]
    assert sum(map(len, sides)) == 200
    assert min(map(len, sides)) > 0
    assert not prompts[0] & prompts[1]


UNEVEN = "documents with the same prompt stay on one side"


@pytest.mark.parametrize("before", [["gpt"], ["system"], ["system", "gpt"]])
def test_an_equal_beginning_without_a_question_keeps_no_conversations_together(tmp_path, before):
    start = [{"from": role, "value": "Hello, how can I help?"} for role in before]
    turns = [
        [*start, {"from": "human", "value": f"q{n // 2}"}, {"from": "gpt", "value": f"a{n}"}]
        for n in range(400)
    ]
    path, output = write(tmp_path / "chat.jsonl", turns, "conversations"), []
    data = opened(tmp_path, path, output, validation=("20%",))
    sides = [trained(data, rows(data, each)) for each in (data.train, data.validation["val"])]
    held, train = (
        {int(a.removesuffix("<|eos|>")[1:]) // 2 for a in s if a[0] == "a"} for s in sides
    )
    assert 40 <= data.validation["val"].shards.documents <= 120
    assert not held & train
    assert not [line for line in output if UNEVEN in line]


def test_conversations_without_a_user_are_split_by_all_of_their_turns(tmp_path):
    system = {"role": "system", "content": "Write a story."}
    turns = [[system, {"role": "assistant", "content": f"a{n}"}] for n in range(200)]
    data = opened(tmp_path, write(tmp_path / "chat.jsonl", turns), validation=("20%",))
    assert 20 <= data.validation["val"].shards.documents <= 60


@pytest.mark.parametrize(("share", "question"), [("20%", "q0"), ("50%", "q1")])
def test_a_share_that_equal_prompts_make_another_one_is_logged(tmp_path, share, question):
    turns = [pair(question if n < 180 else f"other {n}", f"a{n}") for n in range(200)]
    path, output = write(tmp_path / "chat.jsonl", turns), []
    data = opened(tmp_path, path, output, validation=(share,))
    documents = data.validation["val"].shards.documents
    (line,) = [line for line in output if UNEVEN in line]
    assert f"{documents} of 200 documents" in line
    assert f"% and not {share}: " in line


def test_a_prompt_of_a_validation_file_that_is_trained_on_is_refused(tmp_path):
    train = write(tmp_path / "chat.jsonl", [pair(f"q{n}", "a") for n in range(20)])
    others = [pair(f"other {n}", "a") for n in range(9)]
    held = write(tmp_path / "held.jsonl", [*others, pair("q7", "another answer")])
    with pytest.raises(DataError, match="prompts that are trained on") as caught:
        opened(tmp_path, train, validation=(held,))
    assert caught.value.where == f"{held}, line 10"
    assert "1 of 10 conversations" in caught.value.why
    data = opened(tmp_path, train, validation=(held,), max_dropped=0.1)
    assert len(trained(data, rows(data, data.validation["val"]))) == 10


def test_prompts_and_completions_are_joined_as_text(tmp_path):
    path = tmp_path / "pairs.jsonl"
    records = [{"prompt": "1+1=", "completion": "2"}, {"prompt": pair("a", "b"), "completion": "c"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    data = opened(tmp_path, str(path), kind="completion")
    batch = rows(data)
    texts = peek.render_segments(batch, data.tokenizer, 0)
    assert "<|bos|>1+1=\u00ab2<|eos|>\u00bb" in texts
    assert trained(data, batch) == ["c<|eos|>", "2<|eos|>"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_no_piece_of_a_tokenizer_made_here_begins_in_a_prompt_and_ends_in_its_answer(
    kind, tmp_path
):
    """Its pieces may span a line break and a word: 82% of the answers to GSM8K began so."""
    words = ["The sum is 4", "She has 7 apples", "We count 12"]
    records = [
        {"messages": pair(f"How many, {n}?", words[n % 3])}
        if kind == "chat"
        else {"prompt": f"assistant\n{n} =", "completion": f" {n * n}. The end"}
        for n in range(60)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    data = opened(tmp_path, str(path), kind=kind, tokenizer="sentencepiece:360")
    assert data.train.shards.manifest.figures["answers_in_prompt_token"] == 0
    texts = {text.removesuffix("<|eos|>") for text in trained(data, rows(data))}
    if kind == "chat":
        assert texts == set(words)
    else:
        assert texts == {each["completion"] for each in records}


def test_parquet_and_lone_surrogates_are_read(tmp_path):
    table = pyarrow.Table.from_pylist([{"messages": pair("q", "a"), "tools": None}] * 3)
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    data = opened(tmp_path, str(tmp_path / "chat.parquet"))
    assert trained(data, rows(data)) == ["a<|eos|>"] * 3
    output = []
    data = opened(tmp_path, write(tmp_path / "chat.jsonl", [pair("\ud800", "a\udfff")]), output)
    assert trained(data, rows(data)) == ["a\ufffd<|eos|>"]
    assert "in train: 1 with a lone surrogate, replaced" in output


def test_a_conversation_whose_only_trained_token_is_its_first_is_left_out(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    first = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "chat.jsonl", [first, pair("q", "a")])
    data = opened(tmp_path, path, template=str(tmp_path / "t.jinja"))
    assert data.train.shards.manifest.left_out == {"without a trained turn": 1}
    assert trained(data, rows(data)) == ["a<|eos|>"]


def test_what_is_left_out_is_counted_by_reason(tmp_path):
    unanswered = pair("a", "b")[:1]
    turns = [pair("a", "b")] * 3
    turns += [unanswered, pair("a", " "), pair("a", "b", train=False), unanswered]
    output = []
    train = write(tmp_path / "chat.jsonl", turns)
    data = opened(tmp_path, train, output)
    reasons = (
        f"1 with an empty turn ({train}, line 5), 1 without a trained turn ({train}, line 6), "
        f"2 without an assistant turn (first {train}, line 4)"
    )
    assert f"left out of train: {reasons}" in output
    assert data.train.shards.manifest.first_left_out["with an empty turn"] == f"{train}, line 5"
    with pytest.raises(DataError, match="no conversation has an answer") as caught:
        opened(tmp_path, write(tmp_path / "none.jsonl", turns[3:]))
    assert "2 without an assistant turn (first " in caught.value.why
    none = write(tmp_path / "untrained.jsonl", [pair("a", "b", train=False)] * 2)
    with pytest.raises(DataError, match="no conversation has an answer") as caught:
        opened(tmp_path, none)
    assert f"2 without a trained turn (first {none}, line 1)" in caught.value.why
    assert '"train": false' in caught.value.fix


def test_a_broken_record_has_its_line_and_its_fix(tmp_path):
    turns = [pair("a", "b"), [{"role": "bot", "content": "x"}]]
    path = Path(write(tmp_path / "chat.jsonl", turns))
    path.write_text("\n\n" + path.read_text())
    with pytest.raises(DataError, match="a record with an unknown role") as caught:
        opened(tmp_path, str(path))
    assert caught.value.where == f"{path}, line 4", "as an editor counts"
    assert "'bot'" in caught.value.why
    table = pyarrow.Table.from_pylist([{"messages": each} for each in turns])
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    with pytest.raises(DataError) as caught:
        opened(tmp_path, str(tmp_path / "chat.parquet"))
    assert caught.value.where.endswith("chat.parquet, record 2")
    (tmp_path / "chat.txt").write_text("hello")
    with pytest.raises(DataError) as caught:
        opened(tmp_path, str(tmp_path / "chat.txt"))
    assert caught.value.where == f"{tmp_path}/chat.txt"
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n' * 5)
    with pytest.raises(DataError, match="without messages") as caught:
        opened(tmp_path, str(tmp_path / "text.jsonl"))
    assert caught.value.fix == "--config.data.kind=text"
    with pytest.raises(DataError, match="no text under 'text'") as caught:
        opened(tmp_path, write(tmp_path / "chat.jsonl", turns), kind="text")
    assert caught.value.fix == "--config.data.kind=chat"
    (tmp_path / "share.jsonl").write_text('{"id": "1", "conversations": []}\n')
    with pytest.raises(DataError, match="no text under 'text'") as caught:
        opened(tmp_path, str(tmp_path / "share.jsonl"), kind="text")
    assert caught.value.fix == "--config.data.kind=chat", "the text of id is no text to train on"
    with pytest.raises(DataError, match="a record is without a field of data.kind") as caught:
        opened(tmp_path, str(tmp_path / "chat.jsonl"), kind="pairs")
    assert caught.value.why.startswith("it has no chosen; its fields are messages")
    for name, rows_of_table in (("my table.csv", "a,b\n1,2\n"), ("my table.tsv", "a\tb\n1\t2\n")):
        (tmp_path / name).write_text(rows_of_table)
        with pytest.raises(DataError, match="without messages") as caught:
            opened(tmp_path, str(tmp_path / name))
        subprocess.run(caught.value.fix, shell=True, check=True)
        assert json.loads((tmp_path / "my table-lines.jsonl").read_text()) == {"a": "1", "b": "2"}
    for indent, kind in itertools.product((None, 1), ("chat", "text", "pairs")):
        (tmp_path / "my list.json").write_text(json.dumps(turns, indent=indent))
        with pytest.raises(DataError) as caught:
            opened(tmp_path, str(tmp_path / "my list.json"), kind=kind)
        subprocess.run(caught.value.fix, shell=True, check=True)
        lines = (tmp_path / "my list-lines.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == turns
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(DataError, match="without messages"):
        opened(tmp_path, str(tmp_path / "text.txt"))


def test_a_conversation_that_the_template_refuses_ends_the_run_or_is_counted(tmp_path):
    source = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('roles alternate') }}{% endif %}"
    )
    (tmp_path / "own.jinja").write_text(
        source + "{% for m in messages %}{{ m.content + '<|eos|>' }}{% endfor %}"
    )
    train = write(tmp_path / "chat.jsonl", [pair("a", "b")] * 9 + [pair("no", "b")])
    settings = {"template": str(tmp_path / "own.jinja")}
    with pytest.raises(DataError, match="refused by the chat template") as caught:
        opened(tmp_path, train, **settings)
    assert "roles alternate; 1 of the 10 conversations" in caught.value.why
    assert caught.value.where.endswith("line 10")
    output = []
    opened(tmp_path, train, output, max_dropped=0.1, **settings)
    assert f"left out of train: 1 refused by the chat template ({train}, line 10)" in output


def test_the_date_of_a_template_is_named(tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content + '<|eos|>' }}{% endfor %}"
    )
    output = []
    train = write(tmp_path / "chat.jsonl", [pair("a", "b")])
    data = opened(tmp_path, train, output, template=str(tmp_path / "own.jinja"))
    assert peek.render_segments(rows(data), data.tokenizer, 0)[0].startswith("2024a")
    assert "the chat template's date is 2024-07-26 on every day, in place of today's" in output


def test_token_shards_of_conversations_keep_weights_and_template(chats, tmp_path):
    config = DataConfig(train=(chats,), validation=(), kind="chat", tokenizer="bytes", sequence=128)
    written = dataset.tokenize(config, tmp_path / "out", lambda _: None, lambda *_: None)
    written["train"].verify()
    direct = opened(tmp_path, chats)
    stored = opened(tmp_path, str(tmp_path / "out/train"), kind="text")
    for one, other in zip(rows(direct), rows(stored), strict=True):
        np.testing.assert_array_equal(one, other)
    assert chat_templates.digest(direct.template) == chat_templates.digest(stored.template)
    assert direct.fingerprint["template"] == stored.fingerprint["template"]
    with pytest.raises(DataError, match="longer than a row"):
        opened(tmp_path, str(tmp_path / "out/train"), sequence=16)
    damaged = tmp_path / "out/train/weights-00000.bin"
    damaged.write_bytes(bytes([1]) + damaged.read_bytes()[1:])
    with pytest.raises(DataError, match="damaged"):
        rows(opened(tmp_path, str(tmp_path / "out/train")))


def test_an_objective_that_changes_rows_is_refused(chats, tmp_path):
    config = DataConfig(train=(chats,), validation=(), kind="chat", tokenizer="bytes")
    changes = RowChanges(Corruption(causal), {})
    with pytest.raises(ConfigError, match="does not train on conversations"):
        dataset.open_data(config, seed=0, prepare=lambda *_: changes, root=tmp_path / "cache")


def test_settings_that_would_cut_conversations_are_refused():
    config = DataConfig(
        train=("x",),
        kind="chat",
        roles=("bot",),
        validation=("tail:5%",),
        sequence_warmup=("64@1%",),
    )
    assert [name for name, _, _ in config.problems()] == ["roles", "validation", "sequence_warmup"]
    assert next(DataConfig(train=("x",), kind="chat").derived())[:2] == ("validation", ("5%",))


def test_text_and_conversations_are_mixed_with_the_weight_of_each_kind(chats, tmp_path):
    texts = [f"a plain text with the number {n}" for n in range(60)]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    train = (f"talk={chats}", f"web={text}")
    mixed = {"kinds": ("web=text",), "validation": ("20%",), "packing": "first_fit"}
    data = opened(tmp_path, train, **mixed)
    talk, web = data.train.sources
    assert (bool(talk.shards.template), bool(web.shards.template)) == (True, False)
    alone = opened(tmp_path, chats, validation=("20%",))
    for one, other in ((talk, alone.train), (data.validation["val_talk"], alone.validation["val"])):
        for name in ("tokens", "targets", "weights"):
            assert np.array_equal(getattr(rows(data, one), name), getattr(rows(alone, other), name))
    batch = rows(data, web)
    assert (batch.weights == (batch.segments > 0)).all()
    assert not data.validation["val_web"].shards.manifest.template
    assert data.template == alone.template
    batches = data.train.batches(0, batch=4)
    seen = [next(batches) for _ in range(12)]
    resumed = data.train.batches(5, batch=4)
    assert np.array_equal(next(resumed).weights, seen[5].weights)
    weights, read = np.concatenate([each.weights for each in seen]), data.train.read(0, 48)
    assert read["talk"][0] > 0 < read["web"][0]
    assert (weights.mean(axis=1) > 0.85).sum() >= read["web"][0] - 2  # text, but for its last row
    config = DataConfig(train=train, kind="text", kinds=("talk=chat",))
    assert config.of("talk").chat is not None
    assert config.of("web").chat is None
    assert config.has_chats


@pytest.mark.parametrize(
    ("kinds", "why", "fix"),
    [
        (("wbe=text",), "wbe=text names no source; there is talk, web, val", "web=text"),
        (
            ("web=prose",),
            "'prose' of web is none of: text, chat, completion, pairs, labeled, steps, prompts",
            "web=text",
        ),
        (("web=text", "web=chat"), "a source is named twice", "web=chat"),
    ],
)
def test_a_kind_of_no_source_is_refused(kinds, why, fix):
    config = DataConfig(train=("talk=a.jsonl", "web=b.txt"), kind="chat", kinds=kinds)
    problems = {setting: rest for setting, *rest in config.problems()}
    assert problems["kinds"] == [why, f"--config.data.kinds={fix}"]
    assert not list(dataclasses.replace(config, kinds=(fix,)).problems())
