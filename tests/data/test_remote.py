"""Training data behind URLs and on the Hugging Face Hub: copied once, whole, with a version."""

import json
import shlex
import shutil
import subprocess

import pyarrow
import pyarrow.parquet
import pytest

from jaxlm.cli.main import main
from jaxlm.core import hub as hub_client
from jaxlm.core.errors import InputMissing
from jaxlm.data import dataset, documents, remote, stores
from jaxlm.data.config import DataConfig
from tests import hub_server, object_stores
from tests import s3 as s3_server
from tests.faults import harness

BYTES = ("--config.data.tokenizer=bytes", "--config.data.sequence=32")
SENTENCE = "a sentence of document {}. "


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "WAIT_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def memory():
    with object_stores.in_memory() as store:
        yield store


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.serving(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def web(tmp_path):
    with object_stores.serving(tmp_path / "served") as url:
        yield url


def stats(capsys, train, *words, code=0):
    """The answer of `jaxlm data stats`, or its error."""
    capsys.readouterr()
    flags = (f"--config.data.train={train}", *BYTES, *words, "--json")
    assert main(["data", "stats", *flags]) == code
    out = json.loads(capsys.readouterr().out)
    return out["error"] if code else out


def opened(train, output, validation=()):
    config = DataConfig(train=(train,), validation=validation, tokenizer="bytes", sequence=32)
    return dataset.open_data(config, seed=0, log=output.append, warn=output.append)


def rows(first, count=20):
    texts = [{"text": SENTENCE.format(number)} for number in range(first, first + count)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in texts)


def parquet(path, first, count=20):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [SENTENCE.format(number) for number in range(first, first + count)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


def test_a_store_is_read_as_files_are_copied_once_and_again_when_it_changes(memory, tmp_path):
    memory.pipe({"/crawl/a.jsonl": rows(0), "/crawl/b.jsonl": rows(20)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.jsonl").write_bytes(rows(0))
    (tmp_path / "mine/b.jsonl").write_bytes(rows(20))
    output = []
    data = opened("memory://crawl/*.jsonl", output)
    local = opened("mine/*.jsonl", [])
    assert data.fingerprint["train"] == local.fingerprint["train"]
    assert any(line.startswith("copying 2 files of memory://crawl/*.jsonl") for line in output)
    output.clear()
    opened("memory://crawl/*.jsonl", output)
    assert output == []
    memory.pipe("/crawl/b.jsonl", rows(40))
    changed = opened("memory://crawl/*.jsonl", output)
    assert any(line.startswith("copying 1 file of") for line in output)
    assert changed.fingerprint["train"] != data.fingerprint["train"]


@pytest.mark.slow
def test_a_run_trains_on_a_url_and_a_broken_connection_is_tried_again(web, tmp_path, capsys):
    (tmp_path / "served/a.jsonl").write_bytes(rows(0, 200))
    object_stores.Flaky.breaks = 2
    config = harness.write_config(tmp_path)
    flags = (f"--config.data.train={web}/a.jsonl", "--config.data.validation=()")
    assert main(harness.words(config, tmp_path / "run", *flags, "--stop_at=1")) == 0
    assert object_stores.Flaky.breaks == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"]["train"] == [f"{web}/a.jsonl"]
    object_stores.Flaky.breaks = 99
    shutil.rmtree("cache")
    capsys.readouterr()
    error = stats(capsys, f"{web}/a.jsonl", code=66)
    object_stores.Flaky.breaks = 0
    assert error["what"] == "a file could not be copied in 3 tries"
    assert not list((tmp_path / "cache").rglob("a.jsonl"))


def test_a_store_that_does_not_answer_is_replaced_by_the_copies_with_a_message(
    memory, monkeypatch, capsys
):
    memory.pipe("/crawl/a.jsonl", rows(0))
    first = opened("memory://crawl/a.jsonl", [])

    def fails(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(type(memory), "info", fails)
    output = []
    assert opened("memory://crawl/a.jsonl", output).fingerprint == first.fingerprint
    assert "could not be listed; using the 1 files copied on 20" in output[0]
    error = stats(capsys, "memory://crawl/b.jsonl", code=66)
    assert error["what"] == "memory://crawl/b.jsonl could not be listed"
    assert "no route" in error["why"]


def test_a_folder_of_token_shards_is_copied_whole_and_used_without_its_store(
    memory, tmp_path, monkeypatch
):
    (tmp_path / "a.jsonl").write_bytes(rows(0, 100))
    words = ("--config.data.train=a.jsonl", "--config.data.validation=10%", *BYTES)
    assert main(["data", "tokenize", *words, "--out=shards"]) == 0
    for path in (tmp_path / "shards/train").iterdir():
        memory.pipe(f"/shards/{path.name}", path.read_bytes())
    data = opened("memory://shards/", [])
    here = opened("shards/train", [])
    assert data.fingerprint == here.fingerprint

    def fails(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(type(memory), "info", fails)
    output = []
    assert opened("memory://shards/", output).fingerprint == here.fingerprint
    assert "memory://shards could not be listed; using the" in output[0]


@pytest.fixture
def s3(monkeypatch):
    with s3_server.serving() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        server.bucket("texts")
        yield server


@pytest.mark.slow
def test_text_and_shards_are_read_from_a_server_of_s3(s3, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / f"mine/{name}.jsonl").write_bytes(rows(first, 100))
    words = ("--config.data.train=mine/*.jsonl", "--config.data.validation=10%", *BYTES)
    assert main(["data", "tokenize", *words, "--out=shards"]) == 0
    client = s3.client()
    for folder in ("mine", "shards/train"):
        for path in (tmp_path / folder).iterdir():
            client.upload_file(str(path), "texts", f"{folder}/{path.name}")
    for place in ("mine/*.jsonl", "shards/train"):
        remote_data, local = opened(f"s3://texts/{place}", []), opened(place, [])
        assert remote_data.fingerprint == local.fingerprint
    error = stats(capsys, "s3://nowhere/a.jsonl", code=66)
    assert error["what"] == "no file matches s3://nowhere/a.jsonl"
    s3.fault = lambda method, path: ("403 Forbidden", "AccessDenied")
    error = stats(capsys, "s3://texts/b.jsonl", code=66)
    assert error["what"] == "s3://texts/b.jsonl could not be listed"
    assert "Forbidden" in error["why"]


def test_a_disk_without_room_is_refused_before_anything_is_copied(
    memory, monkeypatch, capsys, tmp_path
):
    memory.pipe("/crawl/a.jsonl", rows(0))
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: usage)
    error = stats(capsys, "memory://crawl/a.jsonl", code=73)
    assert "100 B are free" in error["why"]
    assert error["fix"].startswith("export JAXLM_CACHE=")
    larger = shlex.split(error["fix"], comments=True)[1].partition("=")[2]
    monkeypatch.undo()
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / larger.strip("/")))
    assert stats(capsys, "memory://crawl/a.jsonl")


def test_a_data_set_of_the_hub_is_read_by_name_split_and_commit(hub, tmp_path, capsys):
    folder = hub.root / "datasets/own/texts"
    for number in range(2):
        parquet(folder / f"data/train-0000{number}-of-00002.parquet", 20 * number)
    parquet(folder / "data/test-00000-of-00001.parquet", 100)
    (folder / "README.md").write_text("card")
    output = []
    data = opened("hf:own/texts", output, validation=("hf:own/texts:test",))
    assert data.train.shards.documents == 40
    assert data.validation["val"].shards.documents == 20
    asked = [path for path in hub.asked if "/resolve/" in path]
    assert len(asked) == 3
    assert not any("README" in path for path in asked)
    commit = hub_server.COMMIT
    assert f"hf:own/texts is now {commit[:12]}; hf:own/texts@{commit} always names these" in str(
        output
    )
    # What was copied is not asked for again, and is there without the hub.
    assert opened("hf:own/texts", []).train.shards.documents > 0
    assert [path for path in hub.asked if "/resolve/" in path] == asked
    hub_client.ANSWER_SECONDS, before = 1, hub_client.ANSWER_SECONDS
    shutil.rmtree(hub.root)
    output.clear()
    error = stats(capsys, "hf:own/texts", code=66)
    assert error["what"] == "the hub has no data set own/texts, or the data set is private"
    hub_client.ANSWER_SECONDS = before


def test_without_the_hub_its_copies_are_used(hub, monkeypatch, capsys, tmp_path):
    parquet(hub.root / "datasets/own/texts/train.parquet", 0)
    first = opened("hf:own/texts", [])
    monkeypatch.setattr(hub_client.HubRepository, "info", lambda self: offline(self))
    output = []
    assert opened("hf:own/texts", output).fingerprint == first.fingerprint
    assert "own/texts cannot be fetched from http" in output[0]
    error = stats(capsys, "hf:own/others", code=66)
    assert error["fix"].splitlines()[1] == "here: --config.data.train=others"
    parquet(tmp_path / "others/train.parquet", 0)
    assert stats(capsys, error["fix"].splitlines()[1].partition("train=")[2])


def offline(repository):
    with repository._errors():
        raise ConnectionError("no route")


def test_a_file_that_arrives_damaged_is_refused(hub, capsys):
    parquet(hub.root / "datasets/own/texts/train.parquet", 0)
    hub.digests["train.parquet"] = "0" * 64
    error = stats(capsys, "hf:own/texts", code=65)
    assert error["what"] == "a file differs from the one that the hub lists"
    hub.digests.clear()
    subprocess.run(error["fix"], shell=True, check=True)
    asked = len(hub.asked)
    assert stats(capsys, "hf:own/texts")
    assert any("/resolve/" in path for path in hub.asked[asked:]), "it is fetched again"


SUBSETS = {
    "configs": [
        {"config_name": "en", "data_files": [{"split": "train", "path": "en/*.parquet"}]},
        {"config_name": "de", "data_files": [{"split": "train", "path": ["de/*.parquet"]}]},
    ]
}


def test_subsets_are_those_of_the_card_and_files_can_be_named(hub, capsys):
    folder = hub.root / "datasets/own/many"
    parquet(folder / "en/0.parquet", 0)
    parquet(folder / "de/0.parquet", 50, count=30)
    hub.card = SUBSETS
    assert opened("hf:own/many/de", []).train.shards.documents == 30
    assert opened("hf:own/many/e*/**/*.parquet", []).train.shards.documents == 20
    error = stats(capsys, "a=hf:own/many", code=66)
    assert error["what"] == "own/many has 2 subsets and no default"
    flags = [shlex.split(line)[0] for line in error["fix"].splitlines()]
    assert flags[0] == "--config.data.train=a=hf:own/many/en", "it keeps the name of the source"
    assert stats(capsys, flags[0].partition("train=")[2])
    error = stats(capsys, "hf:own/many/en:test", code=66)
    assert error["fix"] == "--config.data.train=hf:own/many/en:train"
    assert stats(capsys, error["fix"].partition("train=")[2])


def test_a_data_set_of_code_is_fixed_to_what_the_hub_made_of_it(hub, capsys):
    folder = hub.root / "datasets/own/code"
    folder.mkdir(parents=True)
    (folder / "load.py").write_text("raise SystemExit")
    error = stats(capsys, "hf:own/code:test", code=66)
    parquet(folder.with_name("code.converted") / "default/test/0000.parquet", 0)
    (flag,) = shlex.split(error["fix"], comments=True)
    assert flag == "--config.data.train=hf:own/code@refs/convert/parquet:test"
    assert stats(capsys, flag.partition("train=")[2])


@pytest.mark.parametrize(
    ("train", "code", "what", "fix"),
    [
        ("hf:texts", 2, "the name of a Hugging Face data set is malformed", "huggingface.co/d"),
        ("hf:own/none", 66, "the hub has no data set own/none", "hf auth login"),
        ("hf:own/code", 66, "hf:own/code names no data", "hf:own/code@refs/convert/parquet"),
        ("hf:own/code@v9", 66, "own/code has no revision v9", "datasets/own/code/tree/main"),
        ("nosuch://a/b.txt", 66, "no installed package reads nosuch://", "fsspec[nosuch]"),
        ("memory://none/*.txt", 66, "no file matches memory://none/*.txt", "jaxlm config"),
    ],
)
def test_what_is_not_there_is_one_plain_error(hub, memory, capsys, train, code, what, fix):
    folder = hub.root / "datasets/own/code"
    folder.mkdir(parents=True)
    (folder / "load.py").write_text("raise SystemExit")
    error = stats(capsys, train, code=code)
    assert what in error["what"]
    assert fix in error["fix"]


def test_a_pattern_without_files_names_its_own_setting(memory):
    with pytest.raises(InputMissing) as caught:
        opened("stdlib:validation", [], validation=("memory://none/a.txt",))
    assert caught.value.fix == "jaxlm config explain data.validation"
    with pytest.raises(InputMissing) as caught:
        documents.Corpus.find(("memory://none/a.txt",), "text", "--text")
    assert caught.value.fix == "--text=stdlib:validation"


def test_a_folder_is_all_of_its_text_and_the_rest_is_counted(tmp_path, capsys):
    (tmp_path / "mine/more").mkdir(parents=True)
    for number in range(20):
        (tmp_path / f"mine/{number}.txt").write_text(SENTENCE.format(number) * 20)
    (tmp_path / "mine/more/a.jsonl").write_bytes(rows(0))
    (tmp_path / "mine/picture.png").write_bytes(b"\x89PNG\0\xff")
    output = []
    assert opened("mine", output).train.shards.documents == 40
    assert output[1:] == ["left out of train: 1 files of a folder that are no text"]
