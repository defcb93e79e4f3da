"""S7 for other tokenizer files: SentencePiece, word pieces, byte pairs, ranks, GGUF."""

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models.families.llama import Llama
from tests.checkpoint import ggufs
from tests.cli.test_import_tokenizers import write
from tests.data.vocabularies import test_byte_pairs, test_pieces, test_word_pieces
from tests.faults import harness

LETTERS = 1_000_000
RANKS = test_byte_pairs.trained("low lower lowest low low", 4)
TEXTS = {
    "one letter": "a" * LETTERS,
    "letters": "".join(random.Random(0).choices("abdelowr", k=LETTERS)),
    "spaces": " " * LETTERS,
    "marks on a letter": "a" + "\u0301" * LETTERS,
    "digits": "1" * LETTERS,
}


def tokenizers() -> dict[str, Tokenizer]:
    by_name: dict[str, Tokenizer] = {
        name: test_pieces.imported(name) for name in test_pieces.MODELS
    }
    for pattern in ("gpt2", "gpt2, digits apart", "cl100k", "cl100k, digits apart"):
        by_name[pattern] = ImportedTokenizer(
            test_byte_pairs.made(RANKS, pattern), before=[], after=[0]
        )
    return by_name | {"word pieces": test_word_pieces.made()}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_s7_a_million_unbroken_characters_take_at_most_ten_seconds_in_every_form(text):
    forms = tokenizers()
    assert len(forms) >= 4
    for name, tokenizer in forms.items():
        with harness.timing() as took:
            assert tokenizer.encode(TEXTS[text]) or text == "spaces"  # which some leave out
        took.require(10, name)


def sparse(path: Path, first: bytes) -> None:
    """A file of a gigabyte that begins so."""
    with path.open("wb") as file:
        file.write(first)
        file.truncate(2**30)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>"),
        ("spiece.model", b"\n\x0e\n\x05<unk>"),
        ("vocab.txt", b"[PAD]\n"),
        ("qwen.tiktoken", b"QQ== 0\n"),
        ("merges.txt", b"#version\n"),
    ],
)
def test_s7_a_gigabyte_is_refused_before_it_is_read(name, first, tmp_path, capsys):
    source = write(tmp_path / "source", {"vocab.json": b"{}"} if name == "merges.txt" else {})
    sparse(source / name, first)
    with harness.timing() as took:
        code = main(["import", f"--from={source}", f"--workdir={tmp_path / 'run'}", "--json"])
    assert code == 65
    assert "1,073,741,824 bytes" in json.loads(capsys.readouterr().out)["error"]["why"]
    took.require(5)
    assert not (tmp_path / "run").exists()


def hostile_template(writer: gguf.GGUFWriter) -> None:
    writer.add_chat_template("{% for i in range(10**9) %}{{ messages.__class__ }}{% endfor %}")


@pytest.mark.slow
def test_s7_a_hostile_chat_template_is_not_run_by_an_import(tmp_path, capsys):
    llama = Llama(vocab=300, width=32, depth=1, heads=2, kv_heads=2, hidden=32, max_positions=32)
    ggufs.write(tmp_path / "model.gguf", llama, change=hostile_template)
    run = tmp_path / "run"
    assert main(["import", f"--from={tmp_path / 'model.gguf'}", f"--workdir={run}"]) == 0
    assert "__class__" in (run / "hub/tokenizer_config.json").read_text()


@pytest.mark.slow
def test_s7_a_file_of_a_gigabyte_whose_header_is_one_text_is_refused_in_time(tmp_path, capsys):
    head = b"GGUF" + np.array([3], "<u4").tobytes() + np.array([0, 1], "<u8").tobytes()
    sparse(tmp_path / "x.gguf", head + np.array([2**29], "<u8").tobytes())
    words = ["import", f"--from={tmp_path / 'x.gguf'}", f"--workdir={tmp_path / 'run'}", "--json"]
    with harness.timing() as took:
        assert main(words) == 65
    assert "are left" in json.loads(capsys.readouterr().out)["error"]["why"]
    took.require(5)
