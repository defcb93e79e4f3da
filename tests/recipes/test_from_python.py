"""Data from Python: texts, records and token ids that a program has, trained on as files are."""

import json
import random
import shutil

import numpy as np
import pytest

import jaxlm
from jaxlm.cli.main import main
from jaxlm.core.errors import CommandError, ConfigError, DataError, InputMissing
from jaxlm.data import dataset, from_python
from jaxlm.data.config import DataConfig
from jaxlm.data.tokenizer import Bytes
from jaxlm.recipes.train import api

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

SMALL = {
    "data": {"tokenizer": "bytes", "sequence": 32},
    "model": {"width": 32, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 32},
    "train": {"steps": 2, "batch": 2},
    "checkpoint.every": 1,
    "log": {"every": 1, "sinks": []},
    "sample.prompts": (),
}
DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.choices("one two three four five".split(), k=40)) for _ in range(40)]
IDS = [Bytes().encode(text) for text in TEXTS]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def train(tmp_path):
    """Trains a tiny model in a run directory."""

    def train(data, validation=None, workdir="run", **settings):
        return jaxlm.train(
            SMALL,
            workdir=tmp_path / workdir,
            settings=settings.pop("settings", None),
            train_data=data,
            validation_data=validation,
            quiet=True,
            **settings,
        )

    return train


def provenance(folder):
    return json.loads((folder / "run/provenance.json").read_text())


def rows(train, validation=()):
    """The identity of the rows of data, without the names of its sources."""
    config = DataConfig(train=train, validation=validation, tokenizer="bytes", sequence=32)
    return dataset.open_data(config, seed=0).fingerprint


def stored(data):
    return from_python.store(data, "train_data", DataConfig(tokenizer="bytes"))


def test_texts_from_python_are_the_rows_of_the_same_texts_in_a_file(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (entry,) = stored(TEXTS)
    assert rows((entry,), ("20%",)) == rows((str(file),), ("20%",))
    assert stored(lambda: (text for text in TEXTS)) == (entry,)
    assert stored(tuple(TEXTS)) == (entry,)
    assert stored(TEXTS[1:]) != (entry,)


@pytest.mark.slow
def test_token_ids_from_python_are_the_rows_of_their_texts():
    tokenizer = Bytes()
    expected = rows(stored(TEXTS))
    around = [[*tokenizer.before, *ids, *tokenizer.after] for ids in IDS]
    assert rows(stored([np.array(ids, np.uint16) for ids in IDS])) == expected
    assert rows(stored(lambda: (ids for ids in around))) == expected
    same = np.resize(np.concatenate(IDS), (20, 100))
    assert stored(same) == stored(list(same)) != stored(same.ravel())
    assert rows(stored(same))["train.documents"] == 20
    assert rows(stored(same.ravel()))["train.documents"] == 1


@pytest.mark.slow
def test_a_run_on_data_from_python_resumes_on_the_same_data_alone(train, tmp_path, capsys):
    assert train(TEXTS, stop_at=1).step == 1
    assert provenance(tmp_path)["data.train"] == "train_data="
    with pytest.raises(ConfigError, match="1 setting differs") as caught:
        train(TEXTS[1:])
    assert "data.train" in caught.value.why
    assert main(["train", f"--workdir={tmp_path / 'run'}", "--stop_at=1", "--quiet"]) == 0
    shutil.rmtree(tmp_path / "cache/python")
    capsys.readouterr()
    assert main(["train", f"--workdir={tmp_path / 'run'}"]) == InputMissing.code
    printed = capsys.readouterr().err
    assert "the data came from Python, and its copy is gone" in printed
    assert "call jaxlm.train with the same train_data" in printed
    assert train(TEXTS).complete, "the copy is made again"
    assert np.isfinite(jaxlm.load(tmp_path / "run").evaluate()["loss_nats"])


def test_sources_by_name_are_a_mixture_with_a_held_out_part_of_each():
    chats = [{"prompt": text[:9], "completion": text[9:20]} for text in TEXTS]
    config = DataConfig(
        train=stored({"web": TEXTS, "talk": chats}),
        kinds=("talk=completion",),
        validation=("20%",),
        tokenizer="bytes",
        sequence=32,
    )
    opened = dataset.open_data(config, seed=0)
    assert list(opened.validation) == ["val_web", "val_talk"]
    assert {"train.web.tokens", "train.talk.tokens"} <= opened.fingerprint.keys()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (iter(TEXTS), ConfigError, "cannot be iterated again"),
        ((lambda texts: lambda: texts)(iter(TEXTS)), ConfigError, "cannot be iterated again"),
        ("texts/*.txt", ConfigError, "is a single str"),
        (5, ConfigError, "cannot be iterated"),
        ([], DataError, "is empty"),
        (["a", 3], DataError, r"str\(item\)"),
        (["a", b"a"], DataError, r'item.decode\("utf-8"\)'),
        (["a", None], DataError, "if item is not None"),
        ([{"text": object()}], DataError, "a record is no JSON"),
        (np.array([1, 5, 999]), DataError, "no document of token ids"),
        (np.ones(3), DataError, "no document of token ids"),
        (np.ones((2, 2, 2), int), DataError, "no document of token ids"),
        (np.ones((9, 40), int), ConfigError, "a share of token ids cannot be held out"),
    ],
)
def test_data_that_cannot_be_read_is_refused_with_a_fix(train, tmp_path, data, kind, words):
    with pytest.raises(kind, match=words) as caught:
        train(data)
    assert caught.value.fix
    assert not (tmp_path / "run").exists()
    left = list((tmp_path / "cache/python").glob("*")) if kind is DataError else []
    assert left == [], "no partial copy"


