"""Broken, moved, doubled, cut or missing data is reported and not trained on (E1 to E12, S5)."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import dataset, documents, packing, records, tokenizer_file, train_tokenizer, writer
from jaxlm.data.batch import Tokens
from jaxlm.data.blocks import BLOCK
from jaxlm.data.config import DataConfig
from jaxlm.data.loader import Loader
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.shards import TokenShards
from jaxlm.data.tokenizer import Bytes
from tests import machine
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

Recorder = Callable[[str, object], None]
BATCH, SEQUENCE = 8, 16
ROOT = Path(__file__).parents[2]


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Sixty documents, and the glob that finds them."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / f"texts/{number:02d}.txt").write_text(f"document {number}, " * (number % 9 + 1))
    return str(tmp_path / "texts/*.txt")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenShards:
    """Several shards of several blocks each."""
    monkeypatch.setattr(writer, "SHARD_TOKENS", 6000)
    draw = random.Random(0)
    made = [
        Document(f"{n}:" + chr(97 + n % 26) * draw.randint(1, 900), f"{n % 3}.txt", n // 3)
        for n in range(60)
    ]
    return writer.write(tmp_path / "shards", made, Bytes(), LeftOut())


def opened(root: Path, train: str, seed: int = 1, **settings: object) -> dataset.Data:
    values = {"train": (train,), "validation": ("10%",), "tokenizer": "bytes", "sequence": SEQUENCE}
    return dataset.open_data(DataConfig(**(values | settings)), seed=seed, root=root)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    """The exit code of a verb, and its JSON output."""
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def are_same(a: Tokens, b: Tokens) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def joined(parts: list[Tokens]) -> Tokens:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def read_by(loader: Loader, hosts: int, start: int, count: int) -> list[Tokens]:
    """Global batches, put together from what each host reads of them."""
    share = BATCH // hosts
    streams = [
        loader.batches(start, batch=BATCH, rows=slice(h * share, (h + 1) * share))
        for h in range(hosts)
    ]
    return [joined([next(stream) for stream in streams]) for _ in range(count)]


# E1, E2: who reads what


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["concat", "first_fit"])
def test_e1_any_number_of_hosts_reads_the_same_batches_row_by_row(
    texts: str, tmp_path: Path, kind: str, record_property: Recorder
) -> None:
    loader = opened(tmp_path / "cache", texts, packing=kind).train
    count = loader.plan.rows // BATCH + 3
    whole = read_by(loader, 1, 0, count)
    assert count * BATCH > loader.plan.rows, "an epoch's edge must be crossed"
    assert len({batch.tokens.tobytes() for batch in whole}) == count
    for hosts in (2, 4, 8):
        assert all(map(are_same, whole, read_by(loader, hosts, 0, count)))
    record_property("E1", f"{kind} {count} batches of 1, 2, 4, 8 hosts the same")


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["concat", "first_fit"])
def test_e2_another_number_of_hosts_goes_on_with_the_same_stream(
    texts: str, tmp_path: Path, kind: str
) -> None:
    unbroken = read_by(opened(tmp_path / "cache", texts, packing=kind).train, 1, 0, 40)
    resumed, cut = [], 0
    for hosts, steps in ((2, 7), (8, 1), (1, 12), (4, 20)):
        loader = opened(tmp_path / "cache", texts, packing=kind).train
        step = len(resumed)
        resumed += read_by(loader, hosts, step, steps)
        first = loader.at(step, batch=BATCH, rows=slice(0, BATCH))
        cut += int((first.tokens[:, 0] != Bytes.before[0]).sum())
    assert cut > 0, "a document must span rows where a run resumes"
    assert all(map(are_same, unbroken, resumed))


# E3: the data that a run reports as read


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"seed": 2}, {"seed"}),
        ({"sequence": 8}, {"sequence"}),
        ({"packing": "first_fit"}, {"packing"}),
        ({"tokenizer": "characters"}, {"tokenizer", "train", "validation.val"}),
        (
            {"validation": ("30%",)},
            {"train", "train.documents", "train.tokens"}
            | {"validation.val", "validation.val.documents", "validation.val.tokens"},
        ),
        ({"text": "00.txt"}, {"train"}),
        ({"text": "held.md"}, {"validation.held"}),
    ],
)
def test_e3_a_change_of_data_shows_in_its_own_fields_of_the_fingerprint(
    texts: str, tmp_path: Path, change: dict, changed: set[str]
) -> None:
    (tmp_path / "held.md").write_text("held out, apart")
    held = {"validation": ("10%",)}
    if change.get("text") == "held.md":
        held = {"validation": (f"held={tmp_path}/held.md",)}
    before = opened(tmp_path / "cache", texts, **held).fingerprint
    if "text" in change:
        path = next(p for p in tmp_path.rglob("*") if p.name == change["text"])
        path.write_text(path.read_text()[::-1])
        change = {}
    after = opened(tmp_path / "cache", texts, **(held | change)).fingerprint
    assert {name for name in before | after if before.get(name) != after.get(name)} == changed
    assert after == json.loads(json.dumps(after))
    assert after == opened(tmp_path / "other cache", texts, **(held | change)).fingerprint


# E4: broken documents

BROKEN = {
    records.NOT_JSON: [b'{"text": "cut', b"[" * 100_000, b'{"text": "a"} {"text": "b"}'],
    records.NOT_UTF8: [b'{"text": "caf\xe9"}', b'{"text": "\xed\xa0\x80"}'],
    records.NO_TEXT: [b'{"content": "words"}', b"[1, 2]", b"null", b"12"],
    records.OTHER_TYPE: [b'{"text": 3}', b'{"text": null}', b'{"text": ["a"]}'],
    records.EMPTY: [b'{"text": ""}'] * 30,
    records.BLANK: [b'{"text": "  "}', '{"text": "\\n\\t\u3000\u00a0"}'.encode()] * 10,
    records.SURROGATE: [b'{"text": "a\\ud800b"}', b'{"text": "\\udc00\\ud83d"}'],
    records.NUL: [b'{"text": "a\\u0000b"}'],
}


def write_records(path: Path, broken: list[bytes], good: int) -> None:
    lines = [json.dumps({"text": f"good {n}"}).encode() for n in range(good)]
    draw = random.Random(1)
    for line in broken:
        lines.insert(draw.randint(good // 2, len(lines)), line)
    path.write_bytes(records.BYTE_ORDER_MARK + b"\n".join(lines) + b"\n")


def test_e4_documents_of_every_broken_kind_are_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    write_records(tmp_path / "a.jsonl", list(itertools.chain(*BROKEN.values())), 15_000)
    words = [f"--config.data.train={tmp_path}/a.jsonl", "--config.data.validation=()"]
    settings = ["--config.data.tokenizer=bytes", "--config.data.sequence=64"]
    assert main(["data", "stats", "--json", *words, *settings]) == 0
    shown = capsys.readouterr()
    expected = {reason: len(lines) for reason, lines in BROKEN.items()} | {records.MARK: 1}
    part = json.loads(shown.out)["parts"]["train"]
    assert part["left_out"] == expected
    assert part["documents"] == 15_000 + sum(
        expected[reason] for reason in (records.SURROGATE, records.NUL)
    )
    for reason, count in expected.items():
        assert f"{count} {reason}" in shown.err
    folder = next((tmp_path / "cache/shards").iterdir())
    assert json.loads((folder / "manifest.json").read_text())["left_out"] == expected
    # One more than 0.1 % of them, and the first that was met is named.
    dropped = sum(len(BROKEN[reason]) for reason in list(BROKEN)[:4])
    write_records(tmp_path / "a.jsonl", list(itertools.chain(*BROKEN.values())), dropped * 900)
    code, output = answer(capsys, "data", "stats", *words, *settings)
    assert code == 65
    assert f"{tmp_path}/a.jsonl" in output["error"]["where"]
    counted = re.search(r"(\d+) of the (\d+) records so far", output["error"]["why"])
    assert counted
    assert int(counted[1]) > 0.001 * int(counted[2])
    assert "data.max_dropped = 0.001" in output["error"]["why"]


@pytest.mark.parametrize("reason", list(BROKEN)[:4])
def test_e4_too_many_of_one_kind_end_with_the_file_and_the_record(
    tmp_path: Path, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    good = [b'{"text": "good"}'] * 900
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good, BROKEN[reason][0]]))
    words = ["data", "stats", f"--config.data.train={tmp_path}/a.jsonl"]
    words += ["--config.data.validation=()", "--config.data.tokenizer=bytes"]
    code, output = answer(capsys, *words)
    assert code == 65
    assert output["error"]["where"].startswith(f"{tmp_path}/a.jsonl, line 901")
    code, output = answer(capsys, *words, "--config.data.max_dropped=0.01")
    assert (code, output["parts"]["train"]["left_out"]) == (0, {reason: 1})


def test_e4_a_record_without_the_text_key_is_refused_early_and_counted_later(
    tmp_path: Path,
) -> None:
    for place, is_refused in ((0, True), (999, True), (1000, False), (1499, False)):
        lines = ['{"text": "good"}\n'] * 1500
        lines[place] = '{"body": "good"}\n'
        (tmp_path / "b.jsonl").write_text("".join(lines[200:]))
        (tmp_path / "a.jsonl").write_text("".join(lines[:200]))
        corpus = documents.Corpus.find((f"{tmp_path}/*.jsonl",), "text", "data.train")
        counts = LeftOut()
        if is_refused:
            with pytest.raises(DataError, match="no text under 'text'"):
                list(corpus.documents(counts, records.ReadBudget(documents.PROBED_RECORDS, 2**20)))
        else:
            assert sum(1 for _ in corpus.documents(counts)) == 1499
            assert counts == {records.NO_TEXT: 1}


def test_e4_files_that_are_not_utf8_are_counted_like_records(tmp_path: Path) -> None:
    for number in range(1100):
        (tmp_path / f"{number:04d}.txt").write_text("good")
    (tmp_path / "0700.txt").write_bytes(b"caf\xe9")
    counts = LeftOut()
    corpus = documents.Corpus.find((f"{tmp_path}/*.txt",), "text", "data.train")
    assert sum(1 for _ in corpus.documents(counts)) == 1099
    assert counts == {records.NOT_UTF8: 1}
    (tmp_path / "0800.txt").write_bytes(b"\xff\xfeu\0t\0f\0")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        list(corpus.documents(LeftOut()))
    assert caught.value.where == f"{tmp_path}/0700.txt, byte 3"
    assert "2 of the 801 records so far" in caught.value.why


OPEN = """
import sys
from pathlib import Path
from jaxlm.data import dataset
from jaxlm.data.config import DataConfig
config = DataConfig(train=(sys.argv[1],), validation=(), tokenizer=sys.argv[2], sequence=256)
train = dataset.open_data(config, seed=0, root=Path(sys.argv[3])).train.shards
highest = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(int(highest) * 1024, train.documents, train.manifest.bytes)
"""


def open_apart(path: Path, kind: str, root: Path) -> tuple[harness.Took, int, int, int]:
    """Its time, highest memory, documents and bytes, when a fresh process opens a file."""
    with harness.timing() as took:
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(path), kind, str(root)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    highest, count, size = map(int, done.stdout.split())
    return took, highest, count, size


def trained_tokenizer(folder: Path) -> str:
    path = folder / "trained.model"
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(500)]
    prose = " ".join(draw.choices(words, k=4000))
    path.write_bytes(train_tokenizer.train("sentencepiece:600", iter([prose])).serialize())
    return str(path)


SIZE = 50_000_000
LONG = {
    "lines.txt": lambda: ("a line of words and 12345 numbers\n" * (SIZE // 33))[:SIZE],
    "emoji.txt": lambda: "\U0001f600" * (SIZE // 4),
    "lines.jsonl": lambda: json.dumps({"text": "words and\nnumbers " * (SIZE // 18)}),
    # The worst: Python widens such a text twice while it reads it, and it takes four bytes a
    # character in the end.
    "escapes.jsonl": lambda: json.dumps(
        {"text": ("words and numbers " * 6 + "\u6f22") * (SIZE // 112) + "\U0001f600"}
    ),
}


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The memory of a process that opens next to nothing: that is not a document's."""
    folder = tmp_path_factory.mktemp("idle")
    (folder / "a.txt").write_text("a few words")
    return open_apart(folder / "a.txt", "bytes", folder / "cache")[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lines.jsonl"])
def test_e4_a_document_of_50_mb_takes_seconds_and_seven_times_its_memory(
    tmp_path: Path, name: str, idle: int, record_property: Recorder
) -> None:
    path = tmp_path / name
    path.write_text(LONG[name](), encoding="utf-8")
    took, highest, count, size = open_apart(path, "bytes", tmp_path / "cache")
    assert (count, size > 0.97 * SIZE) == (1, True)
    record_property("E4", f"{name} {took}, {(highest - idle) / SIZE:.1f} times its size")
    took.require(30)
    assert highest - idle <= 7 * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_e4_a_document_of_50_mb_goes_through_a_trained_tokenizer(
    tmp_path: Path, name: str, idle: int, record_property: Recorder
) -> None:
    path = tmp_path / name
    path.write_text(LONG[name](), encoding="utf-8")
    kind = trained_tokenizer(tmp_path)
    took, highest, count, size = open_apart(path, kind, tmp_path / "cache")
    assert (count, size > 0.97 * SIZE) == (1, True)
    record_property("E4", f"{name} {took}, {(highest - idle) / SIZE:.1f} times its size")
    took.require(30)
    assert highest - idle <= 7 * SIZE


@pytest.mark.few(2)
@pytest.mark.parametrize("character", ["a", "\u6f22", "\0", "\u2581"])
def test_e4_a_million_characters_with_no_break_do_not_hang(
    tmp_path: Path, character: str, record_property: Recorder
) -> None:
    text = character * 1_000_000
    encoder = tokenizer_file.read(trained_tokenizer(tmp_path))
    with harness.timing() as took:
        both = [Document(text, "a.txt", 0), Document("b", "b.txt", 0)]
        made = writer.write(tmp_path / "s", both, encoder, LeftOut())
    record_property("E4", f"a million of {character!a} {took}")
    took.require(10)
    length = int(made.lengths(0, 1)[0])
    assert encoder.decode(made.read(0, 1, length - 1).tolist()) == text


# E5, E6: broken shards


def harms(path: Path, neighbor: Path, draw: random.Random) -> dict[str, bytes | None]:
    """Damaged contents of a file by name; None stands for its removal."""
    good = path.read_bytes()
    contents: dict[str, bytes | None] = {
        "removed": None,
        "empty": b"",
        "half": good[: len(good) // 2],
        "one byte short": good[:-1],
        "one byte more": good + b"\0",
        "garbage": draw.randbytes(len(good)),
        "zeros": bytes(len(good)),
        "its neighbor": neighbor.read_bytes(),
    }
    for number in range(4):
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        contents[f"flip {number}"] = bytes(bad)
    return {name: content for name, content in contents.items() if content != good}


def read_everything(folder: Path) -> None:
    """Opens shards and reads every id and origin, as a run does."""
    whole = TokenShards.open(folder)
    lengths = whole.lengths(0, whole.documents)
    for number in range(whole.documents):
        whole.read(number, 0, int(lengths[number]))
        whole.origin(number)
    assert whole.tokenizer.size


def test_e5_every_harm_to_every_file_of_shards_is_found_and_named(
    stored: TokenShards, record_property: Recorder
) -> None:
    draw = random.Random(3)
    files = sorted(stored.folder.iterdir())
    assert len(stored.manifest.shards) >= 4
    tried, missed, unnamed = Counter[str](), [], []
    for path, neighbor in zip(files, files[1:] + files[:1], strict=True):
        good = path.read_bytes()
        for name, content in harms(path, neighbor, draw).items():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            tried[name.split()[0]] += 1
            try:
                read_everything(stored.folder)
                missed.append((path.name, name))
            except (DataError, InputMissing) as error:
                if path.name not in error.where:
                    unnamed.append((path.name, name, error.where))
            path.write_bytes(good)
    assert tried["flip"] >= 60
    record_property("E5", f"{tried.total() - len(missed)} of {tried.total()} harms found")
    assert missed == []
    assert unnamed == []
    read_everything(stored.folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tokens", "documents"])
def test_e5_damage_names_the_record_that_could_not_be_read(stored: TokenShards, name: str) -> None:
    path = stored.folder / f"{name}-00002.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_everything(stored.folder)
    where = caught.value.where
    assert where.startswith(f"{path}, document ")
    if name == "tokens":
        assert ".txt)" in where
    with pytest.raises(DataError) as checked:
        TokenShards.open(stored.folder).verify()
    assert checked.value.where == str(path)


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("harm", ["cut", "removed", "replaced", "flipped"])
def test_e5_a_shard_that_is_harmed_while_it_is_read_ends_the_stream(
    stored: TokenShards, tmp_path: Path, harm: str, workers: int
) -> None:
    plan = packing.open_plan(stored, SEQUENCE, "concat", 0, tmp_path / "plan")
    loader = Loader(stored, plan, SEQUENCE, 0, workers=workers, prefetch=2)
    stream = loader.batches(0, batch=BATCH)
    for _ in range(3):
        next(stream)
    every = [*stored.folder.glob("tokens-*.bin")]
    assert len(every) >= 1
    for path in every:
        content = path.read_bytes()
        if harm == "cut":
            os.truncate(path, 100)
        elif harm == "flipped":
            with open(path, "r+b") as file:
                file.write(bytes(byte ^ 1 for byte in content))
        else:
            path.unlink()
            if harm == "replaced":
                path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        for _ in range(loader.plan.rows // BATCH):
            next(stream)
    assert "tokens-0" in caught.value.where
    assert "document " in caught.value.where


def flipped(path: Path, at: float) -> None:
    """One bit of a file, at this share of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 16
    path.write_bytes(content)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_e5_under_skip_what_cannot_be_read_weighs_nothing_and_each_piece_is_told_once(
    stored: TokenShards, tmp_path: Path, workers: int
) -> None:
    plan = packing.open_plan(stored, SEQUENCE, "concat", 0, tmp_path / "plan")
    loader = Loader(stored, plan, SEQUENCE, 0, workers=workers, prefetch=2, max_lost=0.9)
    count = 2 * plan.rows // BATCH  # about two epochs
    notes: list[str] = []
    before = loader.batches(0, batch=BATCH, warn=notes.append)
    whole = [next(before) for _ in range(count)]
    before.close()  # type: ignore[attr-defined]
    assert notes == []

    flipped(stored.folder / "tokens-00001.bin", 0.5)
    flipped(stored.folder / "tokens-00003.bin", 0.1)
    harmed = loader.batches(0, batch=BATCH, warn=notes.append)
    batches = [next(harmed) for _ in range(count)]
    harmed.close()  # type: ignore[attr-defined]
    lost = 0
    for ours, theirs in zip(batches, whole, strict=True):
        is_lost = ours.weights != theirs.weights
        lost += int(is_lost.sum())
        assert not ours.weights[is_lost].any()
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            np.testing.assert_array_equal(a[~is_lost], b[~is_lost])
        for a, b in zip(ours[3:], theirs[3:], strict=True):
            np.testing.assert_array_equal(a, b)
    assert 0 < lost < 0.5 * sum(batch.weights.sum() for batch in whole)
    assert len(set(notes)) == len(notes)
    assert all("the CRC-32 of bytes" in line and ".txt)" in line for line in notes)
    assert {line.partition("tokens-0000")[2][0] for line in notes} == {"1", "3"}
    # Each piece once, though it was read in both epochs.
    tokens = int(notes[-1].partition("); ")[2].partition(" tokens in ")[0])
    assert tokens == sum(int(line.split()[3]) for line in notes)
    assert lost / 2 <= tokens < lost


@pytest.mark.slow
def test_e5_more_damage_than_may_be_lost_ends_the_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    config = harness.write_config(tmp_path)
    assert main(["data", "tokenize", f"--config={config}", f"--out={tmp_path}/out"]) == 0
    flipped(tmp_path / "out/train/tokens-00000.bin", 0.5)
    sides = [
        f"--config.data.train={tmp_path}/out/train",
        f"--config.data.validation={tmp_path}/out/val",
        "--config.data.damaged=skip",
    ]
    assert main(harness.words(config, tmp_path / "few", *sides)) == 65
    output = capsys.readouterr().err
    assert "too much of the training data is damaged" in output
    (share,) = re.findall(r"--config\.data\.max_dropped=[0-9.]+", output)
    assert main(harness.words(config, tmp_path / "run", *sides, share)) == 0
    warnings = [r["text"] for r in harness.records(tmp_path / "run", "warnings.jsonl")]
    assert len(warnings) >= 1
    assert all(line.startswith("not trained on: ") for line in warnings)
    assert all(r["loss_nats"] is not None for r in harness.records(tmp_path / "run"))


@pytest.mark.slow
def test_e5_what_was_lost_before_a_resume_counts_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed often loses no more than a run that is not, and ends as that one."""
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    config = harness.write_config(tmp_path, {"checkpoint.every": 1, "train.steps": 8})
    assert main(["data", "tokenize", f"--config={config}", f"--out={tmp_path}/out"]) == 0
    for at in (0.1, 0.9):
        flipped(tmp_path / "out/train/tokens-00000.bin", at)
    sides = [
        f"--config.data.train={tmp_path}/out/train",
        f"--config.data.validation={tmp_path}/out/val",
        "--config.data.damaged=skip",
    ]

    def lost(workdir: Path) -> list[tuple[int, str]]:
        path = "warnings.jsonl"
        return [(each["step"], each["text"]) for each in harness.records(workdir, path)]

    accepted = [*sides, "--config.data.max_dropped=1"]
    assert main(harness.words(config, tmp_path / "whole", *accepted)) == 0
    for step in (2, 5, 8):
        words = harness.words(config, tmp_path / "parts", *accepted, f"--stop_at={step}")
        assert main(words) == 0
    assert len({step for step, _ in lost(tmp_path / "whole")}) > 2
    assert lost(tmp_path / "parts") == lost(tmp_path / "whole")
    assert harness.state_digest(tmp_path / "parts") == harness.state_digest(tmp_path / "whole")

    (step, newest) = lost(tmp_path / "whole")[-1]
    refused = [*sides, f"--config.data.max_dropped={float(newest.split()[-3]) * 0.99}"]
    assert main(harness.words(config, tmp_path / "refused", *refused, f"--stop_at={step}")) == 0
    capsys.readouterr()
    assert main(harness.words(config, tmp_path / "refused", *refused)) == 65
    total = newest.partition("); ")[2].split()[0]
    assert f"{total} of " in capsys.readouterr().err


def test_e5_the_first_process_counts_what_all_processes_lost(
    stored: TokenShards, tmp_path: Path
) -> None:
    plan = packing.open_plan(stored, SEQUENCE, "concat", 0, tmp_path / "plan")
    loader = Loader(stored, plan, SEQUENCE, 0, prefetch=2, max_lost=0.9)
    count = plan.rows // BATCH
    for number in (1, 3):
        flipped(stored.folder / f"tokens-0000{number}.bin", 0.5)

    def of_all(value: list) -> list[list]:
        return [value, json.loads(sent.pop())]

    def of_none(value: list) -> list[list]:
        sent.append(json.dumps(value))
        return []

    sent: list[str] = []
    notes: dict[str, list[str]] = {"one": [], "first": [], "other": []}
    lost: dict[str, list] = {"one": [], "first": [], "other": []}
    streams = {
        name: loader.batches(
            0, batch=BATCH, rows=rows, warn=notes[name].append, lost=lost[name], gather=gather
        )
        for name, rows, gather in (
            ("one", slice(0, BATCH), lambda value: [value]),
            ("other", slice(BATCH // 2, BATCH), of_none),
            ("first", slice(0, BATCH // 2), of_all),
        )
    }
    for _ in range(count):
        for stream in streams.values():
            next(stream)
    for stream in streams.values():
        stream.close()  # type: ignore[attr-defined]
    assert len(lost["one"]) > 2
    assert sorted(lost["first"]) == sorted(lost["one"])
    assert lost["other"] == notes["other"] == []
    assert notes["first"][-1].partition("); ")[2] == notes["one"][-1].partition("); ")[2]


def test_e5_a_run_ends_with_65_before_it_trains_on_a_flipped_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    config = harness.write_config(tmp_path)
    assert main(["data", "tokenize", f"--config={config}", f"--out={tmp_path}/out"]) == 0
    path = tmp_path / "out/train/tokens-00000.bin"
    flipped(path, 0.5)
    sides = [
        f"--config.data.{n}={tmp_path}/out/{f}"
        for n, f in (("train", "train"), ("validation", "val"))
    ]
    code, output = harness.run(harness.words(config, tmp_path / "run", *sides))
    assert code == 65, output
    assert output.count(f"{path}, document ") == 1
    assert "CRC-32" in output
    assert harness.steps(tmp_path / "run") == []
    capsys.readouterr()
    code, result = answer(capsys, "data", "check", str(path.parent))
    assert (code, result["error"]["where"]) == (65, str(path))


class Wide(Bytes):
    """A vocabulary so large that shards hold each id in four bytes; its saved self has fewer."""

    def __init__(self):
        super().__init__()
        self.table = [*self.table, *[b""] * 2**16]


def falsify(shards: TokenShards, document: int, position: int, value: int) -> None:
    """Put an id into the first shard as a foreign writer would: every check and digest is right."""
    folder, made = shards.folder, shards.manifest
    ends = np.fromfile(folder / "documents-00000.bin", "<i8").reshape(-1, 3)[:, 0]
    length = int(ends[document] - ends[document - 1])
    ids = np.fromfile(folder / "tokens-00000.bin", made.dtype)
    ids[ends[document - 1] + position % length] = value
    ids.tofile(folder / "tokens-00000.bin")
    contents = [(folder / f"{n}-00000.bin").read_bytes() for n in ("tokens", "documents")]
    checks = [zlib.crc32(c[i : i + BLOCK]) for c in contents for i in range(0, len(c), BLOCK)]
    (folder / "checks-00000.bin").write_bytes(np.array(checks, "<u4").tobytes())
    digests = {
        f"{name}_sha256": hashlib.sha256((folder / f"{name}-00000.bin").read_bytes()).hexdigest()
        for name in ("tokens", "checks")
    }
    (entry,) = made.shards
    entry = dataclasses.replace(entry, largest_id=100, **digests)
    dataclasses.replace(made, vocab=Bytes().size, shards=(entry,)).write(folder)


@pytest.mark.few(3)
@pytest.mark.parametrize("position", [5, -1], ids=["read", "only predicted"])
@pytest.mark.parametrize("value", [296, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_e6_an_id_past_the_vocabulary_is_found_on_the_host_with_its_place(
    tmp_path: Path, value: int, position: int
) -> None:
    """Four bytes that another program reads as -1 are 2^32 - 1.

    A document's last id is a label and never an input.
    """
    texts = [Document(f"good text {n}", "a.jsonl", n) for n in range(40)]
    encoder = Bytes() if value < 2**16 else Wide()
    made = writer.write(tmp_path / "shards", texts, encoder, LeftOut())
    falsify(made, 31, position, value)
    lied = TokenShards.open(made.folder)
    lied.verify()
    assert lied.tokenizer.size == lied.manifest.vocab == 296
    plan = packing.open_plan(lied, SEQUENCE, "first_fit", 0, tmp_path / "plan")
    stream = Loader(lied, plan, SEQUENCE, 0).batches(0, batch=4)
    with pytest.raises(DataError) as caught:
        for _ in range(plan.rows):
            next(stream)
    assert caught.value.code == 65
    assert caught.value.what == f"token id {value} is outside the vocabulary of 296"
    place = position % int(lied.lengths(31, 32)[0])
    named = f"tokens-00000.bin, document 31 (a.jsonl, line 31), position {place}"
    assert caught.value.where.endswith(named)


def test_e6_a_manifest_that_does_not_fit_its_tokenizer_is_refused(tmp_path: Path) -> None:
    made = writer.write(tmp_path / "s", [Document("text", "a.txt", 0)], Bytes(), LeftOut())
    for vocab in (200, 400):
        dataclasses.replace(made.manifest, vocab=vocab).write(made.folder)
        with pytest.raises(DataError) as caught:
            opened(tmp_path / "cache", str(made.folder), validation=(), sequence=2)
        assert str(vocab) in caught.value.why


# E8, E9: where reading itself fails


@contextlib.contextmanager
def with_a_worker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A run that trains on and on, and the process that reads for it."""
    config = harness.write_config(tmp_path)
    words = harness.words(config, tmp_path / "run", "--config.data.workers=1")
    words += ["--config.train.steps=100000", "--config.checkpoint.every=50000"]
    run = harness.start(words, JAXLM_CACHE=str(tmp_path / "cache"))
    try:
        deadline = time.monotonic() + 120
        while not harness.records(tmp_path / "run") and time.monotonic() < deadline:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        workers = [pid for pid, words in harness.children(run.pid).items() if "spawn_main" in words]
        assert len(workers) == 1
        owned = [Path(f"/proc/{workers[0]}")]
        for pid in (run.pid, workers[0]):
            maps = Path(f"/proc/{pid}/maps").read_text()
            owned += [Path(name) for name in re.findall(r"/dev/shm/\S+", maps)]
        assert len(owned) > 1, "semaphores of the queue between them"
        yield run, workers[0]
    finally:
        run.kill()
        run.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(path.exists() for path in owned) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path for path in owned if path.exists()] == []


def test_e8_a_killed_loader_worker_ends_the_run_with_70_in_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Recorder
) -> None:
    with with_a_worker(tmp_path) as (run, worker):
        os.kill(worker, signal.SIGKILL)
        begun = time.monotonic()
        output, _ = run.communicate(timeout=60)
        took = time.monotonic() - begun
        machine.require_clock(took, 5)
        record_property("E8", f"{took:.1f} s")
        assert run.returncode == 70, output
        assert "a data worker process died" in output
        assert "exit code -9" in output
        assert "leaked" not in output
    fix = re.search(r"--config\.data\.workers=0.*", output)
    assert fix, output
    pasted = [*run.args[3:], *shlex.split(fix[0], comments=True), "--stop_at=2"]
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    assert main(pasted) == 0


def test_e8_the_loader_worker_of_a_killed_run_ends_with_it(tmp_path: Path) -> None:
    with with_a_worker(tmp_path) as (run, worker):
        run.kill()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_e9_a_source_slower_than_the_step_is_said_in_the_metrics_and_ends_with_76_once_it_stalls(
    tmp_path: Path, record_property: Recorder
) -> None:
    config = harness.write_config(tmp_path)
    run = tmp_path / "run"
    command = harness.words(config, run, "--config.watch.data=10s")
    faults = "data.next:sleep=2@5-9,data.next:hang@10"
    code, output = harness.run(command, faults, JAXLM_CACHE=str(tmp_path / "cache"))
    assert code == 76, output
    named = f"nothing has moved in 'data', reading {tmp_path}/*.txt from /"
    assert named in output
    assert named in harness.exit_of(run)["cause"]
    lines = {r["step"]: r for r in harness.records(run) if r["split"] == "train"}
    before, slow = ([lines[step] for step in steps] for steps in (range(2, 5), range(5, 9)))
    record_property(
        "E9", f"waits of {min(r['data_wait_seconds'] for r in slow):.2f} s reported, of 2"
    )
    assert max(r["data_wait_seconds"] for r in before) < 2
    assert max(r["step_seconds"] for r in before) < 2, "faster than the source will be"
    assert [r["data_wait_seconds"] >= 2 for r in slow] == [True] * 4


# E10: a cache that is half made

BUILD_AND_KILL = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import sentencepiece
from jaxlm.data import dataset
from jaxlm.data.config import DataConfig

texts, root, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
config = DataConfig(train=(texts,), validation=("20%",), tokenizer="sentencepiece:600", sequence=32)

def build(folder):
    child = os.fork()
    if child:
        return child
    try:
        dataset.open_data(config, seed=0, root=folder)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)

def finish(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

begun = time.monotonic()
assert finish(build(root / "whole")) == 0
length = time.monotonic() - begun
draw = random.Random(int(sys.argv[4]))
number = caught = 0
while number < kills or (caught < 3 and number < 5 * kills):  # chance may leave nothing half-made
    folder, pause = root / f"killed{number}", length * (number % kills + draw.random()) / kills
    while True:
        child = build(folder)
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
        if finish(child) == -signal.SIGKILL:
            break
        shutil.rmtree(folder)  # it was done before the kill
        pause *= 0.8
    left = sorted(p.name for p in folder.glob("*/.*"))
    print(number, left, flush=True)
    caught += any("partial" in name for name in left)
    assert finish(build(folder)) == 0
    number += 1
"""


def contents(root: Path) -> dict[str, str]:
    """sha256 of every file under a folder, by its path in it.

    Files that depend on the moment of a kill are left out: the empty lock after a rename, and
    `digests`, as those of files that were written a moment ago are not kept.
    """
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and (path.suffix != ".lock" or path.stat().st_size)
        and path.relative_to(root).parts[0] != "digests"
    }


def test_e10_a_cache_whose_making_was_killed_becomes_what_an_unbroken_one_is(
    tmp_path: Path, record_property: Recorder
) -> None:
    (tmp_path / "texts").mkdir()
    draw = random.Random(5)
    for number in range(300):
        words = (draw.choice("alpha beta gamma delta epsilon zeta".split()) for _ in range(150))
        (tmp_path / f"texts/{number:03d}.txt").write_text(f"{number} " + " ".join(words))
    seed = random.SystemRandom().randrange(10**9)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            BUILD_AND_KILL,
            f"{tmp_path}/texts/*.txt",
            str(tmp_path),
            "10",
            str(seed),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (seed, done.stdout, done.stderr)
    assert sum("partial" in line for line in done.stdout.splitlines()) >= 3, done.stdout
    whole = contents(tmp_path / "whole")
    assert {name.partition("/")[0] for name in whole} == {"tokenizers", "shards", "plans"}
    killed = sorted(tmp_path.glob("killed*"))
    assert len(killed) >= 10
    record_property("E10", f"{len(killed)} kills")
    for folder in killed:
        assert contents(folder) == whole, (seed, folder)


@pytest.mark.slow
def test_e10_a_plan_that_was_harmed_is_made_again(stored: TokenShards, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    packing.open_plan(stored, SEQUENCE, "concat", 0, folder)
    good = contents(folder)
    draw = random.Random(6)
    tried = 0
    for path in sorted(folder.iterdir()):
        for content in harms(path, path, draw).values():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            assert contents(folder) != good
            packing.open_plan(stored, SEQUENCE, "concat", 0, folder)
            assert contents(folder) == good
            tried += 1
    assert tried >= 30


# E11, E12: too little, or twice


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["too short", "blank", "held out"])
def test_e11_too_little_data_is_an_error_in_ten_seconds(
    tmp_path: Path, kind: str, record_property: Recorder
) -> None:
    config = harness.write_config(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text(" \n\t" * 100 if kind == "blank" else "only a few words")
    flags = [f"--config.data.train={other}/*.txt"]
    flags.append(f"--config.data.validation={'99.9%' if kind == 'held out' else ()}")
    with harness.timing() as took:
        code, output = harness.run(
            harness.words(config, tmp_path / "run", *flags), JAXLM_CACHE=str(tmp_path / "cache")
        )
    assert code == 65, output
    assert {"too short": "a batch takes 8", "blank": "no text", "held out": "no document"}[
        kind
    ] in output
    assert "Traceback" not in output
    assert "initial state" not in output  # it is refused before the first save
    record_property("E11", f"{kind} {took}")
    took.require(10)


def put_twice(folder: Path, way: str) -> tuple[str, str, list[str]]:
    """Train, validation, and the names that an error must hold."""
    path = folder / "texts/07.txt"
    if way in ("link", "hard link", "copy"):
        other = folder / "other.md"
        if way == "link":
            other.symlink_to(path)
        elif way == "hard link":
            other.hardlink_to(path)
        else:
            other.write_bytes(path.read_bytes())
        return f"{folder}/texts/*.txt", str(other), [str(path)]
    if way == "same file":
        return f"{folder}/texts/*.txt", str(path), [str(path)]
    if way == "listed twice":
        return f"{folder}/texts/*.txt,{path}", "()", [str(path)]
    if way == "listed through a link":
        (folder / "link").symlink_to(folder / "texts")
        return f"{folder}/texts/*.txt,{folder}/link/07.txt", "()", [str(path), "link/07.txt"]
    words = ["data", "tokenize", f"--out={folder}/out", f"--config.data.train={folder}/texts/*.txt"]
    assert main([*words, "--config.data.validation=()", "--config.data.tokenizer=bytes"]) == 0
    if way == "same shards":
        return f"{folder}/out/train", f"{folder}/out/train", [f"{folder}/out/train"]
    (folder / "moved").mkdir()
    for file in (folder / "out/train").iterdir():
        (folder / "moved" / file.name).write_bytes(file.read_bytes())
    return f"{folder}/out/train", f"{folder}/moved", ["out/train", "moved"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "way",
    [
        *("listed twice", "listed through a link", "same file", "link", "hard link", "copy"),
        *("same shards", "copied shards"),
    ],
)
def test_e12_what_would_be_read_twice_is_refused_by_name(
    texts: str,
    tmp_path: Path,
    way: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    train, validation, names = put_twice(tmp_path, way)
    capsys.readouterr()
    words = [f"--config.data.train={train}", f"--config.data.validation={validation}"]
    code, output = answer(capsys, "data", "stats", *words, "--config.data.tokenizer=bytes")
    assert code == 65
    assert all(name in output["error"]["why"] for name in names), output
    assert not list((tmp_path / "cache").glob("shards/*"))


def test_e12_empty_files_and_different_ones_of_one_size_are_no_overlap(tmp_path: Path) -> None:
    for name, text in (("a.txt", "one"), ("b.txt", ""), ("c.md", "two"), ("d.md", "")):
        (tmp_path / name).write_text(text)
    data = opened(tmp_path / "cache", f"{tmp_path}/*.txt", validation=(f"{tmp_path}/*.md",))
    assert data.train.shards.documents == data.validation["val"].shards.documents == 1


# S5: a manifest that leads elsewhere


@pytest.mark.few(3)
@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside.bin"])
@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin", "checks-00000.bin"])
def test_s5_a_shard_that_is_a_link_out_of_its_folder_is_refused(
    stored: TokenShards, tmp_path: Path, name: str, target: str
) -> None:
    path = stored.folder / name
    (tmp_path.parent / "outside.bin").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(DataError, match="links to a file outside its folder") as caught:
        TokenShards.open(stored.folder)
    assert caught.value.where == str(path)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../etc/passwd"},
        {"files": ["/etc/passwd"]},
        {"shards": [{"path": "/etc/passwd"}]},
        {"shards": "/etc/passwd"},
        {"dtype": "/etc/passwd"},
        {"documents": "../../etc/passwd"},
        {"tokens": -1},
        {"bytes": 1e9},
        {"left_out": {"empty": "/etc/passwd"}},
        {"left_out": ["/etc/passwd"]},
        {"first_left_out": {"empty": 1}},
    ],
)
def test_s5_a_manifest_that_names_a_path_or_another_type_is_refused(
    stored: TokenShards, change: dict
) -> None:
    path = stored.folder / "manifest.json"
    content = json.loads(path.read_text()) | change
    content.pop("sha256")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": digest}))
    with pytest.raises(DataError) as caught:
        TokenShards.open(stored.folder)
    assert caught.value.where == str(path)
    assert "sha256 differs" not in caught.value.why


def test_s5_a_folder_of_shards_may_itself_be_a_link(stored: TokenShards, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(stored.folder)
    read_everything(tmp_path / "link")
    assert TokenShards.open(tmp_path / "link").documents == stored.documents > 0
