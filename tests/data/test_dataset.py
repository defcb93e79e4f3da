"""From a config to loaders: matching, splitting, caching and refusing files."""

import dataclasses
import gzip
import itertools
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from jaxlm.core.errors import ConfigError, DataError, InputMissing, JaxlmError, NotWritable
from jaxlm.data import baselines, dataset, long_text, parts, records, text_digest, writer
from jaxlm.data.config import DataConfig
from jaxlm.data.records import LeftOut
from tests import machine


@pytest.fixture
def texts(tmp_path: Path) -> str:
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(f"document {number}\n" * 30)
    return str(tmp_path / "*.txt")


def _config(
    train: str, validation: str | tuple[str, ...] = "10%", **settings: object
) -> DataConfig:
    entries = (validation,) if isinstance(validation, str) else validation
    return DataConfig(
        **(
            {"train": (train,), "validation": entries, "tokenizer": "bytes", "sequence": 32}
            | settings
        )
    )


def _open(
    config: DataConfig, root: Path, seed: int = 0, output: list[str] | None = None
) -> dataset.Data:
    say = [].append if output is None else output.append
    return dataset.open_data(config, seed=seed, root=root / "cache", log=say, warn=say)


def _stored(data: dataset.Data) -> tuple[bytes, bytes]:
    return baselines.stored_text(data.train.shards), baselines.stored_text(
        data.validation["val"].shards
    )


def test_a_share_of_the_documents_is_held_out_whole_and_nothing_is_lost(
    texts: str, tmp_path: Path
) -> None:
    data = _open(_config(texts, "20%"), tmp_path)
    train, held_out = (set(part.decode().splitlines()) for part in _stored(data))
    assert not train & held_out
    assert len(train | held_out) == 60
    assert 3 <= len(held_out) <= 25


def test_a_share_that_would_hold_out_none_of_a_few_documents_holds_out_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {n}|"}}\n' for n in range(6)))
    config, lines = _config(str(tmp_path / "a.jsonl"), "0.1%"), list[str]()
    stored = _stored(_open(config, tmp_path, output=lines))
    train, held_out = (set(part.split(b"|")[:-1]) for part in stored)
    assert (len(train), len(held_out), len(train | held_out)) == (5, 1, 6)
    assert any("holding out one document of data.train: 0.1%" in line for line in lines)
    (tmp_path / "a.jsonl").write_text('{"text": "the same"}\n' * 2)  # copies stay together
    with pytest.raises(DataError, match="no document"):
        _open(config, tmp_path)


def test_a_share_of_a_few_long_documents_holds_out_one(tmp_path: Path) -> None:
    books = [f"book {n} " + "words " * 500_000 for n in range(4)]
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    (train,), (held_out,) = parts.find_parts(_config(str(path), "1%"))
    sides = [[each.text for each in part.documents(LeftOut())] for part in (train, held_out)]
    assert list(map(len, sides)) == [3, 1]
    assert sorted(sides[0] + sides[1]) == sorted(books)


def test_a_tail_of_one_long_text_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {n} \u00e9\n" for n in range(500))
    (tmp_path / "a.txt").write_text(text)
    train, held_out = _stored(_open(_config(str(tmp_path / "a.txt"), "tail:10%"), tmp_path))
    cut = int(len(text) * 0.9)
    assert (train.decode(), held_out.decode()) == (text[:cut], text[cut:])


