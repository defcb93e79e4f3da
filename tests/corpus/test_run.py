"""A recipe from the command line: results, removals, kills, several processes, samples."""

import contextlib
import html.parser
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import NotWritable
from jaxlm.corpus.run import output_folder
from tests.corpus.recipes import (
    RECIPE,
    kept,
    lines,
    prose,
    removed,
    run,
    tree,
    write_lines,
)

ROOT = Path(__file__).parents[2]
ALL = [
    "--config.source=in/*.jsonl",
    "--config.stages=normalize,length,gopher,repetition,pii",
    "--config.dedup=exact,near,spans",
    "--config.unit_bytes=4000",
]


@pytest.fixture
def crawl(here):
    """Six files: prose, duplicates of all kinds within and across them, short and broken ones."""
    for number in range(6):
        rows = [
            {"text": prose(number * 10 + n), "url": f"http://a.example/{number}/{n}"}
            for n in range(4)
        ]
        rows += [{"text": prose(3)}, {"text": "too short"}, {"text": " \n"}, {"words": "none"}]
        rows += [{"text": prose(900 + number) + f"\n\nWrite to someone{number}@example.org."}]
        rows += [{"text": prose(500, words=240) + f"\nAnd one more line of number {number}."}]
        rows += [{"text": f"{prose(700 + number)}\n\n{prose(600)}\n\n{prose(800 + number)}"}]
        write_lines(here / f"in/{number}.jsonl", rows)
        with open(here / f"in/{number}.jsonl", "ab") as file:
            file.write(b'{"text": "cut\n\xff\xfe\n')
    return here


def test_every_document_is_kept_removed_or_broken_and_the_files_hold_what_the_counts_say(
    crawl, capsys
):
    answer = run(capsys, *ALL)
    assert answer["read"] == 6 * 13
    assert answer["broken"] == {"not JSON": 6, "not UTF-8": 6, "without the text key": 6}
    assert answer["removed"]["length.short"] == answer["removed"]["read.blank"] == 6
    assert answer["read"] == answer["kept"] + sum(answer["removed"].values()) + 18
    assert len(kept()) == answer["kept"]
    assert {name: len(rows) for name, rows in removed().items()} == answer["removed"]
    assert len(lines("broken/*.jsonl")) == 18
    assert sum(map(len, kept())) == answer["characters"]["kept"]
    funnel = answer["funnel"]
    assert [row["stage"] for row in funnel] == [
        *("read", "normalize", "length", "gopher", "repetition", "pii", "exact", "near", "spans")
    ]
    assert all(before["out"] == after["in"] for before, after in itertools.pairwise(funnel))
    assert funnel[-1]["out"] == answer["kept"]
    for row in funnel:
        assert row["in"] - row["out"] == sum(row["reasons"].values())
        assert row["share"] == pytest.approx(1 - row["out"] / row["in"]), "of what came to it"
    assert len([row for row in funnel if row["share"]]) == 4


def test_a_document_that_is_lost_on_the_way_ends_the_run_with_70(crawl, capsys, monkeypatch):
    """A stage that forgets to write what it removes, as a mistake of ours would."""
    monkeypatch.setattr("jaxlm.corpus.unit._UnitOutput.remove", lambda *_: None)
    error = run(capsys, *ALL, code=70)["error"]
    assert error["where"] == "unit 0"
    assert "0 removed" in error["why"]
    assert not Path("out/report.json").exists()


def test_what_is_removed_is_kept_with_its_place_its_reason_and_its_meta(crawl, capsys):
    run(capsys, *ALL)
    short = removed()["length.short"][0]
    assert (short["text"], short["file"], short["record"]) == ("too short", "in/0.jsonl", 6)
    assert (short["reason"], short["detail"]) == ("length.short", "9 characters")
    assert lines("kept/*.jsonl")[0]["meta"] == {"url": "http://a.example/0/0"}
    broken = lines("broken/*.jsonl")
    assert [(row["record"], row["kind"]) for row in broken if row["file"] == "in/2.jsonl"] == [
        (8, "without the text key"),
        (12, "not JSON"),
        (13, "not UTF-8"),
    ]


