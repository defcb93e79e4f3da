"""Large files, in parts that are units, give the documents and numbers of the whole file."""

import csv
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxlm.core.errors import DataError
from jaxlm.corpus.config import ReadLimits, Recipe
from jaxlm.corpus.job import Job
from jaxlm.corpus.readers import files, spans
from tests.corpus.recipes import RECIPE, lines, run, tree

ROOT = Path(__file__).parents[2]
ALL = ["--config.source=in/*", "--config.stages=length", "--config.dedup=exact"]
CUT = [*ALL, "--config.unit_bytes=1048576"]
WHOLE = [*ALL, "--config.unit_bytes=10000000"]


def rows(seed=0, count=2000):
    """Texts of up to 4,000 letters, a few of them twice or too short."""
    drawn = random.Random(seed)
    noise = "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz äöü\n", k=100_000))
    begins = [drawn.randrange(90_000) for _ in range(count)]
    texts = [noise[begin : begin + drawn.randrange(200, 4000)] for begin in begins]
    texts[100::97] = [texts[3]] * len(texts[100::97])
    texts[50::101] = ["short"] * len(texts[50::101])
    return [{"text": text, "number": number} for number, text in enumerate(texts)]


def as_lines(path, rows):
    """Some lines are blank, broken, without a text or longer than two parts.

    The last line does not end.
    """
    written = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    written[10], written[700], written[1500] = b"", b'{"text": "cut', b'{"words": 1}'
    written[900] = b'{"text": "' + b"a" * 2_200_000 + b'"}'
    written[901] = b'{"text": "\xff\xfe"}'
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(written))


def as_parquet(path, rows):
    path.parent.mkdir(exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, row_group_size=150, compression="none")


def as_csv(path, rows):
    """Each text with a quote at its begin and end; the last row is not closed."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "number"])
        writer.writerows([f'"{row["text"]}"', row["number"]] for row in rows)
        file.write('"a quote\nb,1\n')


def as_warc(path, rows):
    """One length is wrong."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        for number, row in enumerate(rows):
            text = row["text"].encode()
            file.write(warc_record(text, len(text) - 5 * (number == 900)))


def warc_record(text, length):
    head = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: %d\r\n\r\n" % length
    return head + text + b"\r\n\r\n"


@pytest.fixture(params=[as_lines, as_parquet, as_csv, as_warc])
def large(here, request):
    """A file of some 4 MB, and a small one behind it."""
    name = {as_lines: "jsonl", as_parquet: "parquet", as_csv: "csv", as_warc: "warc"}[request.param]
    request.param(here / f"in/large.{name}", rows())
    (here / "in/small.jsonl").write_text(json.dumps(rows(1)[0]) + "\n")
    return here / f"in/large.{name}"


def found():
    """The fate of each record, in all output files."""
    return {
        kind: sorted(lines(f"{kind}/*.jsonl"), key=lambda row: (row["file"], row["record"]))
        for kind in ("kept", "removed/length.*", "removed/exact.*", "broken")
    }


def test_the_parts_of_a_file_are_its_records(large, capsys):
    answer = run(capsys, *WHOLE, "--config.reading.document_bytes=1000000")
    assert len(list(Path("out/units").iterdir())) == 1
    whole = found()
    assert len(whole["kept"]) > 1900
    assert {name.partition(".")[0] for name in answer["removed"]} == {"exact", "length"}
    if large.suffix == ".jsonl":
        assert answer["broken"] == {
            "not JSON": 1,
            "not UTF-8": 1,
            "too large": 1,
            "without the text key": 1,
        }
    shutil.rmtree("out")
    parts = run(capsys, *CUT, "--config.reading.document_bytes=1000000")
    assert len(list(Path("out/units").iterdir())) == -(-large.stat().st_size // 2**20)
    assert found() == whole
    differ = {name for name in answer if answer[name] != parts[name]}
    assert differ <= {"files", "speed"}


@pytest.mark.few(1)
def test_parts_are_the_same_in_several_processes_and_after_a_kill(large, capsys):
    run(capsys, *CUT)
    whole = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *CUT, "--workers=2")
    assert tree(Path("out")) == whole
    shutil.rmtree("out")
    assert killed("prepare.clean:sigkill@2") < 0
    run(capsys, *CUT)
    assert tree(Path("out")) == whole
    Path("out/report.html").unlink()
    run(capsys, *CUT)
    assert tree(Path("out")) == whole


def test_a_file_that_was_written_meanwhile_is_cut_again(here, capsys):
    """Into as many parts, since it holds as many bytes; its lines begin elsewhere."""
    large = here / "in/large.jsonl"
    as_lines(large, rows())
    assert killed("prepare.clean:sigkill@1") < 0
    first, rest = large.read_bytes().split(b"\n", 1)
    large.write_bytes(rest + b"\n" + first)
    run(capsys, *CUT)
    after = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *CUT)
    assert tree(Path("out")) == after


def test_a_file_that_is_written_while_it_is_read_is_refused(large, capsys):
    Path("out").mkdir()
    recipe = Recipe(source=("in/*",), unit_bytes=2**20)
    output = []
    job = Job.find(recipe, Path("out"), 1.0).claim(output.append)
    assert output == [f"in/{large.name} is divided into parts; counting its records"]
    pieces = [piece for unit in job.units for piece in unit if piece.span is not None]
    assert job.cuts == Job.read(Path("out")).cuts
    assert [job.span(piece) for piece in pieces] == list(job.cuts[pieces[0].name].spans)
    os.utime(large, ns=(1, 1))
    with pytest.raises(DataError, match="changed while it was read"):
        job.span(pieces[0])


