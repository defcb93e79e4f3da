"""Documents are read one by one; errors name the record, documents left out are counted."""

import dataclasses
import gzip
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data.conversations import ChatFields
from jaxlm.data.documents import (
    STDLIB_HELD_OUT,
    Corpus,
    notes_of_tables,
    notes_of_unfinished,
)
from jaxlm.data.records import LeftOut, likely_encoding, note_of_table
from jaxlm.data.text_digest import TextDigests


def _read(path: Path | str, key: str = "text") -> tuple[list[str], Counter[str]]:
    counts = LeftOut()
    corpus = Corpus.find((str(path),), key, "data.train")
    return [document.text for document in corpus.documents(counts)], counts


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()


TEXTS = ["one\r\n", "\ufefftwo \0", "dr\u00ef \U0001f600"]


def test_a_text_file_is_one_document_with_every_character_kept_but_a_byte_order_mark(
    tmp_path: Path,
) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    texts, counts = _read(tmp_path / "*.txt")
    assert texts == [text.removeprefix("\ufeff") for text in TEXTS]
    assert counts == {"with a byte order mark, removed": 1, "with NUL, kept": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_each_record_is_a_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2, 3]}), path)
    else:
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(_lines(TEXTS)))
    corpus = Corpus.find((str(path),), "text", "data.train")
    assert [(d.text, d.record) for d in corpus.documents(LeftOut())] == [
        (text, n) for n, text in enumerate(TEXTS, 1)
    ]


@pytest.mark.parametrize("setting", ["data.train", "data.validation", "--text", "harmful.words"])
def test_a_pattern_without_a_match_lists_the_nearest_folder_and_names_no_other_text(
    tmp_path, setting
):
    with pytest.raises(InputMissing) as caught:
        Corpus.find((f"{tmp_path}/none/*/*.txt",), "text", setting)
    assert caught.value.where == setting
    assert caught.value.fix == f"ls {tmp_path}"


@pytest.mark.parametrize(
    ("setting", "flag"), [("data.train", "--config.data.train"), ("--text", "--text")]
)
def test_a_misspelt_path_is_mended_by_a_line_that_works(tmp_path, setting, flag):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a")
    with pytest.raises(InputMissing) as caught:
        Corpus.find((f"{tmp_path}/text/*.txt",), "text", setting)
    (word,) = shlex.split(caught.value.fix)
    name, _, pattern = word.partition("=")
    assert name == flag
    assert [path.name for path in Corpus.find((pattern,), "text", setting).files] == ["a.txt"]


def test_a_file_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        _read(path)
    assert caught.value.code == 65
    assert caught.value.where == f"{path}, byte 3"


@pytest.mark.parametrize("name", ["a'b.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst"])
def test_a_file_that_is_not_utf8_is_mended_by_the_line_to_paste(tmp_path, name):
    """For every glob: the match is the text afterwards, with as many documents as before."""
    pack, command = {".gz": (gzip.compress, "gzip"), ".zst": (zstandard.compress, "zstd")}.get(
        Path(name).suffix, (bytes, "iconv")
    )
    if not (shutil.which(command) and shutil.which("iconv")):
        pytest.skip(f"there is no {command}")
    texts = ["caf\u00e9", "na\u00efve"] if ".jsonl" in name else ["caf\u00e9 au lait"]
    lines = [f'{{"text": "{text}"}}\n' for text in texts] if ".jsonl" in name else texts
    content = pack("".join(lines).encode("latin1"))
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        _read(tmp_path / "*")
    subprocess.run(["sh", "-c", caught.value.fix], check=True, cwd="/")
    documents, counts = _read(tmp_path / "*")
    assert (documents, counts) == ([*texts, "good"], {})
    unchanged = [path for path in tmp_path.iterdir() if path.read_bytes() == content]
    assert [path.name for path in unchanged] == [f".{name}.latin1"]


def test_a_file_that_is_no_text_is_hidden_by_the_line_to_paste(tmp_path: Path) -> None:
    picture = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    (tmp_path / "a b.txt").write_bytes(picture)
    (tmp_path / "good.txt").write_text("good")
    with pytest.raises(DataError, match="a file is no text") as caught:
        _read(tmp_path / "*")
    assert "control characters" in caught.value.why
    subprocess.run(["sh", "-c", caught.value.fix], check=True, cwd="/")
    assert _read(tmp_path / "*") == (["good"], {})
    assert (tmp_path / ".a b.txt").read_bytes() == picture


