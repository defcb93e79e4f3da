"""Batches that grow in rows and in length read one stream of rows, on any hosts from any step."""

import itertools

import jax
import numpy as np
import pytest

from jaxlm.core import batch_schedule as paces
from jaxlm.data import packing, writer
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import Loader, cut_rows
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.tokenizer import Bytes

SEQUENCE = 16
PACE = paces.build(
    total=40, batch=8, sequence=SEQUENCE, batches=("2@3", "4@6"), lengths=("4@2", "8@5")
)


@pytest.fixture(scope="module", params=["concat", "first_fit"])
def loader(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Loader:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(1)
    documents = [
        Document(chr(33 + n) * int(size), "a.txt", n)
        for n, size in enumerate(rng.integers(1, 60, 60))
    ]
    stored = writer.write(folder / "shards", documents, Bytes(), LeftOut())
    plan = packing.open_plan(stored, SEQUENCE, request.param, 5, folder / "plan")
    return Loader(stored, plan, SEQUENCE, 5, prefetch=2)


def test_cut_rows_are_what_packing_to_that_length_would_give() -> None:
    fields = {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0],
        "targets": [2, 3, 4, 9, 6, 7, 8, 9, 1, 0, 0, 0],
        "weights": [1.0] * 9 + [0.0] * 3,
        "segments": [1, 1, 2, 2, 2, 2, 3, 3, 3, 0, 0, 0],
        "positions": [0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 0, 0],
    }
    arrays = {name: np.array([value]) for name, value in fields.items()}
    row = Tokens(**arrays)  # type: ignore[arg-type]
    cut = cut_rows(row, 4)
    assert np.array_equal(cut.tokens, np.reshape(fields["tokens"], (3, 4)))
    assert np.array_equal(cut.weights, np.reshape(fields["weights"], (3, 4)))
    assert cut.segments.tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [1, 0, 0, 0]]
    assert cut.positions.tolist() == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert {field.dtype for field in cut[:2]} == {row.tokens.dtype}


def test_the_stages_read_one_stream_and_lose_no_token(loader: Loader) -> None:
    batches = list(itertools.islice(loader.batches(0, batch=PACE), 10))
    shapes = [batch.tokens.shape for batch in batches]
    assert shapes == [(8, 4), (8, 4), (4, 8), (8, 8), (8, 8), (4, 16), *[(8, 16)] * 4]
    flat = np.concatenate([batch.targets.ravel() for batch in batches])
    whole = loader.at(0, batch=PACE.rows(10), rows=slice(0, PACE.rows(10)))
    assert np.array_equal(flat, np.asarray(whole.targets).ravel())
    for batch in batches:
        segments = np.asarray(batch.segments)
        assert (segments[:, 0] <= 1).all()
        steps = np.diff(segments, axis=1)
        starts = np.asarray(batch.positions)[:, 1:][steps > 0]
        assert (starts == 0).all(), "each document of a row begins at 0"


@pytest.mark.few(3)
@pytest.mark.parametrize("start", [1, 2, 4, 5, 7])
def test_a_resume_in_any_stage_on_other_hosts_reads_the_same(loader: Loader, start: int) -> None:
    unbroken = list(itertools.islice(loader.batches(0, batch=PACE), 9))[start:]
    sizes = [stage.rows for stage in PACE.phases]
    parts = [
        loader.batches(
            start,
            batch=PACE,
            rows={size: slice(host * size // 2, (host + 1) * size // 2) for size in sizes},
        )
        for host in range(2)
    ]
    for whole, *read in zip(unbroken, *parts, strict=False):
        joined = jax.tree.map(lambda *x: np.concatenate(x), *read)
        assert all(np.array_equal(a, b) for a, b in zip(whole, joined, strict=True))
