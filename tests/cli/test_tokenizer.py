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
    """The JSON output of a verb."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("spec", "suffix"),
    [
        ("sentencepiece:520", ".model"),
        ("unigram:520", ".model"),
        ("bpe:520", ".json"),
        ("bytes", ".json"),
        ("characters", ".json"),
    ],
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


def test_what_is_trained_is_told_with_its_fit_to_what_is_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["tokenizer", "train", "--config.data.tokenizer=characters", *SETTINGS]
    fit = answer(capsys, *words, "--out=made.json")["fit"]
    assert (fit["documents"], fit["bytes"], fit["tokens"]) == (1, 8, 8)  # "held out"
    assert fit["bytes_per_token"] == 1
    assert (fit["unknown"], fit["coverage"]) == (
        1 / 4,
        3 / 4,
    )  # h and t are not in the training text


def test_tokenizers_are_compared_on_what_is_held_out_or_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("b.txt").write_text("some words of number 7: \u6f22\u6f22\n")
    train = ["tokenizer", "train", "--config.data.tokenizer=bpe:520", *SETTINGS, "--out=made.json"]
    assert main(train) == 0
    capsys.readouterr()
    words = ["tokenizer", "compare", "made.json", "bytes", "characters", "wordpiece:512", *SETTINGS]
    rows = answer(capsys, *words, "--text=b.txt")["tokenizers"]
    assert [row["tokenizer"] for row in rows] == [
        "made.json",
        "bytes",
        "characters",
        "wordpiece:512",
    ]
    pairs, byte, character, piece = rows
    assert all(row["bytes"] == 31 and row["documents"] == 1 for row in rows)
    assert (byte["tokens"], byte["bytes_per_token"], byte["coverage"]) == (31, 1.0, 1.0)
    assert pairs["tokens"] < 20
    assert pairs["bytes_per_token"] == pytest.approx(31 / pairs["tokens"])
    assert (pairs["unknown"], pairs["coverage"], pairs["lossless"]) == (0, 1, 1)
    assert character["unknown"] == pytest.approx(2 / 27)
    assert character["coverage"] == pytest.approx(25 / 27)
    assert character["lossless"] == piece["lossless"] == 0
    assert piece["unknown"] > 0
    assert main([*words, "--text=b.txt"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "on 1 documents, 31 bytes:"
    assert table[1].split()[:3] == ["tokenizer", "ids", "tokens"]
    assert len(table) == 6
    assert answer(capsys, *words)["tokenizers"][0]["bytes"] == 8  # of data.validation


def test_a_tokenizer_that_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokenizer", "compare", *SETTINGS]
    assert answer(capsys, *words, "nowhere.json", code=66)["error"]["code"] == 66
    error = answer(capsys, *words, "bpe:12", code=2)["error"]
    assert "needs a vocabulary of at least 512" in error["why"]
    error = answer(capsys, *words, "clever:600", code=2)["error"]
    assert "is none of" in error["why"]
    assert main(["data", "tokenize", *SETTINGS, "--config.data.tokenizer=bytes", "--out=s"]) == 0
    capsys.readouterr()
    stored = ["--config.data.train=s/train", "--config.data.validation=s/val"]
    error = answer(capsys, "tokenizer", "compare", "bpe:600", *stored, code=2)["error"]
    assert "contains tokens" in error["why"]
    error = answer(capsys, "tokenizer", "compare", "bytes", *stored, code=2)["error"]
    assert error["fix"] == "name the text to compare on with --text"
