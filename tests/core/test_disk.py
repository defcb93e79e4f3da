import errno
import os
from pathlib import Path

import pytest
from etils import epath

from jaxlm.core import disk
from jaxlm.core.errors import DataError, InputMissing


@pytest.fixture
def synced(monkeypatch):
    """Each file or folder that is synced, in turn, and the names in it by then."""
    seen, sync = [], os.fsync

    def noted(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        names = {each.name for each in path.iterdir()} if path.is_dir() else set()
        seen.append((path.name, names))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    return seen


def test_a_replaced_file_and_then_its_name_are_on_the_disk(tmp_path, synced):
    (tmp_path / "a").write_text("old")
    disk.replace(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    (partial, _), (folder, names) = synced
    assert partial.startswith(".a.")
    assert (folder, names) == (tmp_path.name, {"a"})


def test_a_new_name_and_that_the_old_one_is_gone_are_on_the_disk(tmp_path, synced):
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    (tmp_path / "from/x").write_text("")
    disk.rename(tmp_path / "from/x", tmp_path / "to/y")
    assert sorted(synced) == [("from", set()), ("to", {"y"})]


def test_what_killed_processes_left_of_a_file_is_removed_and_nothing_else(tmp_path):
    for name in (".a.json.17.tmp", ".a.tmp", "b.17.tmp", ".lock", "a.json"):
        (tmp_path / name).touch()
    disk.remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".a.tmp",
        ".lock",
        "a.json",
        "b.17.tmp",
    ]


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_over(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        disk.replace(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_filesystem_that_cannot_sync_folders_is_no_error(
    tmp_path, monkeypatch, number, is_raised
):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if is_raised:
        with pytest.raises(OSError, match=os.strerror(number)):
            disk.sync(tmp_path)
    else:
        disk.sync(tmp_path)


def test_what_lies_in_an_object_store_needs_no_sync():
    disk.sync(epath.Path("gs://bucket/run"))


@pytest.mark.parametrize(
    ("content", "error", "what"),
    [
        (None, InputMissing, "the file does not exist"),
        ("[1, 2, 3, 4, 5]", DataError, "the file cannot be read"),
        ("{", DataError, "the file cannot be read"),
        ("[" * 9, DataError, "the file cannot be read"),
    ],
)
def test_json_that_cannot_be_read_is_refused_with_the_fix_of_the_caller(
    tmp_path, content, error, what
):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=what) as caught:
        disk.read_json(path, 10, "the file", missing="make it", damaged="make it again")
    assert caught.value.fix == ("make it" if content is None else "make it again")
    path.write_text('{"a": 1}')
    assert disk.read_json(path, 10, "the file", missing="x", damaged="x") == {"a": 1}
