"""Large files, in parts that are units, give the documents and numbers of the whole file."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxlm.core.errors import DataError
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.job import Job
from jaxlm.corpus.readers import spans
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


@pytest.fixture(params=[as_lines, as_parquet])
def large(here, request):
    """A file of some 4 MB, and a small one behind it."""
    name = {as_lines: "jsonl", as_parquet: "parquet"}[request.param]
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


def killed(fault):
    """The exit code of the command in a process of its own, with a fault."""
    Path("recipe.py").write_text(RECIPE)
    command = ["data", "run", "--config=recipe.py", "--out=out", *CUT]
    return subprocess.run(
        [sys.executable, "-m", "jaxlm", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLM_FAULTS": fault},
        capture_output=True,
    ).returncode
