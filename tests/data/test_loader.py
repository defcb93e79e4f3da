"""A batch is a function of seed and step, for any number of hosts and any first step."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.core.errors import DataError
from jaxlm.data import packing, writer
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import Loader
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.tokenizer import Bytes

BATCH, SEQUENCE = 8, 16


@pytest.fixture(params=["concat", "first_fit"])
def loader(tmp_path: Path, request: pytest.FixtureRequest) -> Loader:
    rng = np.random.default_rng(1)
    documents = [
        Document(chr(33 + n) * int(size), "a.txt", n)
        for n, size in enumerate(rng.integers(1, 60, 60))
    ]
    return _loader(tmp_path, documents, request.param)


def _loader(
    folder: Path, documents: list[Document], kind: packing.Packing, seed: int = 5, workers: int = 0
) -> Loader:
    stored = writer.write(folder / "shards", documents, Bytes(), LeftOut())
    return Loader(
        stored,
        packing.open_plan(stored, SEQUENCE, kind, seed, folder / f"plan{seed}"),
        SEQUENCE,
        seed,
        workers=workers,
        prefetch=2,
    )


def _same(a: Tokens, b: Tokens) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _take(batches: Iterator[Tokens], count: int) -> list[Tokens]:
    return list(itertools.islice(batches, count))


def test_starting_at_any_step_gives_the_uninterrupted_stream(loader: Loader) -> None:
    unbroken = _take(loader.batches(0, batch=BATCH), 40)
    assert 2 * loader.plan.rows < 40 * BATCH, "the test must cross an epoch's edge"
    for start in (1, 13, 39):
        assert all(
            _same(a, b)
            for a, b in zip(unbroken[start:], loader.batches(start, batch=BATCH), strict=False)
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_any_number_of_hosts_reads_the_same_global_batch_row_by_row(
    loader: Loader, hosts: int
) -> None:
    whole = _take(loader.batches(3, batch=BATCH), 4)
    share = BATCH // hosts
    parts = [
        _take(loader.batches(3, batch=BATCH, rows=slice(h * share, (h + 1) * share)), 4)
        for h in range(hosts)
    ]
    for step, batch in enumerate(whole):
        assert _same(
            batch,
            jax.tree.map(lambda *x: np.concatenate(x), *(part[step] for part in parts)),
        )


def test_an_epoch_reads_every_position_once_in_an_order_of_its_own(loader: Loader) -> None:
    rows = loader.plan.rows
    epochs = [
        [
            _text(loader.at(number, batch=1, rows=slice(0, 1)))
            for number in range(e * rows, (e + 1) * rows)
        ]
        for e in range(3)
    ]
    everything = Counter(_text(batch) for batch in loader.evaluation(batch=1))
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2]) == everything
    assert epochs[0] != epochs[1] != epochs[2]


def _text(batch: Tokens) -> bytes:
    return b"".join(array.tobytes() for array in batch if array is not None)


def test_another_seed_reads_another_order(tmp_path: Path, loader: Loader) -> None:
    other = Loader(loader.shards, loader.plan, SEQUENCE, seed=6)
    assert not _same(
        other.at(0, batch=BATCH, rows=slice(0, BATCH)),
        loader.at(0, batch=BATCH, rows=slice(0, BATCH)),
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("batch", [1, 7, 8, 1000])
def test_evaluation_gives_the_same_totals_with_any_batch(loader: Loader, batch: int) -> None:
    weight, checksum = 0.0, 0
    for tokens in loader.evaluation(batch=batch):
        assert tokens.tokens.shape == (batch, SEQUENCE)
        weight += float(tokens.weights.sum())
        checksum += int(
            (tokens.targets.astype(np.int64) * (tokens.weights > 0) * (tokens.positions + 1)).sum()
        )
    manifest = loader.shards.manifest
    assert weight == manifest.tokens - manifest.documents
    assert checksum == sum(
        int((t.targets.astype(np.int64) * (t.positions + 1)).sum())
        for t in loader.evaluation(batch=1)
    )


def test_evaluated_targets_stand_for_every_byte_of_text(loader: Loader) -> None:
    table = loader.shards.tokenizer.token_bytes
    counted = sum(
        int((table[t.targets] * (t.weights > 0)).sum()) for t in loader.evaluation(batch=8)
    )
    assert counted == loader.shards.manifest.bytes


def test_evaluation_on_hosts_is_the_slices_of_the_whole_and_a_limit_cuts_it(loader: Loader) -> None:
    whole = list(loader.evaluation(batch=BATCH))
    half = list(loader.evaluation(batch=BATCH, rows=slice(4, 8)))
    last = (jax.tree.map(lambda x: x[4:], batch) for batch in whole)
    assert all(_same(a, b) for a, b in zip(last, half, strict=True))


def test_a_partial_evaluation_reads_the_same_rows_for_any_batch_size_hosts_and_run(
    loader: Loader,
) -> None:
    count = loader.plan.rows // 3 // BATCH * BATCH

    def rows(batch: int, part: slice | None = None) -> list[bytes]:
        batches = loader.evaluation(batch=batch, rows=part, limit=count // batch)
        return [
            _text(jax.tree.map(lambda x, n=n: x[n : n + 1], each))
            for each in batches
            for n in range(len(each.tokens))
        ]

    whole = rows(BATCH)
    assert len(whole) == count == loader.evaluated(batch=BATCH, limit=count // BATCH)
    assert rows(1) == rows(2) == whole == rows(BATCH)
    hosts = [rows(BATCH, slice(n * 4, n * 4 + 4)) for n in range(2)]
    assert [
        row for n in range(0, count, BATCH) for h in hosts for row in h[n // 2 : n // 2 + 4]
    ] == whole
    everything = [_text(each) for each in loader.evaluation(batch=1)]
    places = [everything.index(row) for row in whole]
    assert Counter(whole) <= Counter(everything)  # none twice
    assert max(places) > loader.plan.rows // 2
    assert places != sorted(places)
    more = loader.plan.rows // BATCH + 5
    assert [_text(e) for e in loader.evaluation(batch=BATCH, limit=more)] == [
        _text(e) for e in loader.evaluation(batch=BATCH)
    ]


def test_a_partial_evaluation_of_packed_rows_has_short_documents_as_the_whole_set_has(
    tmp_path: Path,
) -> None:
    """The plan has long documents first: 20 of 190 batches had 1% of short ones in place of 23%."""
    sizes = np.random.default_rng(0).lognormal(3.0, 1.2, 3000).astype(int) + 1
    documents = [Document("x" * int(size), "a.txt", n) for n, size in enumerate(sizes)]
    packed = _loader(tmp_path, documents, "first_fit")

    def share_of_long(limit: int | None) -> float:
        long = total = 0
        for batch in packed.evaluation(batch=BATCH, limit=limit):
            filled = (batch.segments == 1).all(1) & (batch.positions[:, -1] == SEQUENCE - 1)
            weights = batch.weights.sum(1)
            long, total = long + float(weights[filled].sum()), total + float(weights.sum())
        return long / total

    whole = share_of_long(None)
    assert 0.3 < whole < 0.9
    assert share_of_long(100) == pytest.approx(whole, abs=0.05)


def test_fewer_rows_than_a_batch_are_refused_with_a_setting_that_fits(tmp_path: Path) -> None:
    loader = _loader(tmp_path, [Document("short, but not very", "a.txt", 0)], "concat")
    with pytest.raises(DataError, match="shorter than one batch") as caught:
        loader.batches(0, batch=4)
    first, second, _ = caught.value.fix.splitlines()
    assert (first, second) == ("--config.train.batch=2", "--config.data.sequence=5")
    plan = packing.open_plan(loader.shards, 5, "concat", 5, tmp_path / "shorter")
    assert next(Loader(loader.shards, plan, 5, 5).batches(0, batch=4)).tokens.shape == (4, 5)
    assert loader.epochs(12) == 6


def test_the_documents_of_a_batch_are_named(loader: Loader) -> None:
    tokens = loader.at(2, batch=BATCH, rows=slice(0, BATCH))
    for row, origins in enumerate(loader.origins(2, batch=BATCH)):
        assert len(origins) == tokens.segments[row].max()
        for segment, (file, record) in enumerate(origins, start=1):
            text = Bytes().decode(tokens.tokens[row][tokens.segments[row] == segment].tolist())
            assert file == "a.txt"
            assert set(text) <= {chr(33 + record)}


def test_worker_processes_read_the_same_batches(tmp_path: Path) -> None:
    documents = [Document(f"{n}:" + "x" * n, "a.txt", n) for n in range(40)]
    here, other = (
        _loader(tmp_path, documents, "concat"),
        _loader(tmp_path, documents, "concat", workers=1),
    )
    batches = other.batches(5, batch=4)
    assert all(
        _same(a, b)
        for a, b in zip(_take(here.batches(5, batch=4), 3), _take(batches, 3), strict=True)
    )