@pytest.mark.slow
def test_token_ids_need_a_tokenizer_that_is_named(train):
    with pytest.raises(ConfigError, match="need the tokenizer that made them"):
        train(IDS, settings={"data.tokenizer": "bpe:512", "data.validation": ()})


READER = """
import pathlib

def lines():
    for line in pathlib.Path("lines.txt").read_text().splitlines():
        yield {"text": line}

def broken():
    yield "a"
    1 / 0

ONCE = iter(["a"])

def once():
    return ONCE

def ids():
    return [[5, 6], [7]]
"""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder with functions that read data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(READER)
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS))
    return {**SMALL, "data.train": ["mine.py:lines"]}


@pytest.mark.slow
def test_a_function_of_a_file_is_data_and_is_not_called_by_a_run_that_is_only_read(
    reader, tmp_path, capsys
):
    result = jaxlm.train(reader, workdir="run", stop_at=1, quiet=True)
    assert result.step == 1
    saved = json.loads((tmp_path / "run/config.json").read_text())
    (entry,) = stored([{"text": text} for text in TEXTS])
    assert saved["data"]["train"] == [entry]
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS[1:]))
    assert main(["train", "--workdir=run", "--quiet"]) == 0, "its own config needs no function"
    with pytest.raises(ConfigError, match="1 setting differs"):
        jaxlm.train(reader, workdir="run", quiet=True)
    saved["data"]["train"] = ["mine.py:lines"]
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    capsys.readouterr()
    assert main(["eval", "--workdir=run"]) == ConfigError.code
    assert "names code without its digest" in capsys.readouterr().err


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("none.py:lines", "there is no file none.py"),
        ("mine.py:line", "mine.py has no function line"),
        ("mine.py:broken", "ZeroDivisionError"),
        ("web=mine.py:once", "once\\(\\) cannot be iterated again"),
        ("mine.py:ids", "a share of token ids cannot be held out"),
    ],
)
def test_a_function_that_gives_no_data_is_refused(reader, entry, words):
    with pytest.raises(ConfigError, match=words) as caught:
        jaxlm.train(reader | {"data.train": [entry]}, workdir="run", quiet=True)
    assert caught.value.fix


