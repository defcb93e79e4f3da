"""The data section refuses what cannot be read."""

from pathlib import Path

import pytest

from jaxlm.corpus.mix.config import Mix
from jaxlm.data.config import DataConfig
from jaxlm.data.parts import held_out


def test_the_defaults_are_right() -> None:
    assert not list(DataConfig().problems())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tokenizer": "sentencepeice:4096"}, "tokenizer"),
        ({"tokenizer": "byets"}, "tokenizer"),
        ({"train": ()}, "train"),
        ({"validation": ("5%", "x=tail:10%")}, "validation"),
        ({"validation": ("0%",)}, "validation"),
        ({"validation": ("tail:100%",)}, "validation"),
        ({"validation": ("x=five%",)}, "validation"),
    ],
)
def test_a_wrong_setting_is_named_and_its_fix_is_right(
    settings: dict[str, object], field: str
) -> None:
    ((name, why, fix),) = DataConfig(**settings).problems()  # type: ignore[arg-type]
    assert name == field
    assert why
    value = fix.partition("=")[2].strip("'")
    fixed = {field: value if field == "tokenizer" else (value,)}
    assert not list(DataConfig(**(settings | fixed)).problems())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("train", "held_out_of_it"),
    [
        (("texts/*.txt",), "tail:5%"),
        (("texts",), "tail:5%"),
        (("web/*.jsonl",), "5%"),
        (("a=web.jsonl.gz", "b=books.parquet", "c=hf:org/texts"), "5%"),
        (("a=web.jsonl", "b=book.txt"), "tail:5%"),
    ],
)
def test_records_are_held_out_whole_and_texts_by_their_ends(
    train: tuple[str, ...], held_out_of_it: str
) -> None:
    ((setting, value, reason),) = DataConfig(train=train).derived()
    assert (setting, value) == ("validation", (held_out_of_it,))
    assert reason.startswith(f"{held_out_of_it} held out")


def test_a_folder_is_the_tokenizer_in_it(tmp_path: Path) -> None:
    """A folder of transformers, or a run; what a run keeps is the file."""
    for name in ("tokenizer.model", "tokenizer", "tokenizer.json"):  # each before the one above it
        (tmp_path / name).touch()
        for settings in (DataConfig(tokenizer=str(tmp_path)), Mix(tokenizer=str(tmp_path))):
            assert settings.tokenizer == str(tmp_path / name)
    assert not [*DataConfig(tokenizer=str(tmp_path)).problems()]
    assert DataConfig(tokenizer=f"{tmp_path}/tokenizer").tokenizer == f"{tmp_path}/tokenizer"


def test_a_folder_without_a_tokenizer_is_refused_by_the_names_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, why, _),) = DataConfig(tokenizer=str(tmp_path)).problems()
    assert name == "tokenizer"
    assert why == f"the folder {tmp_path} has no tokenizer.json, tokenizer or tokenizer.model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").touch()
    (tmp_path / "bytes").mkdir()
    assert DataConfig(tokenizer="").tokenizer == ""
    assert DataConfig(tokenizer="x" * 300).tokenizer == "x" * 300  # too long for a path
    assert DataConfig(tokenizer="bytes").tokenizer == "bytes"


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "sentencepiece:100", "gpt2", "bpe"])
def test_a_tokenizer_that_means_none_that_there_is_gets_no_other(tokenizer: str) -> None:
    ((name, _, fix),) = DataConfig(tokenizer=tokenizer).problems()
    assert (name, fix) == ("tokenizer", "jaxlm config explain data.tokenizer")


@pytest.mark.parametrize("entry", ["5%", "tail:10%", "0.5%"])
def test_the_two_sides_of_a_share_are_the_whole(entry: str) -> None:
    sides = held_out(entry)
    assert sides is not None
    for number in range(300):
        text = f"text {number} " * 100
        assert sides[0].take(text) + sides[1].take(text) == text


def test_a_glob_is_no_share() -> None:
    assert held_out("texts/*.txt") is None
