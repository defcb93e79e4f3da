"""Several processes hash one checkpoint: each its part, with one answer for all."""

import shutil
import threading

import jax.numpy as jnp
import pytest
from etils import epath

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint import store as stores
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import PARTIAL_SUFFIXES, Store, StoreWriter
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core.errors import DataError, SaveFailed
from jaxlm.monitor import formatting
from jaxlm.parallel.peers import Peers
from tests.parallel.service import together

FILES = {
    "_METADATA": (10, ""),
    "manifest.ocdbt": (10, ""),
    "ocdbt.process_0/d/a": (500, ""),
    "ocdbt.process_1/d/a": (400, ""),
    "ocdbt.process_1/d/b": (100, ""),
    "array_metadatas/process_1": (10, ""),
}


def state(value=1.0):
    return {"params": {"w": jnp.full((64, 8), value)}, "step": jnp.int32(1)}


@pytest.fixture
def step(tmp_path):
    """A committed step."""
    store = Store(tmp_path / "run", CheckpointConfig())
    store.save(1, state(), {})
    store.close()
    return epath.Path(tmp_path / "run/1")


@pytest.fixture
def read(monkeypatch):
    """The files that were hashed from now on, by thread."""
    files, digest = {}, records._digest

    def noted(path, *rest):
        files.setdefault(threading.current_thread().name.partition("-")[0], []).append(str(path))
        return digest(path, *rest)

    monkeypatch.setattr(records, "_digest", noted)
    return files


def test_a_file_is_verified_by_the_process_that_wrote_it_while_that_is_even():
    assert [set(part) for part in records.divide_files(FILES, 2)] == [
        {"ocdbt.process_0/d/a", "_METADATA", "manifest.ocdbt"},
        {"ocdbt.process_1/d/a", "ocdbt.process_1/d/b", "array_metadatas/process_1"},
    ]
    one = {f"ocdbt.process_0/d/{number}": (100, "") for number in range(8)}
    assert [len(part) for part in records.divide_files(one, 4)] == [2, 2, 2, 2], (
        "one wrote all of them"
    )
    (alone,) = records.divide_files(FILES, 1)
    assert set(alone) == FILES.keys()


def written(folder):
    for path, (size, _) in FILES.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(size))
    return [
        records.digests(folder, lambda path, index=index: records.writer_process(path) == index)
        for index in range(2)
    ]


def test_the_digests_of_all_processes_are_those_of_all_files(tmp_path):
    folder = epath.Path(tmp_path)
    parts = written(folder)
    assert set(parts[1]) == {path for path in FILES if "process_1" in path}
    assert records.merge_digests(folder, parts) == records.digests(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, parts: parts[1].pop("ocdbt.process_1/d/b"), "no process hashed ocdbt"),
        (lambda folder, parts: parts.pop(), "no process hashed array_metadatas/process_1"),
        (lambda folder, parts: parts.append(parts[1]), "two processes hashed"),
        (lambda folder, parts: (folder / "ocdbt.process_1/d/a").unlink(), "hashed and is gone"),
        (
            lambda folder, parts: (folder / "ocdbt.process_1/d/a").write_bytes(b"more"),
            "had 400 bytes when it was hashed and has 4 now",
        ),
    ],
)
def test_a_file_that_no_process_hashed_as_it_is_keeps_a_step_from_being_committed(
    tmp_path, change, message
):
    folder = epath.Path(tmp_path)
    parts = written(folder)
    change(folder, parts)
    with pytest.raises(RuntimeError, match=message):
        records.merge_digests(folder, parts)


def test_every_file_of_a_step_is_read_by_one_of_three_processes_and_all_have_the_first_ones_answer(
    step, read
):
    def decide(peers):
        verifier = Verifier(peers)
        return [verifier.decide(lambda: [verifier.problems(step), 5]) for _ in range(12)]

    answers, service = together(3, decide)
    assert answers == [[[[], 5]] * 12] * 3
    files = [path for paths in read.values() for path in paths]
    expected = [str(step / path) for path in records.read(step).files]
    assert sorted(files) == sorted(12 * expected)
    assert len(service.values) < 12, "what was read is forgotten"


def test_what_any_process_finds_damaged_is_damaged_to_all(step):
    files = records.read(step).files
    parts = records.divide_files(files, 2)
    for part in parts:
        path = part[0]
        content = (step / path).read_bytes()
        (step / path).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        line = f"{path} has other contents than were written"

        def decide(peers):
            verifier = Verifier(peers)
            return verifier.decide(lambda: verifier.problems(step))

        assert together(2, decide)[0] == [[line], [line]]
        (step / path).write_bytes(content)