def test_what_is_no_utf8_and_what_is_damaged_is_read_whole(here, capsys):
    Path("in").mkdir()
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows(count=500))
    Path("in/a.jsonl").write_bytes(text.encode("utf-16"))
    as_parquet(Path("in/b.parquet"), rows(1))
    with open("in/b.parquet", "r+b") as file:
        file.truncate(2_000_000)
    answer = run(capsys, *CUT)
    parts = [spans.count(path.stat().st_size, 2**20) for path in Path("in").iterdir()]
    assert len(list(Path("out/units").iterdir())) == sum(parts) > 4
    assert (answer["read"], answer["broken"]) == (501, {"damaged": 1})
    assert {row["record"] for row in lines("kept/*.jsonl")} < set(range(1, 501))


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
@pytest.mark.parametrize("most", [1, 2, 7, 64, 1000])
def test_every_line_is_in_the_span_in_which_it_begins(tmp_path, most, end):
    drawn = random.Random(most)
    text = b"\n".join(b"x" * drawn.choice([0, 1, 5, 6, 63, 200]) for _ in range(60)) + end
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    begins = [0, *(at + 1 for at, byte in enumerate(text) if byte == ord("\n"))]
    begins = [at for at in begins if at < len(text)]
    cut = list(spans.of_lines(path, most))
    assert len(cut) == spans.count(len(text), most)
    assert (cut[0].begin, cut[-1].end) == (0, len(text))
    assert all(a.end == b.begin for a, b in itertools.pairwise(cut))
    for number, span in enumerate(cut):
        begins_here = [at for at in begins if number * most <= at < (number + 1) * most]
        with spans.opened(path, span) as stream:
            assert stream.read() == text[span.begin : span.end]
        assert [at for at in begins if span.begin <= at < span.end] == begins_here
        assert span.begin == span.end or span.before == sum(at < span.begin for at in begins)


def assert_spans_are_the_file(path, most, limit):
    """The spans have the records of the file, in order, each once."""
    recipe = Recipe(reading=ReadLimits(document_bytes=limit))
    counts, of_spans = Counter(), Counter()
    whole = list(files.read(path, path.name, recipe, counts))
    cut = files.cut(path, path.name, most, limit)
    assert len(cut) == spans.count(path.stat().st_size, most)
    assert (cut[0].begin, cut[-1].end) == (0, path.stat().st_size)
    assert all(a.end == b.begin for a, b in itertools.pairwise(cut))
    parts = [list(files.read(path, path.name, recipe, of_spans, each)) for each in cut]
    assert list(itertools.chain.from_iterable(parts)) == whole
    assert of_spans == counts
    return sum(map(bool, parts))


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_of_any_quotes_is_the_rows_of_its_spans(tmp_path, ending):
    """Quotes, line ends and separators anywhere, a row over the limit, letters of several bytes."""
    mark, path, drawn = (
        {"csv": ",", "tsv": "\t"}[ending],
        tmp_path / f"a.{ending}",
        random.Random(0),
    )
    pieces = [
        '"',
        '""',
        f'"{mark}"',
        '"\n"',
        mark,
        "\n",
        "\r\n",
        "\r",
        "é",
        "あa b",
        "x" * 30,
        "\0",
    ]
    weights = [3, 1, 1, 1, 6, 6, 2, 0.2, 2, 2, 1, 0.1]
    divided = 0
    for _ in range(400):
        text = f"text{mark}n\n" if drawn.random() < 0.9 else ""
        text += "".join(drawn.choices(pieces, weights, k=drawn.randrange(120)))
        path.write_bytes(("\ufeff" * drawn.randrange(2) + text or "a").encode())
        limit = drawn.choice([25, 100, 10_000])
        divided += assert_spans_are_the_file(path, drawn.choice([1, 7, 40, 100]), limit) > 1
    assert divided > 200


def test_a_table_with_a_row_longer_than_a_span_and_one_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.csv"
    rows = [b'"%s\n%s",%d' % ("é".encode() * 20, b"z" * (3000 * (n == 5)), n) for n in range(40)]
    path.write_bytes(b"text,n\r\n" + b"\r\n".join([*rows, b"\xff,1"]))
    assert assert_spans_are_the_file(path, 256, 10_000) > 5
    assert assert_spans_are_the_file(path, 256, 2000) > 5


def test_an_archive_with_wrong_lengths_is_the_records_of_its_spans(tmp_path):
    path, drawn, divided = tmp_path / "a.warc", random.Random(0), 0
    pieces = [
        b"WARC/1.0\r\n",
        b"Content-Length: 3\r\n",
        b"\r\n",
        b"\n",
        "é".encode(),
        b"word ",
        b"y" * 90,
    ]
    for _ in range(400):
        records = []
        for _ in range(drawn.randrange(1, 12)):
            text = b"".join(drawn.choices(pieces, k=drawn.randrange(6)))
            wrong = drawn.randrange(-20, 20) * (drawn.random() < 0.3)
            records.append(warc_record(text, len(text) + wrong))
            records.append(drawn.choice([b"", b"", b"\n", b"junk\n", text]))
        data = b"".join(records)
        path.write_bytes(data[: len(data) - drawn.choice([0, 0, 1, 30])])
        most = drawn.choice([1, 10, 100, 300])
        divided += assert_spans_are_the_file(path, most, drawn.choice([20, 150, 10_000])) > 1
    assert divided > 200


def killed(fault):
    """The exit code of the command in a process of its own, with a fault."""
    Path("recipe.py").write_text(RECIPE)
    command = ["data", "run", "--config=recipe.py", "--out=out", *CUT]
    return subprocess.run(
        [sys.executable, "-m", "jaxlm", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLM_FAULTS": fault},
        capture_output=True,
    ).returncode