def test_several_validation_sets_have_their_names(texts: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.md").write_text(f"other {name}")
    entries = (f"first={tmp_path}/a.md", f"{tmp_path}/b.md", "5%")
    with pytest.raises(JaxlmError):
        _open(_config(texts, entries), tmp_path)
    data = _open(_config(texts, (*entries[:2], "held=20%")), tmp_path)
    assert set(data.validation) == {"first", "val", "held"}


def test_globs_of_one_name_are_one_set(texts: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.md").write_text(f"other {name}")
    data = _open(_config(texts, (f"{tmp_path}/a.md", f"{tmp_path}/b.md")), tmp_path)
    assert _stored(data)[1] == b"other aother b"


def test_a_second_opening_reads_the_cache_and_is_the_same(texts: str, tmp_path: Path) -> None:
    config = _config(texts, tokenizer="sentencepiece:512")
    output: list[str] = []
    first = _open(config, tmp_path, output=output)
    assert any("training the tokenizer" in line for line in output)
    repeated: list[str] = []
    begun = time.perf_counter()
    second = _open(config, tmp_path, output=repeated)
    machine.require_clock(time.perf_counter() - begun, 2)
    assert repeated == []
    assert second.fingerprint == first.fingerprint
    json.dumps(first.fingerprint)


def test_a_text_is_hashed_once_and_again_only_if_it_changed(
    texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with equal size and modification time, and for a change just before the hashing."""
    config = _config(texts, "20%", tokenizer="sentencepiece:512")
    hashed: Counter[str] = Counter()
    whole = text_digest._digest

    def counted(path: str, moved: Any) -> str:
        hashed[path] += 1
        return whole(path, moved)

    def opened() -> list[str]:
        hashed.clear()
        output: list[str] = []
        _open(config, tmp_path, output=output)
        return output

    monkeypatch.setattr(text_digest, "_digest", counted)
    files = [str(path) for path in tmp_path.glob("*.txt")]
    monkeypatch.setattr(text_digest, "SETTLED_SECONDS", 3600)
    opened()
    assert hashed == dict.fromkeys(files, 1)
    assert opened() == []
    assert hashed == dict.fromkeys(files, 1), "all of them changed within this hour"
    monkeypatch.setattr(text_digest, "SETTLED_SECONDS", 0)
    assert opened() == []
    assert hashed == dict.fromkeys(files, 1)
    assert opened() == []
    assert hashed == {}, "a start, or the processes of a run that take their turn after the first"

    path = tmp_path / "07.txt"
    before = path.stat()
    path.write_text("x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert any("tokenizing train" in line for line in opened())
    assert hashed == {str(path): 1}
    (digest_file,) = (tmp_path / "cache/digests").glob("*.json")
    digest_file.write_text(digest_file.read_text()[:-9])
    assert opened() == []
    assert hashed == dict.fromkeys(files, 1), "the note of the digests was damaged"


class Counted:
    """A file that is read, and how many bytes of it were."""

    def __init__(self, file: Any):
        self.file, self.size = file, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, size: int = -1) -> bytes:
        return self._counted(self.file.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._counted(self.file.readline(size))

    def _counted(self, content: bytes) -> bytes:
        self.size += len(content)
        return content


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """The files of text that were opened."""
    files: list[Counted] = []
    whole = records.unpacked

    def unpacked(file: Any, name: str) -> Any:
        files.append(Counted(whole(file, name)))
        return files[-1]

    monkeypatch.setattr(records, "unpacked", unpacked)
    return files


def test_of_many_files_the_first_thousand_records_are_looked_at(
    tmp_path: Path, read: list[Counted]
) -> None:
    for number in range(1500):
        (tmp_path / f"{number:04d}.jsonl").write_text('{"text": "good"}\n' * 3)
    parts.find_parts(_config(f"{tmp_path}/*.jsonl", ()))
    assert len(read) == 334
    (tmp_path / "0333.jsonl").write_text('{"body": "not under text"}\n')
    with pytest.raises(DataError, match="no text under 'text'"):
        parts.find_parts(_config(f"{tmp_path}/*.jsonl", ()))


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_bounded_number_of_bytes_of_large_files_is_probed(
    tmp_path: Path, read: list[Counted], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(parts, "PROBED_BYTES", 2**20)
    for number, name in enumerate("abc"):
        with open(tmp_path / f"{name}.{ending}", "wb") as file:
            file.truncate(2**27 + number)  # of zeros, which take no room
    config = dataclasses.replace(
        _config(""),
        train=(f"one={tmp_path}/a.{ending}", f"other={tmp_path}/b.{ending}"),
        validation=(f"{tmp_path}/c.{ending}",),
    )
    parts.find_parts(config)
    assert len(read) == 3
    assert 2**20 - 3 <= sum(file.size for file in read) <= 2**20


def test_files_of_one_size_are_read_whole_only_where_they_begin_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    whole = parts.disk.sha256
    monkeypatch.setattr(
        parts.disk, "sha256", lambda path: (hashed.append(path.name), whole(path))[1]
    )
    for name, text in {"a.txt": "one", "b.txt": "two", "c.md": "six", "d.md": "ten"}.items():
        (tmp_path / name).write_text(text)
    config = _config(f"{tmp_path}/*.txt", f"{tmp_path}/*.md")
    parts.find_parts(config)
    assert hashed == []
    (tmp_path / "d.md").write_text("one")
    with pytest.raises(DataError, match="both trained on and validated on"):
        parts.find_parts(config)
    assert hashed == ["a.txt", "d.md"]


def test_the_cache_is_private(texts: str, tmp_path: Path) -> None:
    _open(_config(texts), tmp_path)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "cache").rglob(".*")), "locks and partial folders are gone"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"sequence": 16},
        {"packing": "first_fit"},
        {"tokenizer": "characters"},
        {"validation": ("20%",)},
    ],
)
def test_what_changes_the_rows_changes_the_fingerprint(
    texts: str, tmp_path: Path, change: dict[str, object]
) -> None:
    seed = int(str(change.pop("seed", 0)))
    assert (
        _open(_config(texts), tmp_path).fingerprint
        != _open(_config(texts, **change), tmp_path, seed).fingerprint
    )


def test_damaged_cached_tokens_are_rebuilt_with_a_warning(texts: str, tmp_path: Path) -> None:
    _open(_config(texts), tmp_path)
    for path in (tmp_path / "cache" / "shards").rglob("tokens-*"):
        path.write_bytes(path.read_bytes()[:-2])
    output: list[str] = []
    assert len(_stored(_open(_config(texts), tmp_path, output=output))[0]) > 1000
    assert sum("rebuilding" in line for line in output) == 2


def test_damaged_cached_tokens_that_another_process_made_again_are_left(
    texts: str, tmp_path: Path
) -> None:
    """Two processes that find them damaged must not remove what the other has made."""
    _open(_config(texts), tmp_path)
    shards = tmp_path / "cache" / "shards"
    for path in shards.rglob("tokens-*"):
        path.write_bytes(path.read_bytes()[:-2])
    made: list[Path] = []

    def another(line: str) -> None:
        if "rebuilding" in line and not made:
            made.append(tmp_path)
            _open(_config(texts), tmp_path)
            made[:] = shards.iterdir()
            for folder in made:
                (folder / "of the other").touch()

    config = _config(texts)
    dataset.open_data(config, seed=0, root=tmp_path / "cache", warn=another)
    assert len(made) == 2
    assert all((folder / "of the other").exists() for folder in made)


def test_a_file_on_both_sides_is_refused_by_name(texts: str, tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / "07.txt")
    with pytest.raises(DataError, match="both trained on and validated on") as caught:
        _open(_config(texts, f"{tmp_path}/link.md"), tmp_path)
    assert "07.txt" in caught.value.why


@pytest.mark.parametrize(
    ("content", "error", "where"),
    [
        (b"caf\xe9", DataError, "bad.md, byte 3"),
        (b"", DataError, ""),
        (None, InputMissing, "data.validation"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:512"])
def test_bad_validation_is_refused_before_anything_is_made(
    texts: str,
    tmp_path: Path,
    content: bytes | None,
    error: type[JaxlmError],
    where: str,
    tokenizer: str,
) -> None:
    if content is not None:
        (tmp_path / "bad.md").write_bytes(content)
    with pytest.raises(error) as caught:
        _open(_config(texts, f"{tmp_path}/bad.md", tokenizer=tokenizer), tmp_path)
    assert where in caught.value.where
    assert not list((tmp_path / "cache").glob("*"))


def test_characters_missing_in_training_are_reported(texts: str, tmp_path: Path) -> None:
    (tmp_path / "v.md").write_text("document \u00e9\u00e9")
    output: list[str] = []
    _open(_config(texts, f"{tmp_path}/v.md", tokenizer="characters"), tmp_path, output=output)
    assert any(line.startswith("2 characters of val") for line in output)


def test_token_shards_are_read_with_their_own_tokenizer(texts: str, tmp_path: Path) -> None:
    written = dataset.tokenize(
        _config(texts, tokenizer="sentencepiece:512"),
        tmp_path / "out",
        lambda _: None,
        lambda what, done, total: None,
    )
    folders = {name: str(part.folder) for name, part in written.items()}
    data = _open(_config(folders["train"], folders["val"], tokenizer="sentencepiece:512"), tmp_path)
    assert data.tokenizer.size == 512
    assert (
        data.fingerprint["train"]
        == _open(_config(texts, tokenizer="sentencepiece:512"), tmp_path).fingerprint["train"]
    )
    with pytest.raises(ConfigError, match="not the one that made") as caught:
        _open(_config(folders["train"], folders["val"], tokenizer="bytes"), tmp_path)
    fixed = caught.value.fix.removeprefix("--config.data.tokenizer=")
    assert (
        _open(_config(folders["train"], folders["val"], tokenizer=fixed), tmp_path).tokenizer.size
        == 512
    )
    with pytest.raises(ConfigError, match="cannot hold out a share of token shards"):
        _open(_config(folders["train"], "5%", tokenizer=fixed), tmp_path)
    with pytest.raises(DataError, match="exists"):
        dataset.tokenize(
            _config(texts), tmp_path / "out", lambda _: None, lambda what, done, total: None
        )


def test_folders_of_token_shards_are_matched_by_glob_and_read_as_one(tmp_path: Path) -> None:
    made = {}
    for name, tokenizer in (("a", "bytes"), ("b", "bytes"), ("other", "characters")):
        for number in range(30):
            (tmp_path / f"{number}.{name}").write_text(f"{name} {number} " * (number % 5 + 1))
        written = dataset.tokenize(
            _config(f"{tmp_path}/*.{name}", (), tokenizer=tokenizer),
            tmp_path / "out" / name,
            lambda _: None,
            lambda what, done, total: None,
        )
        made[name] = written["train"]
    both = _config(f"{tmp_path}/out/[ab]/train", ())
    read = _open(both, tmp_path).train.shards
    assert baselines.stored_text(read) == b"".join(
        baselines.stored_text(made[name]) for name in "ab"
    )
    assert (read.documents, read.manifest.tokens) == (
        60,
        sum(made[n].manifest.tokens for n in "ab"),
    )
    lengths = np.concatenate([made[name].lengths(0, 30) for name in "ab"])
    for start, stop in ((0, 60), (3, 20), (29, 31), (30, 30), (44, 60)):
        assert np.array_equal(read.lengths(start, stop), lengths[start:stop])
    assert [read.origin(n) for n in (29, 30)] == [made["a"].origin(29), made["b"].origin(0)]

    def refused(*train: str, validation: tuple[str, ...] = ()) -> JaxlmError:
        with pytest.raises(JaxlmError) as caught:
            patterns = tuple(f"{tmp_path}/{pattern}" for pattern in train)
            _open(DataConfig(train=patterns, validation=validation, tokenizer="bytes"), tmp_path)
        return caught.value

    assert "different tokenizers" in refused("out/*/train").what
    assert "out/other" in refused("out/*/train").where
    for mix_loaders in (
        ("out/a/train", "*.b"),
        ("*.b", "out/a/train"),
        ("out/a/tr*", "out/a/train/f*"),
    ):
        assert "text and token shards" in refused(*mix_loaders).what
    assert "lists a token shard twice" in refused("out/a/train", "out/[ab]/train").what
    assert "lists a file twice" in refused("*.a", "*.a").what
    error = refused("out/[ab]/train", validation=(f"{tmp_path}/out/b/*",))
    assert "both trained on and validated on" in error.what
    assert "out/b/train" in error.why


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_progress_goes_from_nothing_to_the_size_of_the_files(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PROGRESS_BYTES", 2000)
    monkeypatch.setattr(long_text, "BATCH", 2000)
    draw = random.Random(0)
    for number in range(5):
        texts = ["".join(draw.choices("abcdefgh ", k=500)) for _ in range(200)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path = tmp_path / f"{number}{ending}"
        if ending == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        else:
            pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
            path.write_bytes(pack(lines))
    progress: list[tuple[str, int, int]] = []
    dataset.open_data(
        _config(f"{tmp_path}/*{ending}", ()),
        seed=0,
        root=tmp_path / "cache",
        progress=lambda what, done, total: progress.append((what, done, total)),
    )
    size = sum(path.stat().st_size for path in tmp_path.glob(f"*{ending}"))
    assert {total for *_, total in progress} == {size}
    assert [what for what, _ in itertools.groupby(progress, lambda progress: progress[0])] == [
        "hashing raw text",
        "tokenizing train",
    ]
    for what, least in (("hashing raw text", 1), ("tokenizing train", 5)):
        places = [done for name, done, _ in progress if name == what]
        assert places == sorted(places)
        assert places[-1] == size
        assert len(set(places)) >= least


def test_a_cache_that_cannot_be_written_is_refused(texts: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NotWritable):
        _open(_config(texts), tmp_path)