QUOTES = "\u201cna\u00efve\u201d caf\u00e9 \u2014 d\u00e9j\u00e0 vu"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
@pytest.mark.parametrize(
    ("encoding", "mark", "command"),
    [
        ("utf-16-le", b"\xff\xfe", "utf-16"),
        ("utf-16-be", b"\xfe\xff", "utf-16"),
        ("utf-32-le", b"\xff\xfe\0\0", "utf-32"),
        ("cp1252", b"", "cp1252"),
    ],
)
def test_the_line_to_paste_names_the_encoding_of_a_file(tmp_path, name, encoding, mark, command):
    """It named Latin-1, which made NUL of UTF-16 and control characters of quotes."""
    if not shutil.which("iconv"):
        pytest.skip("there is no iconv")
    text = json.dumps({"text": QUOTES}, ensure_ascii=False) + "\n" if "jsonl" in name else QUOTES
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(mark + text.encode(encoding)))
    with pytest.raises(DataError, match="not UTF-8") as caught:
        _read(tmp_path / name)
    assert f"iconv -f {command} -t utf-8" in caught.value.fix
    subprocess.run(["sh", "-c", caught.value.fix], check=True, cwd="/")
    assert _read(tmp_path / name)[0] == [QUOTES]


def test_bytes_without_a_character_in_cp1252_are_no_cp1252() -> None:
    assert likely_encoding(b"\x93caf\xe9\x94") == "cp1252"
    assert likely_encoding(b"\x81\x93caf\xe9") == "latin1"


def test_more_records_without_the_text_key_than_may_be_are_refused_with_the_share_or_the_key(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines(["ok"] * 998) + b'{"id": "a7", "content": "words", "n": 3}\n')
    with pytest.raises(DataError) as caught:
        _read(path)
    assert caught.value.fix == "--config.data.max_dropped=0.01    # leaves such records out"
    assert caught.value.where == f"{path}, line 999"
    path.write_bytes(b'{"id": "a7", "content": "words", "n": 3}\n')
    with pytest.raises(DataError) as caught:
        _read(path)
    assert caught.value.fix == "--config.data.text_key=content"
    path.write_bytes(b'{"question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(DataError) as caught:
        _read(path)
    assert caught.value.fix.splitlines() == [
        "--config.data.kind=chat --config.data.fields=user=question,assistant=answer",
        "--config.data.text_key=question",
    ]


@pytest.mark.parametrize("chat", [None, ChatFields("chat")])
@pytest.mark.parametrize(
    ("broken", "total"),
    [((40, 41, 50, 60, 63), 64), (range(71, 100), 100), (range(300, 800), 8000)],
)
def test_the_share_of_broken_records_that_a_fix_proposes_is_that_of_all_records(
    tmp_path: Path, broken: Sequence[int], total: int, chat: ChatFields | None
) -> None:
    """It was the share up to the record at which reading ended, so the next run ended as well."""
    whole = '{"text": "a"}'
    if chat:
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        whole = json.dumps({"messages": turns})
    lines = ["{" if number in broken else whole for number in range(total)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = Corpus.find((str(tmp_path / "a.jsonl"),), "text", "data.train", chat=chat)
    with pytest.raises(DataError) as caught:
        list(corpus.documents(LeftOut()))
    (share,) = re.findall(r"--config\.data\.max_dropped=([0-9.]+)", caught.value.fix)
    allowed = dataclasses.replace(corpus, max_dropped=float(share))
    assert len(list(allowed.documents(LeftOut()))) == total - len(broken)


def test_few_broken_records_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        _lines(["ok"] * 4000)
        + b'{"content": "words"}\n[1]\n{"text": 3}\n{"text": ""}\n{"text": " \\n"}\n{cut\n'
        + _lines(["end"])
    )
    texts, counts = _read(path)
    assert len(texts) == 4001
    assert counts == {
        "without the text key": 2,
        "with a text of another type": 1,
        "not JSON": 1,
        "empty": 1,
        "only white space": 1,
    }


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for bad in (b'{"text": "cut', b"[" * 100_000):
        path.write_bytes(_lines(["ok"]) + b"\n" + bad + b"\n")
        with pytest.raises(DataError, match="not JSON") as caught:
            _read(path)
        assert caught.value.where == f"{path}, line 3"


def test_half_a_surrogate_pair_is_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    texts, counts = _read(path)
    assert texts == ["a\ufffdb", "\U0001f600"]
    assert sum(counts.values()) == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(_lines(TEXTS * 100))[:60])
    with pytest.raises(DataError, match="damaged") as caught:
        _read(path)
    assert caught.value.where == str(path)


