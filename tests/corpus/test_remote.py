"""Sources behind URLs and copies to them: fsspec's memory and local stores, and a server."""

import errno
import gzip
import json
import shutil
from pathlib import Path

import pytest

from jaxlm.corpus import remote
from jaxlm.data import stores
from tests import object_stores
from tests.corpus.recipes import kept, lines, prose, run, tree, write_lines

SET = ("--config.stages=length", "--config.dedup=exact", "--config.unit_bytes=1")


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(stores, "WAIT_SECONDS", 0.01)
    with object_stores.in_memory() as store:
        yield store


def rows(seed: int) -> bytes:
    texts = [{"text": prose(seed)}, {"text": prose(7)}, {"text": "short"}]
    return b"".join(json.dumps(row).encode() + b"\n" for row in texts)


def test_a_store_is_read_as_files_are(here, memory, capsys):
    memory.pipe({"/crawl/a.jsonl": rows(1), "/crawl/b.jsonl.gz": gzip.compress(rows(2))})
    memory.pipe("/crawl/c.txt", prose(3).encode())
    answer = run(capsys, "--config.source=memory://crawl/*", *SET)
    assert kept() == [prose(1), prose(7), prose(2), prose(3)]
    assert answer["removed"] == {"exact": 1, "length.short": 2}
    places = [(row["file"], row["record"]) for row in lines("kept/*.jsonl")]
    assert places[2] == ("memory:///crawl/b.jsonl.gz", 1)
    noted = json.loads(Path("out/recipe.json").read_text())["files"]
    assert ["memory:///crawl/a.jsonl", len(rows(1))] in noted
    memory.pipe("/crawl/d.txt", b"more")
    error = run(capsys, "--config.source=memory://crawl/*", *SET, code=2)["error"]
    assert error["why"] == "files differ"


def test_local_files_by_url_give_the_same_documents_with_any_number_of_processes(here, capsys):
    for number in range(4):
        (here / "in").mkdir(exist_ok=True)
        (here / f"in/{number}.jsonl.gz").write_bytes(gzip.compress(rows(number)))
    run(capsys, "--config.source=in/*", *SET)
    plain = kept()
    shutil.rmtree("out")
    source = f"--config.source=file://{here}/in/*.gz"
    run(capsys, source, *SET)
    assert kept() == plain
    first = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, source, *SET, "--workers=2")
    assert tree(Path("out")) == first


@pytest.fixture
def server(here, monkeypatch):
    monkeypatch.setattr(stores, "WAIT_SECONDS", 0.01)
    with object_stores.serving(here / "served") as url:
        yield url


def test_a_connection_that_breaks_is_tried_again_and_is_no_damaged_file(server, here, capsys):
    (here / "served/a.jsonl.gz").write_bytes(gzip.compress(rows(1)))
    object_stores.Flaky.breaks = 2
    answer = run(capsys, f"--config.source={server}/a.jsonl.gz", *SET)
    assert (answer["broken"], kept()) == ({}, [prose(1), prose(7)])
    object_stores.Flaky.breaks = 99
    words = (f"--config.source={server}/a.jsonl.gz", *SET, "--out=other")
    error = run(capsys, *words, code=66)["error"]
    object_stores.Flaky.breaks = 0
    assert error["what"] == "a file could not be downloaded in 3 tries"
    assert "the same command again" in error["fix"]
    first = tree(Path("out"))
    run(capsys, *words)
    assert tree(Path("other")) == first, "the failed run resumes"
    assert (
        "no file matches"
        in run(capsys, f"--config.source={server}/none.txt", "--out=third", code=66)["error"][
            "what"
        ]
    )


def test_what_is_finished_is_copied_whole_once_and_over_nothing_else(here, memory, capsys):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}, {"text": "short"}])
    words = ("--config.source=in/a.jsonl", *SET, "--copy_to=memory://clean/one")
    run(capsys, *words)
    expected = {name: data for name, data in tree(Path("out")).items() if name[:6] != "units/"}
    files = {path.removeprefix("/clean/one/"): memory.cat_file(path) for path in memory.find("/")}
    assert files == expected
    memory.rm("/clean/one/report.json")  # as after a kill
    memory.pipe("/clean/one/kept/00000.jsonl", b"torn")
    run(capsys, *words)
    assert {p.removeprefix("/clean/one/"): memory.cat_file(p) for p in memory.find("/")} == expected
    write_lines(here / "in/a.jsonl", [{"text": prose(2)}])
    error = run(capsys, *words, "--out=other", code=73)["error"]
    assert error["fix"] == "--copy_to=memory://clean/one-2"
    assert memory.cat_file("/clean/one/kept/00000.jsonl") == expected["kept/00000.jsonl"]
    # What was copied is a source.
    run(capsys, "--config.source=memory://clean/one/kept/*.jsonl", *SET, "--out=third")


@pytest.mark.parametrize(
    ("source", "code", "fix"),
    [
        ("nosuch://place/*.txt", 66, "pip install 'fsspec[nosuch]'"),
        ("memory://none/*.txt", 66, "jaxlm config explain source"),
        ("zip://*.txt::file:///a.zip", 2, "--config.source=file:///a.zip"),
        ("memory://crawl/a.txt,memory://crawl/*", 65, "do not overlap"),
        ("http://name:word@127.0.0.1/a.txt", 2, ""),
    ],
)
def test_a_source_that_cannot_be_read_is_said_before_anything_is_written(
    here, memory, capsys, source, code, fix
):
    memory.pipe("/crawl/a.txt", b"text")
    error = run(capsys, f"--config.source={source}", code=code)["error"]
    assert fix in error["fix"]
    if source.startswith("nosuch"):
        words = ("--config.source=memory://crawl/a.txt", f"--copy_to={source}")
        assert run(capsys, *words, code=66)["error"] == error
    assert not Path("out").exists()


def test_a_file_that_shrank_since_it_was_listed_is_no_whole_file(here, memory, capsys, monkeypatch):
    memory.pipe("/crawl/a.txt", prose(1).encode())
    stat = type(memory).info
    longer = lambda self, path, **more: (  # noqa: E731
        stat(self, path, **more) | ({"size": 10**6} if path.endswith(".txt") else {})
    )
    monkeypatch.setattr(type(memory), "info", longer)
    error = run(capsys, "--config.source=memory://crawl/*.txt", code=66)["error"]
    assert "of 1,000,000 bytes arrived" in error["why"]


def test_a_full_disk_ends_with_73_and_is_no_damaged_file(here, memory, capsys, monkeypatch):
    class Full:
        """A temporary file without room."""

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    memory.pipe("/crawl/a.txt", prose(1).encode())
    with monkeypatch.context() as patch:
        patch.setattr(remote.tempfile, "TemporaryFile", Full)
        error = run(capsys, "--config.source=memory://crawl/*.txt", code=73)["error"]
    assert error["fix"].startswith("export TMPDIR=")
    run(capsys, "--config.source=memory://crawl/*.txt")
    assert kept() == [prose(1)]
