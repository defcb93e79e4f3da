"""Rows hold every position of every document once, for every packing."""

import hashlib
import os
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data import packing, writer
from jaxlm.data.blocks import BLOCK, BlockWriter
from jaxlm.data.loader import Loader
from jaxlm.data.manifest import Manifest, Shard
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.shards import TokenShards
from jaxlm.data.tokenizer import Bytes
from tests import machine

SEQUENCE = 16


@pytest.fixture
def stored(tmp_path: Path) -> TokenShards:
    rng = np.random.default_rng(0)
    texts = [
        "".join(chr(97 + (n + i) % 26) for i in range(size))
        for n, size in enumerate([1, 15, 16, 14, 200, *rng.integers(1, 50, 300)])
    ]
    documents = [Document(text, "a.txt", n) for n, text in enumerate(texts)]
    return writer.write(tmp_path / "shards", documents, Bytes(), LeftOut())


@pytest.mark.parametrize("kind", ["concat", "first_fit"])
@pytest.mark.parametrize("window", [7, 8192])
def test_every_position_is_in_exactly_one_row(
    stored: TokenShards,
    tmp_path: Path,
    kind: packing.Packing,
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "WINDOW", window)
    plan = packing.open_plan(stored, SEQUENCE, kind, 3, tmp_path / "plan")
    seen: Counter[tuple[int, int]] = Counter()
    for row in range(plan.rows):
        pieces = plan.pieces(row)
        assert 0 < pieces["length"].sum() <= SEQUENCE
        assert (pieces["length"] > 0).all()
        for document, start, length in pieces.tolist():
            seen.update((document, start + i) for i in range(length))
    lengths = stored.lengths(0, stored.documents)
    assert seen == Counter(
        (d, i) for d, length in enumerate(lengths.tolist()) for i in range(length - 1)
    )
    if kind == "concat":
        assert plan.rows == -(-int((lengths - 1).sum()) // SEQUENCE)


def test_first_fit_keeps_documents_that_fit_whole(stored: TokenShards, tmp_path: Path) -> None:
    plan = packing.open_plan(stored, SEQUENCE, "first_fit", 0, tmp_path / "plan")
    pieces = np.concatenate([plan.pieces(row) for row in range(plan.rows)])
    count = np.bincount(pieces["document"])
    positions = stored.lengths(0, stored.documents) - 1
    assert (count == -(-positions // SEQUENCE)).all()
    assert positions.sum() / (plan.rows * SEQUENCE) > 0.95


def test_a_row_holds_the_text_of_its_documents_and_the_token_after_each(
    stored: TokenShards, tmp_path: Path
) -> None:
    plan = packing.open_plan(stored, SEQUENCE, "first_fit", 0, tmp_path / "plan")
    for batch in Loader(stored, plan, SEQUENCE, 0).evaluation(batch=4):
        assert {array.dtype.name for array in batch if array is not None} == {"int32", "float32"}
        assert np.array_equal(batch.weights > 0, batch.segments > 0)
        starts = (np.diff(batch.segments, axis=1, prepend=0) != 0) & (batch.segments > 0)
        assert (batch.positions[starts] == 0).all()
        assert (
            np.diff(batch.positions, axis=1)[
                (np.diff(batch.segments, axis=1) == 0) & (batch.segments[:, 1:] > 0)
            ]
            == 1
        ).all()
        inside = (np.diff(batch.segments, axis=1) == 0) & (batch.segments[:, 1:] > 0)
        assert (batch.targets[:, :-1][inside] == batch.tokens[:, 1:][inside]).all()
        assert not (batch.targets == Bytes.before[0]).any()


def test_the_same_seed_gives_the_same_plan_and_another_seed_another(
    stored: TokenShards, tmp_path: Path
) -> None:
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        packing.open_plan(stored, SEQUENCE, "concat", seed, tmp_path / name)
        contents.append((tmp_path / name / "pieces.bin").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_a_damaged_plan_that_another_process_made_again_is_left(
    stored: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that find it damaged must not remove what the other has made."""
    made: list[Path] = []

    def plan() -> packing.PackingPlan:
        return packing.open_plan(stored, SEQUENCE, "concat", 0, tmp_path / "plan")

    rows = plan().rows
    (tmp_path / "plan" / "digest").write_text("another")
    is_whole = packing._is_whole

    def interleaved(folder: Path) -> bool:
        answer = is_whole(folder)
        if not made:
            made.append(folder / "of the other")
            plan()  # as the other process does, after this one has looked
            made[0].touch()
        return answer

    monkeypatch.setattr(packing, "_is_whole", interleaved)
    assert plan().rows == rows
    assert made[0].exists()


def test_best_fit_packs_a_hundred_thousand_documents_a_second() -> None:
    sizes = np.random.default_rng(0).integers(1, 900, 8192)
    seconds = min(
        _seconds(lambda: packing._best_fit(np.arange(8192), sizes, 1024)) for _ in range(5)
    )
    assert 8192 / seconds > 100_000  # a third of what an idle core does


def _seconds(function: object) -> float:
    begun = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - begun


@pytest.mark.parametrize("kind", ["concat", "first_fit"])
def test_step_a_million_of_two_gigabytes_comes_in_five_seconds_and_bounded_memory(
    tmp_path: Path, kind: packing.Packing
) -> None:
    stored = _two_gigabytes(tmp_path / "shards")
    next(
        Loader(
            stored, packing.open_plan(_tiny(tmp_path), 16, kind, 0, tmp_path / "warm"), 16, 0
        ).batches(0, batch=1)
    )  # imports Grain
    before, begun = _private_bytes(), time.perf_counter()
    plan = packing.open_plan(stored, 1024, kind, 0, tmp_path / "plan")
    batch = next(Loader(stored, plan, 1024, 0).batches(1_000_000, batch=8))
    machine.require_clock(time.perf_counter() - begun, 5)
    assert _private_bytes() - before < 200e6
    assert batch.tokens.shape == (8, 1024)


def _tiny(tmp_path: Path) -> TokenShards:
    return writer.write(tmp_path / "tiny", [Document("a" * 99, "a.txt", 0)], Bytes(), LeftOut())


def _two_gigabytes(folder: Path) -> TokenShards:
    """Four shards of 2^28 uint16 ids in sparse files, about a million documents."""
    folder.mkdir()
    checked = b"".join(
        zlib.crc32(bytes(BLOCK)).to_bytes(4, "little") for _ in range(2**29 // BLOCK)
    )
    entries = []
    for number in range(4):
        ends = np.arange(1, 2**18 + 1, dtype=np.int64) * 1024
        ends[:-1] += np.random.default_rng(number).integers(-400, 400, len(ends) - 1)
        with open(folder / f"tokens-{number:05d}.bin", "wb") as file:
            file.truncate(2**29)
        writer = BlockWriter(folder / f"documents-{number:05d}.bin")
        writer.write(np.stack([ends, np.zeros_like(ends), np.arange(len(ends))], axis=1))
        writer.close()
        checks = checked + writer.checks.tobytes()
        (folder / f"checks-{number:05d}.bin").write_bytes(checks)
        entries.append(
            Shard(
                tokens=2**28,
                documents=len(ends),
                largest_id=0,
                tokens_sha256="",
                documents_sha256="",
                checks_sha256=hashlib.sha256(checks).hexdigest(),
            )
        )
    manifest = Manifest(
        tokenizer=Bytes().digest,
        vocab=Bytes().size,
        dtype="uint16",
        documents=2**20,
        tokens=2**30,
        bytes=0,
        left_out={},
        unknown=0,
        files_sha256="",
        shards=tuple(entries),
    )
    assert sum((folder / f"tokens-{n:05d}.bin").stat().st_size for n in range(4)) == 2**31
    return TokenShards(folder, manifest)


def _private_bytes() -> int:
    """Memory of this process that is its own: pages of mapped files belong to the page cache."""
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
