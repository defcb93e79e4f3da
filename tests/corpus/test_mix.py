"""Cleaned corpora as token shards: contents, shares, card, kills, several processes."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.data import manifest
from jaxlm.data.shards import TokenShards
from tests.corpus.recipes import prose, tree, write_lines

ROOT = Path(__file__).parents[2]
SOURCES = "--config.sources=web=web,code=code"
SETTINGS = [SOURCES, "--config.tokenizer=bytes", "--config.unit_bytes=20000"]


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """Two folders of `jaxlm data run`, one with four times the documents; and their texts."""
    place = tmp_path_factory.mktemp("cleaned")
    here = os.getcwd()
    os.chdir(place)
    try:
        texts = {}
        for name, count, begin in (("web", 80, 0), ("code", 20, 1000)):
            for part in range(4):
                rows = [
                    {"text": f"{prose(begin + n)}\nWrite to me{n}@example.org."}
                    for n in range(part * count // 4, (part + 1) * count // 4)
                ]
                write_lines(place / f"raw|{name}/{part}.jsonl", [*rows, {"text": "short"}])
            stages = "length,language,pii" if name == "web" else "length"
            settings = [f"--config.stages={stages}", "--config.unit_bytes=5000"]
            assert main(_clean(name, settings)) == 0
            texts[name] = [row["text"] for row in _rows(name)]
        yield place, texts
    finally:
        os.chdir(here)


def _clean(name, settings):
    Path("recipe.py").write_text(
        "from jaxlm.core import config\nfrom jaxlm.corpus.config import Recipe\n"
        "def get_config():\n    return config.new(Recipe)\n"
    )
    source = f"--config.source=raw|{name}/*.jsonl"
    return ["data", "run", "--config=recipe.py", f"--out={name}", source, "--quiet", *settings]


def _rows(name):
    for path in sorted(Path(name).glob("kept/*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


@pytest.fixture
def sources(cleaned, here):
    """The two folders in the working directory, and their texts."""
    place, texts = cleaned
    for name in ("web", "code"):
        shutil.copytree(place / name, here / name)
    return texts


def mix(capsys, *words, code=0):
    """The answer of `jaxlm data mix` with --out=out."""
    assert main(["data", "mix", "--out=out", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def documents(folder):
    """The texts in a folder of token shards, and where each came from."""
    shards = TokenShards.open(Path(folder))
    lengths = shards.lengths(0, shards.documents).tolist()
    return [
        (shards.tokenizer.decode(shards.read(n, 1, length - 1)), shards.origin(n))
        for n, length in enumerate(lengths)
    ]


def test_every_document_is_in_one_set_and_named_by_its_file_and_line(sources, capsys):
    answer = mix(capsys, *SETTINGS, "--config.held_out=0.2")
    for name, texts in sources.items():
        held = documents(f"out/validation/{name}")
        trained = documents(f"out/train/{name}")
        assert 0 < len(held) < 0.5 * len(texts)
        assert len(held) + len(trained) == len(texts)
        assert {text for text, _ in held + trained} == set(texts)
        assert answer["sets"]["train"][name]["documents"] == len(trained)
        for text, (file, record) in trained:
            assert json.loads(Path(file).read_text().splitlines()[record])["text"] == text
        assert main(["data", "check", f"out/train/{name}", "--quiet"]) == 0
    shares = [each["share"] for each in answer["sets"]["train"].values()]
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(0.8, abs=0.05)


def test_a_source_with_nothing_on_a_side_is_said(sources, capsys):
    words = ["data", "mix", "--out=out", *SETTINGS, "--config.held_out=1e-6"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "the source code has no document in validation: too few are left" in output
    assert "'--config.data.validation=()'" in output
    assert re.search(
        r"next: jaxlm train .* --config\.data\.tokenizer=out/train/\w+/tokenizer\n", output
    )


@pytest.mark.parametrize(("held_out", "validation"), [("0.2", True), ("0", False)])
def test_no_folder_of_a_training_source_is_proposed_for_validation(
    sources, capsys, here, monkeypatch, held_out, validation
):
    """It was the other source of the mix, which is trained on as well."""
    monkeypatch.setenv("JAXLM_CACHE", str(here / "cache"))
    mix(capsys, *SETTINGS, f"--config.held_out={held_out}")
    train = "code=out/train/code,web=out/train/web"
    words = ["data", "stats", f"--config.data.train={train}", "--config.data.sequence=64"]
    words.append("--config.data.tokenizer=bytes")
    if validation:
        expected = "code=out/validation/code,web=out/validation/web"
    else:
        expected = "()"
    for wrong in ("5%", "out/train/code"):
        code = main([*words, f"--config.data.validation={wrong}", "--json"])
        assert code in (2, 65)
        fix = json.loads(capsys.readouterr().out)["error"]["fix"]
        assert shlex.split(fix.partition("#")[0]) == [f"--config.data.validation={expected}"]
    assert main([*words, f"--config.data.validation={expected}"]) == 0


def test_the_sets_are_what_the_trainer_reads(sources, capsys, here, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(here / "cache"))
    settings = [SOURCES, "--config.held_out=0.2", "--config.tokenizer=sentencepiece:512"]
    answer = mix(capsys, *settings)["sets"]
    sets = ["--config.data.train=out/train/*", "--config.data.validation=web=out/validation/web"]
    sets.append("--config.data.tokenizer=out/train/web/tokenizer")
    assert main(["data", "stats", "--json", *sets]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts["train"]["tokens"] == sum(each["tokens"] for each in answer["train"].values())
    assert parts["web"]["tokens"] == answer["validation"]["web"]["tokens"]


def test_weights_leave_documents_out_until_the_shares_are_right(sources, capsys):
    answer = mix(capsys, *SETTINGS, "--config.weights=web=2,code=1")["sets"]["train"]
    assert answer["code"]["documents"] == 20, "the source with least for its weight is whole"
    assert answer["web"]["share"] == pytest.approx(2 / 3, abs=0.08)
    assert answer["web"]["left_out"] == {"by its source's weight": 80 - answer["web"]["documents"]}
    assert "was taken, for the weights" in Path("out/CARD.md").read_text()


def test_a_share_that_is_far_from_its_weight_is_printed(sources, capsys):
    words = ["data", "mix", *SETTINGS]
    assert main([*words, "--out=near", "--config.weights=web=2,code=1"]) == 0
    assert "its weight is" not in capsys.readouterr().out
    assert main([*words, "--out=far", "--config.weights=web=1,code=50"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"the source web has \d\.\d% of the bytes, and its weight is 2\.0%", output)
    assert "--config.data.mixture.weights=web=1,code=50" in output


@pytest.mark.slow
def test_the_bytes_are_the_same_with_any_number_of_processes_and_after_a_kill(sources, capsys):
    settings = [*SETTINGS, "--config.held_out=0.2"]
    mix(capsys, *settings)
    alone = tree(Path("out"))
    assert len(list(Path("out/train/web").glob("tokens-*"))) > 2
    assert not Path("out/unfinished").exists()
    for words, point, code in (
        (["--workers=2"], "", 0),
        ([], "prepare.tokenize:sigkill@2", -signal.SIGKILL),
        ([], "prepare.tokenize:enospc@1", 73),
    ):
        shutil.rmtree("out")
        done = subprocess.run(
            [sys.executable, "-m", "jaxlm", "data", "mix", "--out=out", *settings, *words],
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLM_FAULTS": point},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        if code:
            assert not Path("out/mix.json").exists()
            mix(capsys, *settings)
        assert tree(Path("out")) == alone


@pytest.mark.slow
def test_where_corpora_lie_changes_no_byte_of_their_shards(sources, capsys, here):
    mix(capsys, *SETTINGS, "--config.held_out=0.2")
    made = {side: tree(Path(f"out/{side}")) for side in ("train", "validation")}
    shutil.rmtree("out")
    shutil.copytree("web", here / "elsewhere/crawl")
    moved = "--config.sources=web=elsewhere/crawl,code=code"
    mix(capsys, *SETTINGS, moved, "--config.held_out=0.2")
    assert made == {side: tree(Path(f"out/{side}")) for side in made}


def test_a_finished_mix_is_checked_and_another_is_refused(sources, capsys):
    first = mix(capsys, *SETTINGS)
    Path("out/unfinished").mkdir()
    partial = Path("out/.mix.json.7.tmp")  # of a kill: --copy_to would copy the file
    partial.touch()
    assert mix(capsys, *SETTINGS) == first
    assert not Path("out/unfinished").exists()
    assert not partial.exists()
    error = mix(capsys, *SETTINGS, "--config.held_out=0.1", code=2)["error"]
    assert error["fix"] == "--out=out-2"
    path = Path("out/train/web/tokens-00001.bin")
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert mix(capsys, *SETTINGS, code=65)["error"]["where"] == str(path)


def test_a_source_that_was_changed_or_is_not_finished_is_named(sources, capsys):
    path = Path("web/kept/00001.jsonl")
    path.write_bytes(path.read_bytes().replace(b"river", b"rover", 1))
    assert mix(capsys, *SETTINGS, code=65)["error"]["where"] == str(path)
    shutil.rmtree("out")
    Path("code/report.json").unlink()
    error = mix(capsys, *SETTINGS, code=66)["error"]
    assert error["why"].endswith("`jaxlm data run --out=code` has not finished")
    assert error["fix"] == "repeat the `jaxlm data run` that began it, which continues"
    shutil.rmtree("code")
    assert mix(capsys, *SETTINGS, code=66)["error"]["fix"] == "find . -name report.json"
    assert not Path("out").exists()


def test_a_tokenizer_that_cannot_be_had_is_said_in_our_settings_and_claims_no_folder(
    sources, capsys
):
    error = mix(capsys, SOURCES, "--config.tokenizer=sentencepiece:50000", code=2)["error"]
    assert error["where"] == "tokenizer"
    assert error["fix"].startswith("--config.tokenizer=")
    error = mix(capsys, SOURCES, "--config.tokenizer=nowhere.model", code=66)["error"]
    assert error["fix"].startswith("find . -name '*.model'")
    mix(capsys, *SETTINGS)


def test_a_report_of_another_shape_is_bad_data(sources, capsys):
    path = Path("web/report.json")
    report = json.loads(path.read_text())
    path.write_text(json.dumps({name: report[name] for name in report if name != "funnel"}))
    error = mix(capsys, *SETTINGS, code=65)["error"]
    assert (error["where"], "funnel" in error["why"]) == (str(path), True)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("setting", "message", "fix"),
    [
        ("weights=web=1", "'code' has no weight", "--config.weights=web=1,code=1"),
        ("weights=web=1,cod=3", "'cod' is not a source", "--config.weights=web=1,code=3"),
        ("weights=web=1,code=0", "not a number above 0", "--config.weights=web=1,code=1"),
        ("licences=wiki=CC0-1.0", "'wiki' is not a source", "--config.licences=()"),
        ("sources=web", "'web' is not NAME=VALUE", "jaxlm config explain sources"),
        ("sources=web=a,web=b", "'web' is listed twice", "--config.sources=web=a"),
        ("sources=()", "no sources", "jaxlm config explain sources"),
        ("tokenizer=words", "'words' is none of", "jaxlm config explain tokenizer"),
    ],
)
def test_what_is_wrong_with_a_mix_is_said_with_what_to_paste(
    sources, capsys, setting, message, fix
):
    error = mix(capsys, SOURCES, f"--config.{setting}", code=2)["error"]
    assert message in error["what"] + error["why"]
    assert fix in error["fix"]


def test_the_card_says_sources_licences_funnel_languages_and_personal_data(sources, capsys):
    answer = mix(capsys, *SETTINGS, "--config.licences=web=CC-BY-4.0")
    card = Path("out/CARD.md").read_text()
    web = answer["sets"]["train"]["web"]
    assert f"| train | web | CC-BY-4.0 | {web['documents']} | {web['tokens']:,} |" in card
    assert "| train | code | not stated |" in card
    assert "raw\\|web/0.jsonl" in card
    assert "| length | 84 | 80 | 4.76% | short 4 |" in card
    assert "Languages: en 80." in card
    assert "Personal data: email masked 80." in card
    assert "Personal data: not looked at." in card.partition("## code")[2]
    made = manifest.read(Path("out/train/web"))
    assert answer["tokenizer"] == {"sha256": made.tokenizer, "size": made.vocab}
    assert len(made.tokenizer) == 64
    assert made.tokenizer in card


def test_the_card_says_how_many_documents_went_for_personal_data(here, capsys):
    rows = [{"text": prose(n) + ("\nWrite to me@example.org." if n < 3 else "")} for n in range(9)]
    write_lines(here / "raw|few/a.jsonl", rows)
    assert main(_clean("few", ["--config.stages=pii", "--config.pii.action=remove"])) == 0
    capsys.readouterr()
    mix(capsys, "--config.sources=few=few", "--config.tokenizer=bytes", "--config.held_out=0")
    assert "Personal data: none left; 3 documents removed." in Path("out/CARD.md").read_text()


def test_a_disk_that_is_full_of_shards_ends_with_73_and_what_helps(sources, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("jaxlm.data.writer.BlockWriter.write", full)
        error = mix(capsys, *SETTINGS, code=73)["error"]
    assert "No space left" in error["why"]
    assert "the same command again" in error["fix"]
    assert mix(capsys, *SETTINGS)["sets"]["train"]["web"]["documents"] == 80
