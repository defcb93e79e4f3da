"""A mixture is one stream: shares, epochs of each source, equal on any hosts and after any stop."""

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import dataset
from jaxlm.data.batch import Tokens
from jaxlm.data.config import DataConfig
from jaxlm.data.loader import constant_schedule
from jaxlm.data.mixture import MixtureLoader
from jaxlm.data.mixture_config import MixtureWeights, Temperature

SEQUENCE, BATCH = 16, 8
LETTERS = {"web": "w", "code": "c", "books": "b"}
SIZES = {"web": 60, "code": 15, "books": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one letter for each source, of a number of rows that is not round."""
    folder = tmp_path_factory.mktemp("sources")
    for name, count in SIZES.items():
        (folder / name).mkdir()
        for number in range(count):
            text = LETTERS[name] * (30 + number % 7)
            (folder / name / f"{number}.txt").write_text(text + str(number))
    return folder


def _config(folder: Path, **settings: object) -> DataConfig:
    values: dict[str, object] = {
        "train": tuple(f"{name}={folder}/{name}/*.txt" for name in SIZES),
        "validation": (),
        "tokenizer": "bytes",
        "sequence": SEQUENCE,
    }
    return DataConfig(**(values | settings))  # type: ignore[arg-type]


def _opened(folder: Path, rows: int = 0, **settings: object) -> MixtureLoader:
    config = _config(folder, **settings)
    assert not list(config.problems())
    train = dataset.open_data(config, seed=3, rows=rows, root=folder / "cache").train
    assert isinstance(train, MixtureLoader)
    return train


@pytest.fixture(scope="module")
def mixture(folder: Path) -> MixtureLoader:
    weights = ("web=0.5", "code=0.3", "books=0.2")
    return _opened(folder, mixture=MixtureWeights(weights=weights))


def _take(batches: Iterator[Tokens], count: int) -> list[Tokens]:
    return list(itertools.islice(batches, count))


def _same(a: Tokens, b: Tokens) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _sources(batches: list[Tokens]) -> list[str]:
    """The source of each row, by the letters that it holds."""
    named = {ord(letter): name for name, letter in LETTERS.items()}
    ids = np.concatenate([batch.targets for batch in batches])
    offset = Counter(ids.ravel().tolist()).most_common(1)[0][0] - ord("w")
    return [
        Counter(named[i - offset] for i in row if i - offset in named).most_common(1)[0][0]
        for row in ids.tolist()
    ]


def test_rows_have_the_shares_of_the_config(mixture: MixtureLoader) -> None:
    shares = _sources(_take(mixture.batches(0, batch=BATCH), 100))
    assert Counter(shares) == {"web": 400, "code": 240, "books": 160}
    seen = mixture.seen(800)
    assert {name: each["read_rows"] for name, each in seen.items()} == Counter(shares)
    keys = mixture.keys(0, 800)
    assert [mixture.source(key) for key in keys] == shares


def test_each_source_has_shuffled_epochs_of_its_own(mixture: MixtureLoader) -> None:
    keys = mixture.keys(0, 800)
    for name, loader in zip(mixture.names, mixture.sources, strict=True):
        keys_of_source = [key for key in keys if mixture.source(key) == name]
        size = loader.plan.rows
        assert len(keys_of_source) > 1.5 * size, "the test must cross an epoch's edge"
        first, second = keys_of_source[:size], keys_of_source[size : 2 * size]
        assert len({key.row for key in first}) == size
        assert {key.epoch for key in first} == {0}
        assert {key.epoch for key in second} == {1}
        both = [key.row for key in first[: len(second)]], [key.row for key in second]
        assert both[0] != both[1]


LIVES = (
    (0, 1),
    (5, 4),
    (6, 2),
    (13, 8),
    (21, 1),
    (30, 0),
)  # from which batch on, on how many hosts


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", ["first_fit", "concat"])
def test_e2_a_mixture_of_three_resumed_on_other_numbers_of_hosts_is_the_same_stream(
    folder: Path, packing: str
) -> None:
    weights = ("web=0.5", "code=0.3", "books=0.2")
    opened = _opened(folder, mixture=MixtureWeights(weights=weights), packing=packing, sequence=96)
    unbroken = _take(opened.batches(0, batch=BATCH), LIVES[-1][0])
    assert {opened.source(key) for key in opened.keys(0, BATCH)} == {*LETTERS}
    assert max(batch.segments.max() for batch in unbroken) > 1, "rows hold several documents"
    parted = 0
    for (begin, hosts), (end, _) in itertools.pairwise(LIVES):
        share = BATCH // hosts
        # Opened again, as by a process that resumes.
        resumed = _opened(
            folder, mixture=MixtureWeights(weights=weights), packing=packing, sequence=96
        )
        parts = [
            _take(
                resumed.batches(begin, batch=BATCH, rows=slice(h * share, (h + 1) * share)),
                end - begin,
            )
            for h in range(hosts)
        ]
        for step, whole in enumerate(unbroken[begin:end]):
            read = jax.tree.map(lambda *x: np.concatenate(x), *(part[step] for part in parts))
            assert _same(whole, read)
            parted += hosts > 1
    assert parted == 1 + 7 + 8


def test_a_worker_process_has_the_same_rows(mixture: MixtureLoader) -> None:
    sent = pickle.loads(pickle.dumps(mixture))
    whole = slice(0, BATCH)
    assert _same(sent.at(5, batch=BATCH, rows=whole), mixture.at(5, batch=BATCH, rows=whole))


def test_a_far_step_is_read_at_once_and_its_documents_are_named(mixture: MixtureLoader) -> None:
    whole = slice(0, BATCH)
    batch = mixture.at(10**6, batch=BATCH, rows=whole)
    origins = mixture.origins(10**6, batch=BATCH)
    for name, files in zip(_sources([batch]), origins, strict=True):
        assert files
        assert all(f"/{name}/" in file for file, _ in files)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 1e6])
def test_temperature_weighs_by_size(folder: Path, temperature: float) -> None:
    mixture = _opened(folder, mixture=Temperature(temperature=temperature))
    sizes = np.array([loader.shards.manifest.tokens for loader in mixture.sources], float)
    expected = sizes ** (1 / temperature)
    seen = mixture.seen(10**6)
    assert [each["share"] for each in seen.values()] == pytest.approx(
        expected / expected.sum(), abs=1e-5
    )


def test_a_source_ends_at_its_maximum_epochs_with_a_message(folder: Path) -> None:
    weights = ("web=0.5", "code=0.3", "books=0.2")
    mixture = _opened(
        folder, mixture=MixtureWeights(weights=weights, epochs=("books=1.5", "code=2"))
    )
    rows = {
        name: loader.plan.rows for name, loader in zip(mixture.names, mixture.sources, strict=True)
    }
    seen = mixture.seen(2000)
    assert seen["books"]["read_rows"] == int(1.5 * rows["books"])
    assert seen["code"]["read_rows"] == 2 * rows["code"]
    assert sum(each["read_rows"] for each in seen.values()) == 2000
    web, code, books = mixture.describe(constant_schedule(BATCH, SEQUENCE), 250)
    assert "its maximum" not in web
    assert "2.00 epochs, its maximum: from step" in code
    assert "its maximum: from step" in books


def test_a_run_that_the_most_epochs_do_not_reach_is_refused(folder: Path) -> None:
    capped = Temperature(epochs=("web=1", "code=1", "books=1"))
    whole = _opened(folder, mixture=capped)
    rows = whole.plan.rows
    assert len(whole.keys(0, rows)) == rows
    with pytest.raises(ConfigError, match="maximum number of epochs"):
        whole.keys(rows - 1, rows + 1)
    with pytest.raises(ConfigError, match=f"the run takes {2 * rows} rows") as caught:
        _opened(folder, 2 * rows, mixture=capped)
    entries = caught.value.fix.partition("epochs=")[2].split(",")
    assert _opened(folder, 2 * rows, mixture=Temperature(epochs=tuple(entries)))


def test_less_than_a_row_of_a_source_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the run would read nothing of books") as caught:
        _opened(folder, mixture=Temperature(epochs=("books=0.001", "web=3")))
    entries = tuple(caught.value.fix.partition("epochs=")[2].split(","))
    read = _opened(folder, mixture=Temperature(epochs=entries)).seen(400)
    assert read["books"]["read_rows"] == 1


def test_a_share_is_held_out_of_each_source(folder: Path) -> None:
    data = dataset.open_data(_config(folder, validation=("40%",)), seed=0, root=folder / "cache")
    assert set(data.validation) == {"val_web", "val_code", "val_books"}
    held = sum(each.shards.documents for each in data.validation.values())
    assert data.train.shards.documents + held == sum(SIZES.values())


def test_a_file_in_two_sources_is_refused(folder: Path) -> None:
    (folder / "copy.txt").write_bytes((folder / "code/3.txt").read_bytes())
    sources = (f"web={folder}/web/*.txt", f"code={folder}/code/*.txt", f"more={folder}/copy.txt")
    with pytest.raises(DataError, match="is in two sources") as caught:
        dataset.open_data(_config(folder, train=sources), seed=0, root=folder / "cache")
    assert caught.value.where == "data.train (code) and data.train (more)"
    twice = ("a=stdlib:train", "b=stdlib:train")
    with pytest.raises(DataError, match="are in two sources"):
        dataset.open_data(_config(folder, train=twice), seed=0, root=folder / "cache")


def test_token_shards_and_text_may_be_mixed_and_give_the_same_rows(folder: Path) -> None:
    made = folder / "shards"
    written = dataset.tokenize(_config(folder), made, lambda _: None, lambda *_: None)
    assert set(written) == {f"train/{name}" for name in SIZES}
    stored = tuple(f"{name}={made}/train/{name}" for name in ("web", "code"))
    sources = (*stored, f"books={folder}/books/*.txt")
    whole = slice(0, BATCH)
    assert _same(
        _opened(folder, train=sources).at(7, batch=BATCH, rows=whole),
        _opened(folder).at(7, batch=BATCH, rows=whole),
    )


@pytest.mark.parametrize(
    ("settings", "why", "fix"),
    [
        ({"mixture": Temperature(epochs=("wbe=2",))}, "names no source", "epochs=web=2"),
        (
            {"mixture": MixtureWeights(weights=("web=0.5", "code=0.5"))},
            "books of data.train has no weight",
            "weights=web=0.3333,code=0.3333,books=0.3334",
        ),
        (
            {"mixture": MixtureWeights(weights=("web=0.5", "code=0.3", "boks=0.2"))},
            "'boks=0.2' names no source; there is web, code, books",
            "weights=web=0.5,code=0.3,books=0.2",
        ),
        (
            {"mixture": MixtureWeights(weights=("web=0.5", "code=0.3", "x=0.2"))},
            "'x=0.2' names no source",
            "weights=web=0.5,code=0.3,books=0.2",
        ),
        (
            {"mixture": MixtureWeights(weights=("web=0.5", "code=0.3", "web=0.2", "books=0"))},
            "web is named twice",
            "weights=",
        ),
        (
            {"mixture": MixtureWeights(weights=("web=half", "code=0.3", "books=0.2"))},
            "web: 'half' is not a share",
            "weights=web=0.3333,",
        ),
        ({"mixture": Temperature(epochs=("web=0",))}, "0 epochs", "epochs=web=1"),
        (
            {"mixture": Temperature(epochs=("web=-1",))},
            "not a number of at least 0",
            "epochs=web=1",
        ),
        (
            {"train": ("a.txt",), "mixture": Temperature(temperature=2)},
            "needs named sources",
            "jaxlm config explain data.train",
        ),
        ({"train": ("web=a.txt", "b.txt")}, "'b.txt' has no name", "train=web=a.txt,other=b.txt"),
        (
            {"validation": ("5%", "val_web=x.txt")},
            "two validation sets would have the name val_web",
            "5%",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_a_fix(
    settings: dict[str, object], why: str, fix: str, folder: Path
) -> None:
    (_, message, mended), *_ = _config(folder, **settings).problems()
    assert why in message
    assert fix in mended
