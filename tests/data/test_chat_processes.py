"""Conversations encoded by other processes are those that this one encodes."""

import json
import subprocess
import sys

import pytest

from jaxlm.core.errors import DataError, PeerLost
from jaxlm.data import chat_documents, chat_processes, dataset
from jaxlm.data.config import DataConfig

SCRIPT = """
import sys
from pathlib import Path
from jaxlm.data import chat_documents, dataset
from jaxlm.data.config import DataConfig
chat_documents.FEW, chat_documents.BATCH, chat_documents.MOST_PROCESSES = 0, 8, 2
train, root = sys.argv[1:]
config = DataConfig(
    train=(train,), validation=(), kind="chat", tokenizer="bytes", sequence=128
)
print(dataset.open_data(config, seed=0, root=Path(root)).train.shards.documents)
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(chat_documents, "BATCH", 8)


@pytest.fixture
def started(small, monkeypatch):
    """Return the two processes that encode, once they were started."""
    processes = []

    class Recorded(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(command, **options)
            if command[-1] == chat_processes.__name__:
                processes.append(self)

    monkeypatch.setattr(chat_documents, "FEW", 0)
    monkeypatch.setattr(chat_documents, "MOST_PROCESSES", 2)
    monkeypatch.setattr(chat_documents, "processors", lambda: 3)
    monkeypatch.setattr(chat_processes.subprocess, "Popen", Recorded)
    return processes


def turns(number, exchanges, size=3):
    asked = [{"role": "user", "content": f"q{number} {n}"} for n in range(exchanges)]
    answered = [
        {"role": "assistant", "content": "a" * size, "weight": (number + n) % 3 / 2}
        for n in range(exchanges)
    ]
    return [turn for pair in zip(asked, answered, strict=True) for turn in pair]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def open_data(train, root, **settings):
    config = {"kind": "chat", "validation": (), "tokenizer": "bytes", "sequence": 64} | settings
    return dataset.open_data(DataConfig(train=(train,), **config), seed=0, root=root)


def contents(root):
    """Return the bytes of each file of the token shards in a cache."""
    files = {
        path.relative_to(root): path.read_bytes()
        for path in (root / "shards").rglob("*")
        if path.is_file()
    }
    assert len(files) > 4
    return files


@pytest.mark.parametrize("kind", ["chat", "pairs"])
def test_shards_are_those_of_one_process_byte_for_byte(kind, small, tmp_path, request):
    chats = [turns(n, n % 4 + 1, size=3 + n % 60) for n in range(90)]
    records = [{"messages": each} for each in chats]
    if kind == "pairs":
        records = [
            {
                "prompt": each[:1],
                "chosen": each[1:2],
                "rejected": [{**each[1], "content": "b" * (n % 50)}],
            }
            for n, each in enumerate(chats)
        ]
    train = write(tmp_path / "chat.jsonl", records)
    settings = {"kind": kind, "overlong": "left", "sequence": 64 if kind == "chat" else 96}
    alone = open_data(train, tmp_path / "alone", **settings)
    started = request.getfixturevalue("started")
    shared = open_data(train, tmp_path / "shared", **settings)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")
    manifest = shared.train.shards.manifest
    assert sum(manifest.left_out.values()) > 5
    assert manifest.figures["turns"] > 50
    assert manifest == alone.train.shards.manifest


def test_an_error_in_a_process_is_that_of_the_first_conversation_that_has_it(started, tmp_path):
    records = [{"messages": turns(n, 1, size=200 if n in (50, 70) else 3)} for n in range(90)]
    with pytest.raises(DataError, match="longer than a row") as error:
        open_data(write(tmp_path / "chat.jsonl", records), tmp_path / "root", overlong="error")
    assert error.value.where.endswith("chat.jsonl, line 51")
    assert "--config.data.overlong=drop" in error.value.fix
    assert [process.poll() for process in started] == [-9, -9]


def test_a_process_that_was_killed_leaves_no_shards(started, tmp_path, monkeypatch):
    train = write(tmp_path / "chat.jsonl", [{"messages": turns(n, 1)} for n in range(400)])

    def kill():
        for process in started[:1]:
            process.kill()

    items = chat_documents._items
    monkeypatch.setattr(chat_documents, "_items", lambda each: kill() or items(each))
    with pytest.raises(PeerLost, match="conversations ended") as error:
        open_data(train, tmp_path / "root")
    assert error.value.code == 69
    assert "-9" in error.value.why
    assert not list((tmp_path / "root").rglob("manifest.json"))


def test_a_script_without_a_guard_around_its_calls_runs_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    train = write(tmp_path / "chat.jsonl", [{"messages": turns(n, 1)} for n in range(40)])
    command = [sys.executable, str(tmp_path / "script.py"), train, str(tmp_path / "root")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "26\n"), done.stderr