def test_the_first_of_duplicates_stays_whatever_the_units(crawl, capsys):
    run(capsys, *ALL)
    exact = [cluster for cluster in lines("clusters.jsonl") if cluster["kind"] == "exact"]
    # The prose of seed 3 is record 4 of the first file, and the fifth of every file.
    assert exact[0]["kept"] == {"file": "in/0.jsonl", "record": 4}
    assert [(each["file"], each["record"]) for each in exact[0]["removed"]] == [
        (f"in/{number}.jsonl", 5) for number in range(6)
    ]
    near = [cluster for cluster in lines("clusters.jsonl") if cluster["kind"] == "near"]
    assert [cluster["kept"]["file"] for cluster in near] == ["in/0.jsonl"]
    assert len(near[0]["removed"]) == 5
    shared = prose(600)
    assert sum(shared in text for text in kept()) == 1
    assert shared in kept()[[prose(700) in text for text in kept()].index(True)]
    assert not any("@example.org" in text for text in kept())


def test_the_bytes_are_the_same_in_any_units_order_and_number_of_processes(crawl, capsys):
    one = run(capsys, *ALL)
    first = tree(Path("out"))
    assert len(list(Path("out/units").iterdir())) > 2
    assert not Path("out/unfinished").exists()
    shutil.rmtree("out")
    run(capsys, *ALL, "--workers=2")
    assert tree(Path("out")) == first
    shutil.rmtree("out")
    whole = run(capsys, *ALL, "--config.unit_bytes=1e9")
    assert len(list(Path("out/units").iterdir())) == 1
    assert {name: whole[name] for name in ("removed", "kept", "notes")} == {
        name: one[name] for name in ("removed", "kept", "notes")
    }


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    Path("recipe.py").write_text(RECIPE)
    return subprocess.run(
        [sys.executable, "-m", "jaxlm", "data", "run", "--config=recipe.py", *ALL, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "point", ["prepare.clean:sigkill@1", "prepare.merge:sigkill", "prepare.finish:sigkill@1"]
)
def test_a_killed_run_goes_on_to_the_same_bytes(crawl, capsys, point):
    assert command("--out=out", JAXLM_FAULTS=point).returncode == -signal.SIGKILL
    assert not Path("out/report.json").exists()
    begun = {path: path.stat().st_mtime_ns for path in Path("out").rglob("done.json")}
    Path("out/.report.json.7.tmp").touch()  # of a kill while the report was written
    run(capsys, *ALL)
    assert begun or point.startswith("prepare.clean")
    whole = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *ALL)
    assert tree(Path("out")) == whole


@pytest.mark.few(1)
@pytest.mark.parametrize("point", ["prepare.clean:sigkill@2", "prepare.finish:sigkill@1"])
def test_a_file_that_was_written_while_the_run_was_stopped_is_read_again_or_told(
    crawl, capsys, point
):
    """It has as many bytes as before: its name and its size do not show the change."""
    assert command("--out=out", JAXLM_FAULTS=point).returncode < 0
    changed = Path("in/0.jsonl")
    text = changed.read_bytes()
    assert b"Write to someone0@" in text
    changed.write_bytes(text.replace(b"Write to someone0@", b"Reach at someone0@"))
    assert Path("out/unfinished/00000").exists()
    done = command("--out=out")
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    begun = "in/0.jsonl changed after it was read"
    if point.startswith("prepare.finish"):
        assert f"{begun}; its old contents are kept" in output
        assert "--out=out-2" in output
        assert not any("Reach at" in text for text in kept())
        return
    assert f"{begun}: unit 0 is cleaned again" in output
    whole = tree(Path("out"))
    assert any("Reach at" in text for text in kept())
    shutil.rmtree("out")
    run(capsys, *ALL)
    assert tree(Path("out")) == whole


def test_bars_get_the_bytes_that_are_done_and_go_on_where_it_was_stopped(
    crawl, capsys, monkeypatch
):
    """The bar on a terminal derives rates and the remaining time: tests/cli/test_data.py."""
    progress: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        "jaxlm.cli.data.progress_bars",
        lambda out: contextlib.nullcontext(lambda *each: progress.append(each)),
    )
    assert command("--out=out", JAXLM_FAULTS="prepare.clean:sigkill@1").returncode < 0
    run(capsys, *ALL)
    total = sum(path.stat().st_size for path in Path("in").iterdir())
    units = [json.loads(path.read_text()) for path in sorted(Path("out/units").iterdir())]
    sizes = [sum(size for _, size in unit["inputs"]) for unit in units]
    done = list(itertools.accumulate(sizes))
    assert len(done) > 2
    assert progress == [
        *(("cleaning", size, total) for size in done[1:]),
        *(("writing", size, total) for size in done),
    ]


