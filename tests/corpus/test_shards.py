"""From raw text to token shards with one recipe: contents, parts, kills, changed shards."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.data.shards import TokenShards
from tests.corpus.recipes import kept, lines, prose, run, tree, write_lines

ROOT = Path(__file__).parents[2]
RECIPE = """
from jaxlm.core import config
from jaxlm.corpus.config import Recipe

def get_config():
    c = config.new(Recipe)
    c.source = ("crawl/**/*.jsonl", "crawl/**/*.txt")
    c.parts = ("web=crawl/web/*", "books=*.txt")
    c.stages = ("normalize", "length", "decontaminate", "pii")
    c.dedup = ("exact", "near")
    c.decontaminate.against = ("sets/*.jsonl",)
    c.unit_bytes = 6000
    c.shards.tokenizer = "bytes"
    c.shards.weights = ("web=2", "books=1")
    c.shards.licences = ("web=CC-BY-4.0",)
    c.shards.held_out = 0.2
    c.shards.unit_bytes = 8000
    return c
"""
ANSWER = prose(2000)


@pytest.fixture
def crawl(here):
    """Raw pages and books with duplicates across parts, a leaked evaluation set, and a recipe."""
    for part in range(3):
        rows = [{"text": f"{prose(part * 20 + n)}\nWrite to me{n}@example.org."} for n in range(20)]
        write_lines(
            here / f"crawl/web/{part}.jsonl",
            [*rows, {"text": "short"}, {"text": prose(1003)}, {"text": f"Leaked. {ANSWER}"}],
        )
    for number in range(20):
        (here / f"crawl/{number:02d}.txt").write_text(prose(1000 + number))
    write_lines(here / "sets/a.jsonl", [{"text": ANSWER}])
    (here / "corpus.py").write_text(RECIPE)
    return here


def made(capsys, *words, code=0):
    """The answer of `jaxlm data run` with that recipe."""
    assert main(["data", "run", "--config=corpus.py", "--out=out", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def documents(folder):
    """The texts in a folder of token shards."""
    shards = TokenShards.open(Path(folder))
    lengths = shards.lengths(0, shards.documents).tolist()
    return [shards.tokenizer.decode(shards.read(n, 1, size - 1)) for n, size in enumerate(lengths)]


@pytest.mark.slow
def test_one_command_leads_from_a_raw_crawl_to_mixed_shards_that_train(crawl, capsys, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(crawl / "cache"))
    answer = made(capsys)
    assert answer["removed"]["decontaminate.shared"] == 3, answer["removed"]
    assert answer["removed"]["exact"] == 3, "pages that are books, or pages, too"
    web, books = answer["parts"]["web"], answer["parts"]["books"]
    assert (web["kept"], books["kept"]) == (61, 19), "of duplicates that of the first part stays"
    for name in ("read", "kept"):
        assert web[name] + books[name] == answer[name]
    sets = answer["shards"]["sets"]
    assert sets["train"]["web"]["share"] == pytest.approx(2 / 3, abs=0.12), "of 80 documents"
    assert sets["train"]["web"]["left_out"]["by its source's weight"] > 5
    written = [
        text
        for side in sets
        for name in sets[side]
        for text in documents(f"out/shards/{side}/{name}")
    ]
    assert len(written) == len(set(written))
    assert set(written) < set(kept()), "the rest was left out by weight"
    assert not any(ANSWER in text or "@example" in text for text in written)
    card = Path("out/shards/CARD.md").read_text()
    assert "Raw: 20 files" in card
    assert "crawl/00.txt" in card.partition("## books")[2]
    assert "crawl/00.txt" not in card.partition("## web")[2].partition("## books")[0]
    assert "| train | web | CC-BY-4.0 |" in card
    assert f"Personal data: email masked {web['notes']['pii: email masked']}." in card
    sets_read = ["--config.data.train=out/shards/train/*", "--config.data.sequence=64"]
    sets_read += ["--config.data.validation=books=out/shards/validation/books"]
    sets_read += ["--config.data.tokenizer=out/shards/train/web/tokenizer"]
    assert main(["data", "stats", "--json", *sets_read]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts["train"]["tokens"] == sum(each["tokens"] for each in sets["train"].values())


@pytest.mark.slow
def test_a_kill_in_tokenising_changes_no_byte(crawl, capsys):
    words = [sys.executable, "-m", "jaxlm", "data", "run", "--config=corpus.py", "--out=out"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAXLM_FAULTS": "prepare.tokenize:sigkill@1",
    }
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Path("out/report.json").exists()
    assert not Path("out/shards/mix.json").exists()
    resumed = made(capsys)
    after = tree(Path("out"))
    shutil.rmtree("out")
    whole = made(capsys)
    assert tree(Path("out")) == after
    assert not list(Path("out").rglob("unfinished"))
    for answer in (resumed, whole):
        del answer["speed"]
    assert resumed == whole


def test_other_shards_need_no_other_cleaning(crawl, capsys):
    made(capsys)
    cleaned = {name: data for name, data in tree(Path("out")).items() if name[:7] != "shards/"}
    error = made(capsys, "--config.shards.held_out=0.1", code=2)["error"]
    assert "belongs to another mix" in error["what"]
    assert error["fix"].startswith("jaxlm data mix '--config.sources=web=out!web,books=out!books'")
    assert "--config.held_out=0.1" in error["fix"]
    command = shlex.split(error["fix"])[1:]
    assert main([*command, "--quiet"]) == 0
    books = [documents(f"out-shards/{side}/books") for side in ("train", "validation")]
    assert sum(map(len, books)) == 19 > len(books[0])  # as many are held out as were asked for
    assert cleaned.items() <= tree(Path("out")).items()


def test_a_part_of_which_nothing_stays_has_no_shards_and_is_said(crawl, capsys):
    for path in crawl.glob("crawl/*.txt"):
        path.write_text("short")
    answer = made(capsys)
    assert list(answer["shards"]["sets"]["train"]) == ["web"]
    assert answer["parts"]["books"]["kept"] == 0
    shutil.rmtree("out")
    assert main(["data", "run", "--config=corpus.py", "--out=out"]) == 0
    assert "the part books kept no documents: it gets no shards" in capsys.readouterr().out
    write_lines(crawl / "in/a.jsonl", [{"text": "short"}])
    words = ("--config.source=in/*", "--config.shards.tokenizer=bytes", "--out=none")
    assert "kept no documents" in run(capsys, *words, code=65)["error"]["what"]


def test_a_recipe_without_parts_makes_one_set_and_copies_it(here, capsys):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    write_lines(here / "in/a.jsonl", [{"text": prose(n)} for n in range(6)])
    words = ("--config.source=in/*", "--config.shards.tokenizer=bytes")
    run(capsys, *words)
    try:
        for _ in range(2):
            answer = run(capsys, *words, "--copy_to=memory://made")
            files = {
                path.removeprefix("/made/"): store.cat_file(path) for path in store.find("/made")
            }
            assert files == {n: d for n, d in tree(Path("out")).items() if n[:6] != "units/"}
    finally:
        store.rm("/made", recursive=True)
    assert answer["shards"]["sets"]["train"]["text"]["documents"] == 6 == len(lines("kept/*.jsonl"))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "code", "message", "fix"),
    [
        (
            ["shards.tokenizer=words"],
            2,
            "'words' is none of",
            "jaxlm config explain shards.tokenizer",
        ),
        (["shards.tokenizer=none.model"], 66, "", "find . -name '*.model'"),
        (
            ["shards.weights=web=1"],
            2,
            "'books' has no weight",
            "--config.shards.weights=web=1,books=1",
        ),
        (
            ["shards.licences=wiki=MIT"],
            2,
            "'wiki' is not a source; the sources are web, books",
            "--config.shards.licences=()",
        ),
        (["shards.tokenizer="], 2, "without a tokenizer", "jaxlm config explain shards.tokenizer"),
        (["parts=web=crawl/web/*,x"], 2, "'x' is not NAME=VALUE", "--config.parts=web=crawl/web/*"),
        (
            ["parts=web=crawl/web/*", "shards.weights=()"],
            2,
            "crawl/00.txt matches none of crawl/web/*",
            "--config.parts='web=crawl/web/*,other=*'",
        ),
        (
            ["parts=web=*,books=*.txt"],
            2,
            "the part 'books' has no file",
            "--config.parts='web=*'",
        ),
    ],
)
def test_what_is_wrong_with_parts_and_shards_is_said_before_anything_is_cleaned(
    crawl, capsys, words, code, message, fix
):
    flags = [f"--config.{word}" for word in words]
    error = made(capsys, *flags, code=code)["error"]
    assert message in error["what"] + error["why"]
    assert fix in error["fix"]
    assert not Path("out").exists()
