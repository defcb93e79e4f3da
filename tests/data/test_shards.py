"""Shards read back what was written and refuse what was damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import writer
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.shards import TokenShards
from jaxlm.data.tokenizer import SPECIALS, Bytes, Tokenizer

DOCUMENTS = [Document(f"text number {n} " * (n % 7 + 1), f"{n % 3}.txt", n // 3) for n in range(50)]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenShards:
    monkeypatch.setattr(writer, "SHARD_TOKENS", 500)
    left_out = LeftOut()
    for record in (3, 7):
        left_out.add("empty", "a.jsonl", record)
    return writer.write(tmp_path / "shards", DOCUMENTS, Bytes(), left_out)


def test_documents_come_back_with_their_origin_from_several_shards(stored: TokenShards) -> None:
    assert len(stored.manifest.shards) > 3
    lengths = stored.lengths(0, stored.documents)
    for number, document in enumerate(DOCUMENTS):
        ids = stored.read(number, 0, int(lengths[number]))
        assert (ids[0], ids[-1]) == (Bytes.before[0], Bytes.eos)
        assert Bytes().decode(ids[1:-1].tolist()) == document.text
        assert stored.origin(number) == (document.file, document.record)


def test_mapped_into_memory_the_files_are_the_ids_and_where_they_end(stored: TokenShards) -> None:
    """Readers without this library need only the dtype in the manifest."""
    number = 0
    for shard, held in enumerate(stored.manifest.shards):
        ids = np.memmap(stored.folder / f"tokens-{shard:05d}.bin", stored.manifest.dtype, "r")
        index = np.memmap(stored.folder / f"documents-{shard:05d}.bin", "<i8", "r").reshape(-1, 3)
        assert (len(ids), len(index)) == (held.tokens, held.documents)
        for start, stop in zip([0, *index[:-1, 0]], index[:, 0], strict=True):
            assert np.array_equal(ids[start:stop], stored.read(number, 0, int(stop - start)))
            number += 1
    assert number == len(DOCUMENTS)


def test_lengths_of_a_range_are_those_of_its_documents(stored: TokenShards) -> None:
    lengths = stored.lengths(0, stored.documents)
    for start, stop in ((0, 1), (3, 20), (49, 50), (7, 7)):
        assert np.array_equal(stored.lengths(start, stop), lengths[start:stop])


def test_the_manifest_counts_everything(stored: TokenShards) -> None:
    manifest = stored.manifest
    assert manifest.documents == 50
    assert (
        manifest.bytes
        == sum(len(document.text.encode()) for document in DOCUMENTS)
        == manifest.tokens - 2 * 50
    )
    assert manifest.left_out == {"empty": 2}
    assert manifest.counted("empty") == "2 empty (first a.jsonl, line 3)"
    assert manifest.vocab == len(SPECIALS) + 256
    assert stored.tokenizer.digest == manifest.tokenizer


def test_a_long_document_is_encoded_in_parts_and_stored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "span", 10)
    text = "a line\nand one that is longer than a part\n\n\u6f22\u5b57" * 9
    stored = writer.write(
        tmp_path / "shards", [Document(text, "a", 0), Document("b", "a", 1)], Bytes(), LeftOut()
    )
    assert stored.documents == 2
    assert Bytes().decode(stored.read(0, 1, int(stored.lengths(0, 1)[0]) - 1).tolist()) == text


def test_verify_detects_every_flipped_bit(stored: TokenShards) -> None:
    stored.verify()
    rng = np.random.default_rng(0)
    for path in stored.folder.glob("*.bin"):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(DataError) as caught:
            TokenShards.open(stored.folder).verify()
        assert caught.value.where == str(path)
        path.write_bytes(good)


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_file_of_the_wrong_size_is_refused_at_opening(stored: TokenShards, harm: str) -> None:
    path = stored.folder / "tokens-00001.bin"
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(DataError) as caught:
        TokenShards.open(stored.folder)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "change",
    [{"format_version": 99}, {"vocab": 50}, {"shards": None}, {"what": 1}, {"dtype": "object"}],
)
def test_a_manifest_that_is_not_ours_is_refused(
    stored: TokenShards, change: dict[str, object]
) -> None:
    path = stored.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError) as caught:
        TokenShards.open(stored.folder)
    assert caught.value.where == str(path)


def test_a_folder_without_a_manifest_is_missing_input(tmp_path: Path) -> None:
    with pytest.raises(InputMissing):
        TokenShards.open(tmp_path)


def test_an_id_outside_the_table_is_refused_before_it_is_stored(tmp_path: Path) -> None:
    class Broken(Bytes):
        def encode_many(self, texts):
            return [[self.size] for _ in texts]

    with pytest.raises(DataError, match="outside 0 to 295") as caught:
        writer.write(tmp_path / "shards", DOCUMENTS, Broken(), LeftOut())
    assert caught.value.where == "0.txt"
    assert not list(tmp_path.iterdir())


def test_nothing_to_write_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document"):
        writer.write(tmp_path / "shards", [], Bytes(), LeftOut())
    assert not list(tmp_path.iterdir())


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from jaxlm.data import blocks, writer
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.tokenizer import Bytes
writer.BATCH = blocks.WAITING = 100
def documents():
    for n in range(int(sys.argv[2])):
        time.sleep(float(sys.argv[3]))
        yield Document(f"text {n} " * 50, "a.txt", n)
print("begun", flush=True)
writer.write(Path(sys.argv[1]) / "shards", documents(), Bytes(), LeftOut())
"""


def _write(folder: Path, pause: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [sys.executable, "-c", WRITE_SLOWLY, str(folder), "100", pause],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_writer_leaves_no_shards_and_the_next_writes_the_same_bytes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    with _write(folder, "0.02") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        deadline = time.monotonic() + 20
        while (
            not any(path.stat().st_size for path in folder.rglob("tokens-*"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert any(path.stat().st_size for path in folder.rglob("tokens-*")), (
        "the kill landed before anything was written"
    )
    assert not (folder / "shards").exists()
    for target in (folder, tmp_path):
        with _write(target, "0") as process:
            process.communicate()
    names = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert names == sorted(path.name for path in (folder / "shards").iterdir())
    assert all(
        (tmp_path / "shards" / name).read_bytes() == (folder / "shards" / name).read_bytes()
        for name in names
    )
    assert [path.name for path in folder.iterdir()] == ["shards"], (
        "what the killed writer left is cleared away"
    )