def test_a_full_disk_ends_with_73_and_the_same_command_goes_on(crawl, capsys):
    done = command("--out=out", JAXLM_FAULTS="prepare.clean:enospc@1")
    assert done.returncode == 73
    assert "No space left" in done.stderr
    assert "the same command again" in done.stderr
    answer = run(capsys, *ALL)
    assert answer["read"] == 6 * 13


def test_a_killed_worker_is_replaced_and_nothing_is_lost(crawl, capsys):
    Path("recipe.py").write_text(RECIPE)
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxlm",
            "data",
            "run",
            "--config=recipe.py",
            *ALL,
            "--out=out",
            "--workers=2",
            "--quiet",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLM_FAULTS": "prepare.clean:sleep=0.5@1"},
        stdout=subprocess.PIPE,
    )
    partial = Path("out/unfinished/.00001.partial/done.json")
    while not partial.exists():
        assert running.poll() is None
        time.sleep(0.01)
    workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    killed = 0
    for pid in workers:
        # Another may have done all else, and be gone.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)
                killed += 1
    assert killed
    running.communicate()
    assert running.returncode == 0
    whole = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *ALL)
    assert tree(Path("out")) == whole


def test_a_unit_that_kills_every_worker_is_named_when_the_others_are_done(crawl):
    done = command("--out=out", "--workers=2", JAXLM_FAULTS="prepare.clean:sigkill@1")
    assert done.returncode == 69
    assert "unit 1" in done.stderr
    names = {path.name for path in Path("out/unfinished").iterdir()}
    assert {"00000", "00002", "00003"} <= names
    assert "00001" not in names


def test_a_finished_run_is_checked_and_not_done_again(crawl, capsys):
    run(capsys, *ALL)
    before = tree(Path("out"))
    repeated = run(capsys, *ALL)
    assert repeated["speed"]["bytes"] == 0
    assert tree(Path("out")) == before
    path = Path("out/kept/00000.jsonl")
    path.write_bytes(path.read_bytes().replace(b"river", b"rover", 1))
    error = run(capsys, *ALL, code=65)["error"]
    assert error["where"] == "out/kept/00000.jsonl"


def test_a_file_that_was_written_after_the_end_of_a_run_is_named(crawl, capsys):
    """It has as many bytes as before: the folder has the old ones, and is not written again."""
    run(capsys, *ALL)
    before = tree(Path("out"))
    done = command("--out=out")
    assert "changed after it was read" not in done.stdout + done.stderr
    changed = Path("in/0.jsonl")
    changed.write_bytes(changed.read_bytes().replace(b"someone0@", b"another0@"))
    done = command("--out=out")
    assert done.returncode == 0, done.stderr
    line = "in/0.jsonl changed after it was read; its old contents are kept"
    assert line in done.stdout + done.stderr
    assert "--out=out-2" in done.stdout + done.stderr
    assert tree(Path("out")) == before


def test_another_recipe_or_other_files_are_refused_with_what_differs(crawl, capsys):
    run(capsys, *ALL)
    error = run(capsys, *ALL, "--config.length.least=300", code=2)["error"]
    assert "length.least: 200 -> 300" in error["why"]
    write_lines(Path("in/7.jsonl"), [{"text": prose(1)}])
    assert run(capsys, *ALL, code=2)["error"]["why"] == "files differ"
    Path("elsewhere").mkdir()
    Path("elsewhere/notes.txt").write_text("mine")
    error = run(capsys, *ALL, "--out=elsewhere", code=65)["error"]
    assert error["fix"] == "--out=elsewhere-2"
    assert [path.name for path in Path("elsewhere").iterdir() if path.name != ".lock"] == [
        "notes.txt"
    ]


def test_a_kill_before_anything_was_noted_leaves_a_folder_that_can_be_used(crawl, capsys):
    Path("out").mkdir()
    Path("out/.recipe.json.7.tmp").write_text('{"format_ver')
    run(capsys, *ALL)
    Path("out/report.json").unlink()
    Path("out/recipe.json").write_text('{"format_ver')
    assert run(capsys, *ALL, code=65)["error"]["where"] == "out/recipe.json"


