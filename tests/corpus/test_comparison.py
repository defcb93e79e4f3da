"""A new crawl against the folders of earlier runs, and clusters as a person reads them."""

import json
import shutil
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from tests.corpus.recipes import kept, lines, prose, removed, run, tree, write_lines

NOTE = (
    "This note stands at the end of every page of the site and is longer than a hundred "
    "characters, by some."
)
KINDS = ("--config.stages=()", "--config.dedup=exact,near,spans", "--config.unit_bytes=1")


def edited(text: str) -> str:
    """The text with one word changed."""
    return text.replace(text.split()[40], "another", 1)


@pytest.fixture
def before(here, capsys):
    """A run over two files: the second repeats the first but for a page and a note."""
    write_lines(here / "old/a.jsonl", [{"text": prose(1)}, {"text": f"{prose(2, 400)}\n\n{NOTE}"}])
    write_lines(here / "old/b.jsonl", [{"text": prose(1)}, {"text": f"{prose(3, 400)}\n\n{NOTE}"}])
    run(capsys, "--config.source=old/*.jsonl", *KINDS)
    assert len(kept()) == 3
    shutil.move("out", "before")
    return here / "before"


def crawl(here: Path) -> list[str]:
    texts = [prose(1), prose(4), edited(prose(2, 400)), prose(3, 400), f"{prose(5)}\n\n{NOTE}"]
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts[:2]])
    write_lines(here / "in/b.jsonl", [{"text": text} for text in texts[2:]])
    return texts


NEW = ("--config.source=in/*.jsonl", "--config.against=before", *KINDS)


def test_what_an_earlier_run_kept_is_a_duplicate_and_is_left_alone(before, here, capsys):
    crawl(here)
    old = tree(before)
    answer = run(capsys, *NEW)
    assert tree(before) == old
    assert kept() == [prose(4), prose(5)]
    # What stayed of the third page there had lost its note: it is compared as it stayed.
    assert answer["removed"] == {"exact": 2, "near": 1}
    assert answer["notes"] == {"spans: cut out": 1}
    assert removed()["exact"][0]["detail"] == "before/kept/00000.jsonl, record 1; agreement 1"
    clusters = {cluster["kind"]: cluster for cluster in lines("clusters.jsonl")}
    assert clusters["near"]["kept"] == {"file": "before/kept/00000.jsonl", "record": 2}
    assert [each["file"] for each in clusters["near"]["removed"]] == ["in/b.jsonl"]


def test_the_bytes_are_the_same_with_any_number_of_processes_and_a_third_run_sees_both(
    before, here, capsys
):
    crawl(here)
    run(capsys, *NEW)
    first = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *NEW, "--workers=2")
    assert tree(Path("out")) == first
    shutil.move("out", "second")
    run(capsys, *NEW, "--config.against=before,second")
    assert kept() == []
    places = {cluster["kept"]["file"] for cluster in lines("clusters.jsonl")}
    assert {"before/kept/00000.jsonl", "second/kept/00000.jsonl"} <= places


def test_what_cannot_be_compared_is_refused_before_anything_is_written(before, here, capsys):
    crawl(here)
    error = run(capsys, *NEW, "--config.against=nowhere", code=66)["error"]
    assert error["what"] == "no folder matches nowhere"
    error = run(capsys, *NEW, "--config.near.rows=4", code=2)["error"]
    assert (error["fix"], "near.rows was 8" in error["why"]) == ("--config.near.rows=8", True)
    run(capsys, "--config.source=old/*.jsonl", "--config.stages=()", "--config.dedup=exact")
    shutil.move("out", "exact")
    error = run(capsys, *NEW, "--config.against=exact", code=2)["error"]
    assert error["fix"].splitlines() == [
        "run the recipe of exact again with near in its dedup",
        "'--config.dedup=exact,spans'    # skips near duplicates",
    ]
    signatures = before / "signatures/00000.bin"
    signatures.write_bytes(signatures.read_bytes()[:-1] + b"?")
    assert run(capsys, *NEW, code=65)["error"]["where"] == "before/signatures/00000.bin"
    shutil.rmtree("out")
    report = json.loads((before / "report.json").read_text())
    report["files"] = {name: report["files"][name] for name in report["files"] if name[0] == "k"}
    (before / "report.json").write_text(json.dumps(report))
    assert "no signatures" in run(capsys, *NEW, code=66)["error"]["what"]
    (before / "report.json").unlink()
    assert "no report.json" in run(capsys, *NEW, code=66)["error"]["why"]
    assert not Path("out").exists()


def test_clusters_are_shown_with_the_beginnings_of_their_texts(before, here, capsys):
    crawl(here)
    run(capsys, *NEW)
    assert main(["data", "clusters", "out", "--json", "--kind=near", "--characters=30"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["clusters"], answer["removed"]) == (1, 1)
    (cluster,) = answer["shown"]
    assert cluster["kept"]["text"] == prose(2, 400)[:30]
    assert cluster["removed"][0]["text"] == edited(prose(2, 400))[:30]
    assert main(["data", "clusters", "out"]) == 0
    shown = capsys.readouterr().out
    assert "3 clusters, 3 documents removed" in shown
    assert "kept  before/kept/00000.jsonl, record 1: " in shown
    shutil.rmtree("before")
    assert main(["data", "clusters", "out", "--json"]) == 65
    assert "record" in json.loads(capsys.readouterr().out)["error"]["where"]
    assert main(["data", "clusters", "in", "--json"]) == 66
    assert main(["data", "clusters", "out", "--json", "--most=0"]) == 2