def test_a_pattern_without_a_match_is_missing_input() -> None:
    with pytest.raises(InputMissing, match=r"nowhere/\*\.txt") as caught:
        _read("nowhere/*.txt")
    assert caught.value.code == 66


@pytest.mark.parametrize("duplicate", ["a.txt", "link.md", "[ab].txt"])
def test_a_file_matched_twice_is_refused_by_name(tmp_path: Path, duplicate: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.md").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match="lists a file twice") as caught:
        Corpus.find((str(tmp_path / "*.txt"), str(tmp_path / duplicate)), "text", "data.train")
    assert str(tmp_path / "a.txt") in caught.value.why


def test_the_digest_follows_contents_and_not_times(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    digests = []
    for text in ("one", "two", "one"):
        path.write_text(text)
        corpus = Corpus.find((str(path),), "text", "data.train")
        digests.append(TextDigests(tmp_path / "cache").of(corpus))
    assert digests[0] == digests[2] != digests[1]
    named = f"text\0{path}\0{hashlib.sha256(b'one').hexdigest()}"
    assert digests[0] == hashlib.sha256(named.encode()).hexdigest(), "what caches are named by"


def test_the_two_parts_of_the_library_share_no_file_and_no_test_is_in_them() -> None:
    train, held_out = (
        Corpus.find((f"stdlib:{part}",), "text", "data.train") for part in ("train", "validation")
    )
    assert not set(train.names) & set(held_out.names)
    assert list(train.names) == sorted(train.names)
    for corpus, is_held_out in ((train, False), (held_out, True)):
        for name in corpus.names:
            assert (hashlib.sha256(name.encode()).digest()[0] < STDLIB_HELD_OUT) == is_held_out
            assert not {"test", "tests", "idle_test", "site-packages"} & set(name.split("/")[:-1])
    root, names = Path(sysconfig.get_path("stdlib")), set(train.names) | set(held_out.names)
    left = {path.relative_to(root) for path in root.rglob("*.py")} - set(map(Path, names))
    folders = {
        "test",
        "tests",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
    unread = [path for path in left if not folders & set(path.parts[:-1])]
    assert len(unread) == train.other_encoding + held_out.other_encoding < 5
    assert 400 < len(train.names) < 800
    assert sum(path.stat().st_size for path in train.files) > 5e6


@pytest.mark.parametrize("pattern", ["{}/a b.csv", "web={}/a b.csv"])
def test_the_note_of_a_table_has_a_command_that_writes_its_records(tmp_path, pattern):
    (tmp_path / "a b.csv").write_text('id,text\n1,"one, two"\n2,three\n')
    note = note_of_table(pattern.format(tmp_path))
    command = note.partition("read its records: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    lines = (tmp_path / "a b-lines.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one, two", "three"]
    assert note_of_table(f"{tmp_path}/a.jsonl") is None
    for other in (f"{tmp_path}/*.tsv", "s3://bucket/a.csv.gz"):
        note = note_of_table(other)
        assert note.startswith(f"{other} is read as one text")
        assert note.endswith("to read its records: jaxlm docs corpus")


def test_a_table_in_a_folder_has_its_note_as_well(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("rows.csv", "deep/more.tsv", "a.txt"):
        (tmp_path / name).write_text("text\nwords\n")
    notes = list(notes_of_tables((f"web={tmp_path}", f"{tmp_path}/rows.csv")))
    ends = [f"{tmp_path}/{name} is read as one text" for name in ("*.csv", "**/*.tsv", "rows.csv")]
    assert all(note.startswith(end) for note, end in zip(notes, ends, strict=True))


def test_text_of_a_recipe_that_has_not_finished_has_a_note(tmp_path: Path) -> None:
    for name in ("out/kept", "out/unfinished", "done/kept"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("out", "done"):
        (tmp_path / name / "recipe.json").write_text("{}")
    entries = (f"web={tmp_path}/out/kept/*.jsonl", f"{tmp_path}/done/kept/*.jsonl")
    (note,) = notes_of_unfinished(entries)
    assert note.startswith(f"{tmp_path}/out is not finished")