@pytest.mark.slow
def test_every_command_reads_the_data_of_a_function(reader, capsys):
    config = DataConfig(train=("mine.py:lines",), tokenizer="bytes", sequence=32)
    assert dataset.open_data(config, seed=0).fingerprint["train.documents"] == len(TEXTS)


def test_a_published_size_is_the_model_of_a_dict_and_its_settings_may_differ():
    settings = {"model.depth": 1, "model": "gpt2-124m"}
    model = api._loaded(settings, {}).value.model
    assert (model.family, model.depth, model.width) == ("gpt2", 1, 768)
    assert api._loaded({"model": "gpt2-medium"}, {}).value.model.depth == 24
    with pytest.raises(ConfigError, match="model = 'gpt2-mediun'") as caught:
        api._loaded({"model": "gpt2-mediun"}, {})
    assert "--config.model=gpt2-medium" in caught.value.fix


def test_a_dict_takes_the_texts_that_the_command_line_takes():
    config = {"data": {"train": "a.jsonl,b"}, "optim.lr": "1e-3", "eval.every": "5%"}
    run = api._loaded(config, {"data.validation": "c.txt"}).value
    assert run.data.train == ("a.jsonl", "b")
    assert run.data.validation == ("c.txt",)
    assert run.optim.lr == 1e-3
    assert api._loaded(config, {}).provenance["data.validation"].kind == "default"


@pytest.mark.parametrize(
    "wrong",
    [{"optim.lrr": 0.001}, {"data.text_ky": "content"}, {"train.stepz": 4}],
)
def test_the_fix_of_a_call_is_an_argument_of_the_call(wrong, tmp_path):
    with pytest.raises(ConfigError) as caught:
        jaxlm.train(SMALL, workdir=tmp_path / "run", settings=wrong, quiet=True)
    assert "--" not in str(caught.value)
    fixed = eval(f"dict({caught.value.fix})")
    api._loaded(SMALL, fixed["settings"])
    assert set(fixed["settings"].values()) == set(wrong.values())


def test_the_fix_of_a_resumed_call_is_an_argument_of_the_call(train):
    texts = ["one two three four"] * 40
    train(texts, stop_at=1)
    with pytest.raises(ConfigError) as caught:
        train(texts, settings={"optim.lr": 2e-3}, stop_at=2)
    (line,) = [each for each in caught.value.fix.splitlines() if each.startswith("resume=")]
    fixed = eval(f"dict({line})", {"jaxlm": jaxlm})
    assert train(texts, settings={"optim.lr": 2e-3}, stop_at=2, **fixed).step == 2


class Observer(jaxlm.Callback):
    """A callback that is passed without being made."""


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"callbacks": print}, "callbacks=[print]"),
        ({"callbacks": [3]}, "callbacks=[print]"),
        ({"callbacks": [Observer]}, "callbacks=[Observer()]"),
        ({"stop_at": "1"}, "stop_at=1"),
        ({"stop_at": 0}, "stop_at=1"),
        ({"stop_at": 0.5}, "stop_at=1"),
        ({"cpu_devices": -1}, "cpu_devices=1"),
        ({"resume": {"cast": True}}, "resume=jaxlm.ResumeOptions(**{'cast': True})"),
        ({"settings": "optim.lr=3"}, "settings={'optim.lr': 1e-3}"),
        ({"config": ["quickstart"]}, "config='quickstart'"),
        ({"config": None}, "config='quickstart'"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_before_anything_is_done(wrong, fix, tmp_path):
    with pytest.raises(CommandError) as caught:
        jaxlm.train(**{"config": SMALL, "workdir": tmp_path / "run", "quiet": True, **wrong})
    assert caught.value.fix == fix
    assert not (tmp_path / "run").exists()
    assert isinstance(eval(f"dict({fix})", {"jaxlm": jaxlm, "Observer": Observer}), dict)


def test_names_of_settings_in_one_text_are_refused():
    with pytest.raises(CommandError) as caught:
        jaxlm.ResumeOptions(allow_change="data,optim.lr")
    assert caught.value.fix == "allow_change=('data', 'optim.lr')"
