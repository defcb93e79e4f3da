"""`jaxlm import` of models whose tokenizer is no tokenizer.json, and `jaxlm export` of them."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.checkpoint.hub_tokenizer_files import read_tokenizer
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data.vocabularies import byte_pairs
from jaxlm.models.families.llama import Llama
from tests.cli.test_exchange import SIZES, call
from tests.data.test_tokenizer import NASTY
from tests.data.vocabularies.test_byte_pairs import BYTES, lines, trained
from tests.data.vocabularies.test_pieces import model
from tests.data.vocabularies.test_word_pieces import PIECES
from tests.parity import weights

FAMILY = Llama(**SIZES | dict(vocab=720))


def write(
    folder: Path, files: dict[str, bytes], settings: dict | None = None, family=FAMILY, **attributes
) -> Path:
    """A small model with these files for its tokenizer."""
    folder.mkdir()
    weights.write(folder, family)
    config = json.loads((folder / "config.json").read_text()) | attributes
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def brought_in(capsys, tmp_path: Path) -> tuple[Path, str]:
    """A run of a model with a SentencePiece model, and the output of its import."""
    source = write(tmp_path / "source", {"tokenizer.model": model("llama")})
    code, _, output = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code == 0
    return tmp_path / "run", output


THEIRS = sentencepiece.SentencePieceProcessor(model_proto=model("llama"))


def test_a_sentencepiece_model_comes_in_with_its_ids(capsys, tmp_path):
    run, output = brought_in(capsys, tmp_path)
    assert "tokenizer.model was converted to a tokenizer.json" in output
    text = "  caf\u00e9 <s> \U0001f600\n"
    code, shown, _ = call(capsys, "tokenizer", "show", str(run / "tokenizer"), f"--text={text}")
    assert (code, shown["ids"], shown["lossless"]) == (0, THEIRS.encode(text), True)


@pytest.mark.slow
def test_a_sentencepiece_model_goes_out_as_it_was_beside_a_tokenizer_json(capsys, tmp_path):
    run, _ = brought_in(capsys, tmp_path)
    out = tmp_path / "out"
    code, *_ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert code == 0
    assert (out / "tokenizer.model").read_bytes() == model("llama")
    exported = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    exported.encode_special_tokens = True
    for text in NASTY:
        assert exported.encode(text, add_special_tokens=False).ids == THEIRS.encode(text)
    assert exported.encode("a").ids == [THEIRS.bos_id(), *THEIRS.encode("a")]


RANKS = trained("low lower lowest low low", 4)
GPT2 = {
    "vocab.json": json.dumps(byte_pairs.from_ranks(RANKS)[0] | {"<|endoftext|>": 260}).encode(),
    "merges.txt": b"#version: 0.2\n"
    + "\n".join(" ".join(pair) for pair in byte_pairs.from_ranks(RANKS)[1]).encode(),
}
END = {"260": {"content": "<|end|>", "special": True}, "261": {"content": "<|x|>"}}
NONE = dict(bos_token_id=None, eos_token_id=None)
FORMS = {
    "llama": ({"tokenizer.model": model("llama")}, None, NONE, (1,), (2,), 700),
    "llama, nothing first": (
        {"tokenizer.model": model("llama")},
        {"add_bos_token": False},
        NONE,
        (),
        (2,),
        700,
    ),
    "t5": (
        {"spiece.model": model("t5")},
        {"tokenizer_class": "T5Tokenizer", "extra_ids": 3},
        NONE,
        (),
        (1,),
        703,
    ),
    "bert": ({"vocab.txt": "\n".join(PIECES).encode()}, None, NONE, (2,), (3,), len(PIECES)),
    "gpt2": (GPT2, None, NONE, (), (260,), 261),
    "tiktoken": (
        {"tokenizer.model": lines(RANKS)},
        {"added_tokens_decoder": END, "eos_token": "<|end|>"},
        NONE,
        (),
        (260,),
        262,
    ),
    "qwen's tiktoken": (
        {"qwen.tiktoken": lines(RANKS)},
        {"added_tokens_decoder": END},
        dict(model_type="qwen2", eos_token_id=260),
        (),
        (260,),
        262,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_begins_and_ends_documents_as_its_model_does(tmp_path, form):
    files, settings, attributes, before, after, size = FORMS[form]
    source = write(tmp_path / "source", files, settings, **attributes)
    tokenizer = read_tokenizer(Folder(source))
    assert (tokenizer.before, tokenizer.after, tokenizer.size) == (before, after, size)
    texts = ["low lower e\u0301 \u6f22", "<s></s><pad>[CLS]<|endoftext|><|end|><extra_id_0>"]
    special = set(tokenizer.specials.values()) - {tokenizer.unk}
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids
        assert not special & set(ids)
    if form == "qwen's tiktoken":
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    elif form in ("gpt2", "tiktoken"):
        assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


def test_a_sentinel_of_t5_counts_from_the_end(tmp_path):
    files, settings, attributes, *_ = FORMS["t5"]
    tokenizer = read_tokenizer(Folder(write(tmp_path / "source", files, settings, **attributes)))
    assert [tokenizer.specials[f"<extra_id_{i}>"] for i in range(3)] == [702, 701, 700]


@pytest.mark.parametrize(
    ("files", "settings", "attributes", "message"),
    [
        (
            {"qwen.tiktoken": lines(BYTES)},
            None,
            dict(model_type="mistral"),
            "pretokenization of a tiktoken file",
        ),
        ({"tokenizer.model": b"\x80\x04\x95pickle"}, None, {}, "not a SentencePiece model"),
        ({"vocab.txt": b"a\nb\n"}, None, {}, "no [UNK], [CLS], [SEP]"),
        ({"vocab.json": b'{"a": "b"}', "merges.txt": b""}, None, {}, "does not hold token ids"),
        ({"vocab.json": b'{"a": 1}', "merges.txt": b"\xff"}, None, {}, "not UTF-8"),
        (
            {"tokenizer.model": lines(RANKS)},
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            {},
            "without an id or a text",
        ),
        (
            {"tokenizer.model": lines(RANKS)},
            {"added_tokens_decoder": {"900": {"content": "a<"}}},
            {},
            "has id 900",
        ),
        ({"tokenizer.model": lines(RANKS)}, {}, NONE, "no id ends a document"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(tmp_path, files, settings, attributes, message):
    source = write(tmp_path / "source", files, settings, **attributes)
    with pytest.raises(DataError) as caught:
        read_tokenizer(Folder(source))
    assert message in f"{caught.value.what} {caught.value.why}"


def test_a_folder_without_a_tokenizer_is_told_what_was_looked_for(tmp_path):
    with pytest.raises(InputMissing) as caught:
        read_tokenizer(Folder(write(tmp_path / "source", {})))
    assert "a SentencePiece .model, vocab.txt" in caught.value.why


def test_ids_that_differ_from_sentencepiece_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlm.data.vocabularies.pieces.differences", lambda *_: ["\u00e9"])
    notes: list[str] = []
    read_tokenizer(Folder(write(tmp_path / "source", {"spiece.model": model("t5")})), notes.append)
    assert "encodes 1 of 8 probe texts otherwise than SentencePiece" in notes[0]
