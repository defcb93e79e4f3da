"""`jaxlm data`: peek, stats, tokenize, check, on files of a user."""

import errno
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from tests.data import chat_families

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with some texts, and a cache of our own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(
            f"document {number}, \x1b[31mred\n" * 5
        )


SETTINGS = [
    "--config.data.train=texts/*.txt",
    "--config.data.validation=10%",
    "--config.data.tokenizer=bytes",
    "--config.data.sequence=64",
]


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    """The JSON output of a verb."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_peek_marks_what_is_trained_on_and_names_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", "peek", "--rows=2", *SETTINGS]) == 0
    shown = capsys.readouterr().out
    assert shown.count("row 1, segment 1: texts/") == 1
    assert "\u00ab" in shown
    assert "\x1b" not in shown


# A conversation of two exchanges, with what is trained on marked.
SHOWN = {
    "llama 3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    "1+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "\u00ab2 \u20ac<|eot_id|>\u00bb<|start_header_id|>user<|end_header_id|>\n\n"
    "Sure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n\u00abYes.<|eot_id|>\u00bb",
    "chatml": "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    "\u00ab2 \u20ac<|im_end|>\u00bb\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    "\u00abYes.<|im_end|>\u00bb\n",
    "gemma": "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n"
    "\u00ab2 \u20ac<end_of_turn>\u00bb\n<start_of_turn>user\nSure?<end_of_turn>\n"
    "<start_of_turn>model\n\u00abYes.<end_of_turn>\u00bb\n",
    "mistral": "<s>[INST] 1+1? [/INST]\u00ab 2 \u20ac</s>\u00bb[INST] Sure? [/INST]\u00ab "
    "Yes.</s>\u00bb",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SHOWN)
def test_peek_marks_the_answer_and_the_token_that_ends_it_in_the_template_of_each_family(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    family = chat_families.FAMILIES[name]
    (tmp_path / "tokenizer.json").write_bytes(chat_families.tokenizer(family).serialize())
    template = chat_families.template(family, has_marks=False)
    (tmp_path / "chat.jinja").write_text(template.source)
    contents = ["1+1?", "2 \u20ac", "Sure?", "Yes."]
    roles = ["user", "assistant"] * 2
    turns = [{"role": r, "content": text} for r, text in zip(roles, contents, strict=True)]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    settings = {"train": "chat.jsonl", "kind": "chat", "template": "chat.jinja", "sequence": 256}
    settings |= {"tokenizer": "tokenizer.json", "validation": "()"}
    flags = [f"--config.data.{key}={value}" for key, value in settings.items()]
    words = ["data", "peek", "--rows=1", "--config.train.batch=1", *flags]
    ((segment,),) = answer(capsys, *words)["rows"]
    assert segment == {"source": "chat.jsonl, line 1", "text": SHOWN[name]}


def test_stats_count_every_document(capsys: pytest.CaptureFixture[str]) -> None:
    parts = answer(capsys, "data", "stats", *SETTINGS)["parts"]
    assert parts["train"]["documents"] + parts["val"]["documents"] == 40
    assert parts["train"]["bytes_per_token"] == 1


def test_tokenised_folders_are_whole_and_can_be_trained_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = answer(capsys, "data", "tokenize", "--out=out", *SETTINGS)
    folder = written["train"]["folder"]
    assert answer(capsys, "data", "check", folder)["documents"] == written["train"]["documents"]
    flags = ["--config.data.train=out/train", "--config.data.validation=out/val", *SETTINGS[2:]]
    assert (
        answer(capsys, "data", "stats", *flags)["parts"]["train"]["tokens"]
        == written["train"]["tokens"]
    )
    path = Path(folder, "tokens-00000.bin")
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert "digest" in answer(capsys, "data", "check", folder, code=65)["error"]["what"]


@pytest.mark.slow
def test_a_tokenised_mixture_is_the_same_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    sources = "a=texts/0*.txt,b=texts/[1-3]*.txt"
    mixed = [f"--config.data.train={sources}", *SETTINGS[1:]]
    before = answer(capsys, "data", "stats", *mixed)["parts"]
    assert main(["data", "tokenize", "--out=out", *mixed]) == 0
    (line,) = re.findall("next: jaxlm train (.*)", capsys.readouterr().out)
    defaults = ["--config.train.steps=1000", "--config.train.batch=32"]  # not the quickstart's
    after = answer(capsys, "data", "stats", *shlex.split(line), *defaults)["parts"]
    assert {"train/a", "train/b", "val_a", "val_b"} < set(after)
    for name, part in before.items():
        known = {"tokens", "documents", "share", "epochs"} & set(part)
        assert {what: part[what] for what in known} == {what: after[name][what] for what in known}


@pytest.mark.slow
def test_a_second_tokenize_into_the_same_folder_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(capsys, "data", "tokenize", "--out=out", *SETTINGS)
    error = answer(capsys, "data", "tokenize", "--out=out", *SETTINGS, code=65)["error"]
    answer(capsys, "data", "tokenize", error["fix"], *SETTINGS)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("tokenize", "--out=out"), "choose a writable --out folder"),
        (("stats",), "export JAXLM_CACHE="),
    ],
    ids=["of a folder", "of the cache"],
)
def test_a_full_disk_names_the_setting_of_the_folder_that_is_full(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    fix: str,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jaxlm.data.writer.BlockWriter.write", full)
    error = answer(capsys, "data", *words, *SETTINGS, code=73)["error"]
    assert "No space left" in error["why"]
    assert error["fix"].startswith(fix)


def test_no_match_ends_with_66(capsys: pytest.CaptureFixture[str]) -> None:
    error = answer(capsys, "data", "stats", "--config.data.train=nowhere/*.txt", code=66)["error"]
    assert "nowhere/*.txt" in error["what"]


def test_tokenising_shows_a_bar_on_a_terminal_that_is_gone_at_its_end(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    done = subprocess.Popen(
        [sys.executable, "-m", "jaxlm", "data", "tokenize", "--out=out", *SETTINGS],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    output, _ = done.communicate()
    assert done.returncode == 0, shown.decode()
    assert "\x1b" not in output
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    for part in ("train", "val"):
        assert re.search(rf"tokenizing {part} +\S+ +(\S+)/\1 ", text), text
    assert f"{size / 1000:.1f} kB" in text
    assert shown.rstrip().endswith(b"\x1b[2K"), "erased"


def _read(terminal: int) -> bytes:
    """Text that was written to a pipe; empty once its other side is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
