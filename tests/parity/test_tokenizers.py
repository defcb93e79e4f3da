"""Tokenizers of every form give the ids that transformers gives for the same folder."""

import pytest
import sentencepiece
import tokenizers as hf

from jaxlm.checkpoint.hub_folder import Folder, write_json
from jaxlm.checkpoint.hub_tokenizer_files import read_tokenizer
from tests.data.vocabularies import test_byte_pairs as byte_pairs
from tests.data.vocabularies.test_pieces import LINES, MODELS, TEXTS, model
from tests.data.vocabularies.test_word_pieces import PIECES
from tests.parity import weights

pytestmark = pytest.mark.parity


def trained(kind: str) -> bytes:
    """A tokenizer.json as the library trains one."""
    if kind == "byte-level":
        made = hf.Tokenizer(hf.models.BPE())
        made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = hf.decoders.ByteLevel()
        trainer = hf.trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif kind == "unigram":
        made = hf.Tokenizer(hf.models.Unigram())
        made.normalizer = hf.normalizers.NFKC()
        made.pre_tokenizer = hf.pre_tokenizers.Metaspace()
        made.decoder = hf.decoders.Metaspace()
        trainer = hf.trainers.UnigramTrainer(
            vocab_size=600,
            special_tokens=["<unk>", "<|endoftext|>"],
            unk_token="<unk>",
            show_progress=False,
        )
    else:
        made = hf.Tokenizer(hf.models.WordPiece(unk_token="[UNK]"))
        made.normalizer = hf.normalizers.BertNormalizer()
        made.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
        made.decoder = hf.decoders.WordPiece()
        trainer = hf.trainers.WordPieceTrainer(
            vocab_size=600, special_tokens=["[UNK]", "<|endoftext|>"], show_progress=False
        )
    made.train_from_iterator(LINES, trainer)
    return made.to_str().encode()


def ranks() -> bytes:
    """A file of tiktoken's ranks."""
    return byte_pairs.lines(byte_pairs.trained("\n".join(LINES)[:3000], MERGES))


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
MERGES = 200
ADDED = {f"{256 + MERGES}": {"content": "<|endoftext|>", "special": True}}
FOLDERS = {
    "llama": ("llama", {"tokenizer.model": lambda: model("llama")}, {}),
    "gemma": (
        "gemma",
        {"tokenizer.model": lambda: model("gemma")},
        {"eos_token": "</s>", "bos_token": "<s>"},
    ),
    "t5": ("llama", {"spiece.model": lambda: model("t5")}, {"tokenizer_class": "T5Tokenizer"}),
    "bert": (
        "llama",
        {"vocab.txt": lambda: "\n".join(PIECES).encode()},
        {"tokenizer_class": "BertTokenizer"},
    ),
    "byte-level": ("llama", {"tokenizer.json": lambda: trained("byte-level")}, GENERIC),
    "unigram": ("llama", {"tokenizer.json": lambda: trained("unigram")}, GENERIC),
    "word pieces": ("llama", {"tokenizer.json": lambda: trained("word pieces")}, GENERIC),
    "tiktoken": ("llama", {"tokenizer.model": ranks}, GENERIC | {"added_tokens_decoder": ADDED}),
}

# Texts to which transformers 5 gives other ids than SentencePiece, with which such models were
# trained and which we follow: it puts no space before a text that begins with one, takes a <mask>
# that the user named for Gemma's special one, and cuts T5's text at line separators, which
# SentencePiece keeps.
OTHERS = {"llama": 7, "gemma": 1, "t5": 3}
SPELT = {"unigram": "<|endoftext|>", "t5": "</s>"}


@pytest.fixture(params=FOLDERS)
def both(request, tmp_path, monkeypatch):
    """The name of a form, a folder that has its tokenizer, and transformers' reading of it."""
    import transformers

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # it would keep what it reads
    name = request.param
    kind, files, settings = FOLDERS[name]
    weights.write(tmp_path, weights.FAMILIES[kind])
    for file, content in files.items():
        (tmp_path / file).write_bytes(content())
    write_json(
        tmp_path / "tokenizer_config.json",
        {"tokenizer_class": f"{kind.title()}Tokenizer"} | settings,
    )
    return name, tmp_path, transformers.AutoTokenizer.from_pretrained(tmp_path)


def encoded(theirs, text):
    return theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


def spells_a_piece(name, text):
    """Return True if a text spells a special token that a unigram model has as a piece.

    With jaxlm no text becomes one.
    """
    return name in SPELT and SPELT[name] in text


def test_ids_are_those_of_transformers(both):
    name, folder, theirs = both
    ours = read_tokenizer(Folder(folder))
    processor = (
        sentencepiece.SentencePieceProcessor(model_proto=model(name)) if name in MODELS else None
    )
    others = []
    for text in TEXTS:
        ids = encoded(theirs, text)
        if processor is not None and processor.encode(text) != ids:
            others.append(text)
            ids = processor.encode(text)
        elif processor is None and spells_a_piece(name, text):
            continue
        assert ours.encode(text) == ids, ascii(text[:60])
    assert len(others) == OTHERS.get(name, 0), [ascii(text[:40]) for text in others]


def test_ids_of_what_transformers_saved_are_its_own(both, tmp_path):
    """Every form is saved as a tokenizer.json, which is read with its settings."""
    import transformers

    name, _, theirs = both
    saved = tmp_path / "saved"
    saved.mkdir()
    weights.write(saved, weights.FAMILIES[FOLDERS[name][0]])
    theirs.save_pretrained(saved)
    ours, loaded = read_tokenizer(Folder(saved)), transformers.AutoTokenizer.from_pretrained(saved)
    for text in TEXTS:
        if not spells_a_piece(name, text):
            assert ours.encode(text) == encoded(loaded, text), ascii(text[:60])
    assert ours.after == (loaded.eos_token_id if name != "bert" else loaded.sep_token_id,)