def test_a_step_whose_record_another_process_cannot_read_is_damaged(step, monkeypatch):
    whole = records.read
    reads = []

    def failing(directory):
        reads.append(directory)
        if len(reads) == 2:  # the first process has read it; it or the other does next
            raise DataError("damaged", where="here", why="it is missing", fix="none")
        return whole(directory)

    monkeypatch.setattr(records, "read", failing)

    def decide(peers):
        verifier = Verifier(peers)
        return verifier.decide(lambda: verifier.problems(step))

    (lines, others), _ = together(2, decide)
    assert lines == others
    assert "cannot read it: it is missing" in lines[0]


def test_a_long_verification_says_how_far_it_is(step, monkeypatch):
    monkeypatch.setattr(formatting, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(records, "CHUNK_BYTES", 64)
    output, moved = [], []
    assert Verifier(say=output.append, moved=lambda: moved.append(1)).problems(step) == []
    assert any("verifying checkpoint 1: " in line and " a second, " in line for line in output)
    assert len(moved) > 10


def test_the_limit_of_a_save_is_the_stores(tmp_path):
    store = Store(tmp_path, CheckpointConfig(), writer=StoreWriter(save_seconds=77.5))
    assert store._orbax._async_manager._timeout_secs == 78
    store.close()
    store = Store(tmp_path, CheckpointConfig())
    assert store._orbax._async_manager._timeout_secs > 7 * 24 * 3600, (
        "an import has no waiting peers"
    )
    store.close()


def test_a_save_that_takes_too_long_says_which_limit_it_was(tmp_path):
    store = Store(tmp_path, CheckpointConfig(), writer=StoreWriter(save_seconds=60))
    error = store._failed(
        TimeoutError("Timed out while waiting for async_commit_complete barrier.")
    )
    assert "not committed within 60 s" in error.what
    assert "--config.watch.save=120s" in error.fix
    of_the_disk = store._failed(TimeoutError(110, "Connection timed out"))
    assert "watch.save" not in str(of_the_disk)
    store.close()


def test_old_steps_are_removed_outside_of_the_limit_of_a_save(tmp_path, monkeypatch):
    """The next step is committed while files of an old one are still there."""
    store = Store(tmp_path, CheckpointConfig(keep_last=1))
    go_on, rmtree = threading.Event(), type(store.directory).rmtree
    for step in (1, 2):
        store.save(step, state(), {}, healthy=False)
        store.wait()

    def slow(path, *args, **kwargs):
        if path.name == f"1{PARTIAL_SUFFIXES[1]}":
            assert go_on.wait(30)
        return rmtree(path, *args, **kwargs)

    monkeypatch.setattr(type(store.directory), "rmtree", slow)
    store.save(3, state(), {})
    store._orbax.wait_until_finished()
    assert store.steps() == [2, 3]
    assert (tmp_path / f"1{PARTIAL_SUFFIXES[1]}").is_dir()
    go_on.set()
    store.wait()
    assert not (tmp_path / f"1{PARTIAL_SUFFIXES[1]}").exists()
    store.close()
    assert store.steps() == [3]


def test_an_old_step_that_cannot_be_removed_is_said(tmp_path, monkeypatch):
    store = Store(tmp_path, CheckpointConfig(keep_last=1))
    for step in (1, 2):
        store.save(step, state(), {}, healthy=False)
        store.wait()

    def fail(folders):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stores, "_remove", fail)
    store.save(3, state(), {})
    with pytest.raises(SaveFailed, match="an old checkpoint could not be removed"):
        store.wait()
    assert store.steps() == [2, 3]
    assert (tmp_path / f"1{PARTIAL_SUFFIXES[1]}").is_dir()
    store.release()
    assert not (tmp_path / f"1{PARTIAL_SUFFIXES[1]}").exists(), "tried again"


def test_one_process_needs_no_service(step, read):
    assert Verifier(Peers()).decide(lambda: 5) == 5
    assert Verifier().problems(step) == []
    assert len([path for paths in read.values() for path in paths]) == len(records.read(step).files)
    shutil.rmtree(step / "d")
    assert all(line.endswith("is missing") for line in Verifier().problems(step))
