"""`jaxlm tokenizer`: train and show."""

import json
from pathlib import Path

import pytest

from jaxlm.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a text, and a cache of our own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    Path("a.txt").write_text(
        "".join(f"line {n}: some words of number {n * n}\n" for n in range(300))
    )
    Path("v.txt").write_text("held out")


SETTINGS = ["--config.data.train=a.txt", "--config.data.validation=v.txt"]


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    """What a verb says under --json."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("spec", "suffix"),
    [("sentencepiece:520", ".model"), ("bytes", ".json"), ("characters", ".json")],
)
def test_a_trained_tokenizer_is_written_and_shown(
    capsys: pytest.CaptureFixture[str], spec: str, suffix: str
) -> None:
    made = answer(
        capsys,
        "tokenizer",
        "train",
        f"--config.data.tokenizer={spec}",
        *SETTINGS,
        f"--out=made{suffix}",
    )
    assert made["file"] == f"made{suffix}"
    shown = answer(capsys, "tokenizer", "show", made["file"], "--text=some words")
    assert (shown["size"], shown["sha256"]) == (made["size"], made["sha256"])
    assert shown["lossless"]
    assert "".join(shown["pieces"]) == "some words"
    of_config = answer(
        capsys, "tokenizer", "show", f"--config.data.tokenizer=made{suffix}", *SETTINGS
    )
    assert of_config["sha256"] == made["sha256"]


def test_a_tokenizer_is_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokenizer", "train", "--config.data.tokenizer=bytes", *SETTINGS]
    answer(capsys, *words, "--out=made.json")
    error = answer(capsys, *words, "--out=made.json", code=73)["error"]
    answer(capsys, *words, error["fix"])