def test_what_is_kept_can_be_trained_on(crawl, capsys, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(crawl / "cache"))
    answer = run(capsys, *ALL)
    words = ["--config.data.train=out/kept/*.jsonl", "--config.data.validation=tail:10%"]
    assert main(["data", "stats", "--json", *words, "--config.data.tokenizer=bytes"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts["train"]["documents"] == answer["kept"]


def test_a_recipe_that_keeps_nothing_names_the_fields_and_no_run(here, capsys):
    Path("recipe.py").write_text(RECIPE)
    Path("table.csv").write_text("id,body\n1,some text\n2,more of it\n")
    words = ["data", "run", "--config=recipe.py", "--config.source=table.csv"]
    assert main([*words, "--out=out"]) == 0
    output = capsys.readouterr().out
    assert "jaxlm train" not in output
    assert "next: --config.text_key=FIELD --out=out-2" in output
    assert "record 1 of table.csv has no 'text': it has id, body" in output
    assert main([*words, "--config.text_key=body", "--config.stages=length", "--out=two"]) == 0
    assert "next: fewer or weaker --config.stages" in capsys.readouterr().out


def test_a_second_process_is_refused_while_one_runs(crawl, capsys):
    import fcntl

    Path("out").mkdir()
    with open("out/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "lock" in run(capsys, *ALL, code=77)["error"]["why"]


def test_the_fix_of_an_output_folder_is_one_that_can_be_made(crawl, capsys):
    error = run(capsys, *ALL, "--out=/proc/jaxlm/out", code=73)["error"]
    assert error["fix"] == "--out=out-2", "/proc/jaxlm/out-2 cannot be made either"
    Path("file").touch()
    assert run(capsys, *ALL, "--out=file", code=73)["error"]["fix"] == "--out=file-2"


def test_an_error_of_another_file_is_not_one_of_the_output_folder(tmp_path):
    with pytest.raises(FileNotFoundError), output_folder(tmp_path / "out"):
        (tmp_path / "source.txt").read_text()
    with pytest.raises(NotWritable) as caught, output_folder(tmp_path / "out"):
        (tmp_path / "out/x/y").touch()
    assert caught.value.where == str(tmp_path / "out/x/y")


def test_a_sample_reads_its_share_and_says_how_sure_it_is(here, capsys):
    write_lines(
        here / "in/a.jsonl", [{"text": prose(n) if n % 4 else "short"} for n in range(2000)]
    )
    settings = ["--config.source=in/*.jsonl", "--config.dedup=()", "--sample=20%"]
    answer = run(capsys, *settings)
    assert 340 <= answer["read"] <= 460
    row = next(row for row in answer["funnel"] if row["stage"] == "length")
    low, high = row["interval"]
    assert low < 0.25 < high
    assert high - low == pytest.approx(2 * 1.96 * (0.25 * 0.75 / 400) ** 0.5, rel=0.15)
    low, high = answer["funnel"][1]["interval"]
    assert (low, 0 < high < 0.02) == (0, True), "nothing found is not nothing there"
    first = tree(Path("out"))
    shutil.rmtree("out")
    run(capsys, *settings)
    assert tree(Path("out")) == first
    shutil.rmtree("out")
    assert "at most 100%" in run(capsys, *settings, "--sample=0%", code=2)["error"]["why"]


def test_of_a_sample_files_of_one_document_are_not_opened_in_vain(here, capsys):
    (here / "in").mkdir()
    for number in range(200):
        data = f"Caf\u00e9 num\u00e9ro {number}.".encode("latin-1")
        (here / f"in/{number}.txt").write_bytes(data if number % 2 else b"\x7fELF")
    words = ["--config.stages=()", "--config.dedup=()", "--sample=20%", "--config.unit_bytes=1e9"]
    answer = run(capsys, "--config.source=in/*", *words)
    assert 20 < answer["read"] < 60
    assert answer["notes"] == {"read as cp1252": answer["kept"]}, "no note of the others"
    assert answer["broken"] == {"not text": answer["read"] - answer["kept"]}


def test_of_a_sample_the_share_of_duplicates_is_a_lower_bound_and_said_to_be(here, capsys):
    rows = [{"text": prose(n % 300)} for n in range(600)]
    write_lines(here / "in/a.jsonl", rows)
    settings = ["--config.source=in/*.jsonl", "--config.dedup=exact", "--sample=20%"]
    row = run(capsys, *settings)["funnel"][-1]
    assert (row["stage"], row["at_least"]) == ("exact", True)
    assert "interval" not in row
    assert row["share"] < 0.25, "half of all are duplicates"
    assert (
        "duplicates of records outside the sample are not found"
        in Path("out/report.html").read_text()
    )


def test_the_page_shows_the_funnel_reasons_and_samples_and_runs_nothing_of_theirs(here, capsys):
    hostile = "<script>alert(1)</script>\x1b[31m&amp;"
    rows = [{"text": f"{prose(n)} {hostile}"} for n in range(4)]
    write_lines(here / "in/<b>.jsonl", [*rows, {"text": hostile}, {"words": 1}])
    answer = run(capsys, "--config.source=in/*.jsonl", "--config.stages=length")
    page = Path("out/report.html").read_text()
    parsed = Page(page)
    assert set(parsed.tags) <= set(
        "html head meta title style body h1 h2 p div table tr th td i details summary pre nav ul li"
        " a".split()
    )
    assert parsed.links == ["#funnel", "#by-characters", "#reasons", "#kept", "#broken"]
    assert all(f'id="{link[1:]}"' in page for link in parsed.links)
    assert "\x1b" not in page
    output = "".join(parsed.text)
    for row in answer["funnel"]:
        assert f"{row['stage']}{row['in']:,}{row['out']:,}{row['share']:.2%}" in output
    assert "length.short: 1 of 6, 16.67%" in output
    assert f"in/<b>.jsonl, record 5 · length.short · {len(hostile)} characters" in output
    assert "without the text key" in output
    assert output.count("<script>alert(1)</script>\\x1b[31m&amp;") == 4, "three kept, one removed"


class Page(html.parser.HTMLParser):
    """The tags, links and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.links, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "onload")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_table_names_stages_reasons_and_the_next_command(crawl, capsys):
    Path("recipe.py").write_text(RECIPE)
    assert main(["data", "run", "--config=recipe.py", "--out=out", *ALL]) == 0
    shown = capsys.readouterr().out
    assert "length" in shown
    assert "short 6" in shown
    assert "--config.data.train=out/kept/*.jsonl" in shown


def test_what_a_recipe_lacks_is_said_before_anything_is_done(here, capsys):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    source = "--config.source=in/*.jsonl"
    error = run(capsys, "--config.source=nowhere/*", code=66)["error"]
    assert error["fix"] == "ls ."
    error = run(capsys, source, "--config.stages=length,length", code=2)["error"]
    assert error["fix"] == "--config.stages=length"
    error = run(capsys, source, "--config.stages=decontaminate", code=2)["error"]
    assert error["fix"] == "jaxlm config explain decontaminate.against"
    error = run(capsys, source, "--config.stages=lenght", code=2)["error"]
    assert "length" in error["why"] + error["what"]
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("stage", "package"), [("mojibake", "ftfy"), ("language", "py3langid.langid")]
)
def test_a_stage_without_its_package_says_what_to_install(
    here, capsys, monkeypatch, stage, package
):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    monkeypatch.setitem(sys.modules, package, None)
    error = run(capsys, "--config.source=in/*.jsonl", f"--config.stages={stage}", code=66)["error"]
    assert error["fix"] == f"{sys.executable} -m pip install 'jaxlm[prepare]'"


def test_the_report_of_a_run_is_its_answer(crawl, capsys):
    answer = run(capsys, *ALL)
    report = json.loads(Path("out/report.json").read_text())
    assert {name: report[name] for name in report if name != "files"} == {
        name: answer[name] for name in report if name != "files"
    }
    assert set(report["files"]) == {
        name
        for name in tree(Path("out"))
        if name.partition("/")[0] in ("kept", "removed", "broken", "cut", "signatures")
    }


def test_histograms_count_each_kept_and_removed_document_once(here, capsys):
    texts = [prose(n % 40) for n in range(60)] + ["x" * 5, "y" * 9]
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts])
    answer = run(
        capsys, "--config.source=in/*.jsonl", "--config.stages=length", "--config.dedup=exact"
    )
    rows = answer["histograms"]["characters"]
    assert [int(name) for name in rows] == sorted(int(name) for name in rows)
    assert rows["4"] == {"kept": 0, "removed": 1}
    assert rows["8"] == {"kept": 0, "removed": 1}
    sums = {name: sum(row[name] for row in rows.values()) for name in ("kept", "removed")}
    assert sums == {"kept": 40, "removed": 22}
    assert "Documents by characters" in Path("out/report.html").read_text()
