"""A small tokenizer of every kind that text is encoded with."""

import functools
import io
import json
from collections.abc import Callable
from typing import Any

import sentencepiece
import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxlm.data import train_tokenizer
from jaxlm.data.hub_tokenizer import HuggingFace, ImportedTokenizer
from jaxlm.data.tokenizer import SPECIALS, Bytes, SentencePiece, Tokenizer
from jaxlm.data.vocabularies.byte_pairs import REGEX
from tests.data.test_tokenizer import NASTY
from tests.data.vocabularies import test_byte_pairs, test_gguf_tokens, test_pieces, test_word_pieces

LINES = [line + "\n" for line in test_pieces.LINES]
FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|\s+(?!\S)|\s+| ?[^\s\p{N}]+"
METASPACE: dict[str, dict[str, Any]] = {
    f"metaspace {scheme}, split {split}": dict(prepend_scheme=scheme, split=split)
    for scheme in ("first", "always", "never")
    for split in (True, False)
}


def own_sentencepiece(kind: str, **rules: Any) -> SentencePiece:
    """A SentencePiece model with special tokens of ours in front and the default rules."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.strip("\n") for line in LINES if line.strip()]),
        model_writer=made,
        model_type=kind,
        vocab_size=700,
        hard_vocab_limit=False,
        byte_fallback=True,
        **dict(zip(("pad_piece", "bos_piece", "eos_piece", "unk_piece"), SPECIALS, strict=False)),
        **dict(pad_id=0, bos_id=1, eos_id=2, unk_id=3, control_symbols=list(SPECIALS[4:])),
        minloglevel=2,
        **rules,
    )
    return SentencePiece(made.getvalue())


def byte_pairs(
    before: Any, normalizer: Any = None, added: tuple[hf.AddedToken, ...] = (), *, bytewise=True
) -> HuggingFace:
    """Byte pairs behind a pre-tokenizer: of bytes, or of characters with spaces as U+2581."""
    built = hf.Tokenizer(models.BPE() if bytewise else models.BPE(unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        built.normalizer = normalizer
    if before is not None:
        built.pre_tokenizer = before
    built.decoder = decoders.ByteLevel() if bytewise else decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if bytewise else [],
        show_progress=False,
    )
    built.train_from_iterator(LINES, trainer)
    built.add_tokens(list(added))
    return HuggingFace(built.to_str().encode())


def words(model: Any, trainer: Any, before: Any, normalizer: Any = None) -> HuggingFace:
    """Pieces of words."""
    built = hf.Tokenizer(model)
    if normalizer is not None:
        built.normalizer = normalizer
    if before is not None:
        built.pre_tokenizer = before
    built.train_from_iterator(LINES, trainer)
    return HuggingFace(built.to_str().encode())


def whole_words(content: bytes) -> HuggingFace:
    """The same with words that are tokens taken whole, as Llama 3 does."""
    parsed = json.loads(content)
    parsed["model"]["ignore_merges"] = True
    return HuggingFace(json.dumps(parsed).encode())


def _regex(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(hf.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gguf() -> ImportedTokenizer:
    return test_gguf_tokens.imported(test_gguf_tokens.of_sentencepiece("llama"))


def _unigram(before: Any, normalizer: Any = None) -> HuggingFace:
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return words(models.Unigram(), trainer, before, normalizer)


def _word_level() -> HuggingFace:
    trainer = trainers.WordLevelTrainer(
        vocab_size=600, special_tokens=["<unk>"], show_progress=False
    )
    steps = [normalizers.Strip(), normalizers.Lowercase(), normalizers.NFKC()]
    return words(
        models.WordLevel(unk_token="<unk>"),
        trainer,
        pre_tokenizers.Whitespace(),
        normalizers.Sequence(steps),
    )


ADDED = (
    hf.AddedToken("  ", normalized=False),
    hf.AddedToken("   ", normalized=False),
    hf.AddedToken("<a>", lstrip=True, rstrip=True, normalized=False),
    hf.AddedToken("word", single_word=True, normalized=True),
)
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": Bytes,
    "characters": lambda: train_tokenizer.train("characters", iter([*NASTY, *LINES])),
    "sentencepiece": lambda: train_tokenizer.train("sentencepiece:1000", iter(LINES)),
    "unigram": lambda: train_tokenizer.train("unigram:700", iter(LINES)),
    "bpe": lambda: train_tokenizer.train("bpe:700", iter(LINES)),
    "wordpiece": lambda: train_tokenizer.train("wordpiece:700", iter(LINES)),
    "sentencepiece with the library's rules": lambda: own_sentencepiece("bpe"),
    "sentencepiece with a prefix": lambda: own_sentencepiece(
        "bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "sentencepiece with NFKC and lower case": lambda: own_sentencepiece(
        "bpe", normalization_rule_name="nmt_nfkc_cf", add_dummy_prefix=False
    ),
    "unigram with the library's rules": lambda: own_sentencepiece("unigram"),
    **{
        f"imported {name}": functools.partial(test_pieces.imported, name)
        for name in test_pieces.MODELS
    },
    "gguf": _gguf,
    "gpt2": lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a prefix": lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "NFC": lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    "NFKC, lower case and no accents": lambda: byte_pairs(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.Sequence(
            [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        ),
    ),
    "one space": lambda: byte_pairs(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.Replace(hf.Regex(r"\s+"), " "),
    ),
    "added tokens": lambda: byte_pairs(
        pre_tokenizers.ByteLevel(add_prefix_space=False), added=ADDED
    ),
    "bytes without words": lambda: byte_pairs(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "digits from the right": lambda: byte_pairs(_regex(FROM_THE_RIGHT)),
    "fixed length": lambda: byte_pairs(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.FixedLength(length=5),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    **{
        f"tiktoken {pattern}": lambda pattern=pattern: HuggingFace(
            test_byte_pairs.made(test_gguf_tokens.RANKS, pattern)
        )
        for pattern in REGEX
    },
    "whole words": lambda: whole_words(
        byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)).content
    ),
    **{
        name: lambda options=options: byte_pairs(
            pre_tokenizers.Metaspace(**options), bytewise=False
        )
        for name, options in METASPACE.items()
    },
    "bert": test_word_pieces.made,
    "unigram of words": lambda: _unigram(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        normalizers.NFKC(),
    ),
    "unigram of metaspace": lambda: _unigram(pre_tokenizers.Metaspace()),
    "whole word": _word_level,
}


@functools.cache
def kind(name: str) -> Tokenizer:
    """The tokenizer of a kind, made once."""
    return KINDS[name]()
