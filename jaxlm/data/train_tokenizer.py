"""Training of tokenizers from text."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.data.hub_tokenizer import TrainedTokenizer
from jaxlm.data.tokenizer import SPECIALS, Bytes, Characters, SentencePiece, Tokenizer
from jaxlm.data.vocabularies.byte_pairs import build_pre_tokenizer

TRAINING_BYTES = 64 * 2**20  # limit of the training text
UNIGRAM_BYTES = 4 * 2**20  # limit for a unigram model, which weighs candidates repeatedly
MIN_VOCABULARY = 512  # smallest vocabulary: special tokens, 256 bytes, and some pieces
CHUNK = 4000  # characters of a training sentence


def train(kind: str, texts: Iterator[str]) -> Tokenizer:
    """Train the tokenizer of a setting such as "sentencepiece:4096" on text.

    Raise ConfigError if the text is too small for the vocabulary.
    """
    if kind == "bytes":
        return Bytes()
    if kind == "characters":
        return Characters("".join(sorted(set().union(*texts))))
    name, _, size = kind.partition(":")
    if name == "bpe":
        return TrainedTokenizer(_train_byte_pairs(texts, int(size)))
    if name == "wordpiece":
        return TrainedTokenizer(_train_word_pieces(texts, int(size)))
    return SentencePiece(_train_sentencepiece(name, texts, int(size), **SENTENCEPIECE[name]))


# Byte pairs may span words, so that indentation, line ends and common phrases of code become one
# token: 4.9 bytes a token on Python's library at 8,192 pieces, against 3.8 with pieces inside
# words. Pieces of a unigram model (Kudo 2018, arXiv:1804.10959) stay inside words, which limits its
# number of candidates.
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "sentencepiece": dict(model_type="bpe", split_by_whitespace=False),
    "unigram": dict(model_type="unigram", split_by_whitespace=True),
}


def _train_byte_pairs(texts: Iterator[str], size: int) -> bytes:
    """Train byte pairs inside words, runs of up to three digits, and runs of punctuation."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer, built.decoder = build_pre_tokenizer("cl100k"), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(first_bytes(texts, TRAINING_BYTES), trainer)
    if (count := built.get_vocab_size()) < size:
        raise _too_large("bpe", size, count, f"it has {count} different tokens")
    return built.to_str().encode()


def _train_word_pieces(texts: Iterator[str], size: int) -> bytes:
    """Train BERT's word pieces, with case and accents: single characters, then common pairs.

    The pairs are SentencePiece's, because the trainer of `tokenizers` is not deterministic.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    cut = pre_tokenizers.BertPreTokenizer()

    def words(text: str) -> str:
        return " ".join(word for word, _ in cut.pre_tokenize_str(normalizer.normalize_str(text)))

    model = _train_sentencepiece(
        "wordpiece",
        map(words, first_bytes(texts, TRAINING_BYTES)),
        size + 1,  # including the space, which is not a word piece
        model_type="bpe",
        split_by_whitespace=True,
        add_dummy_prefix=True,
        byte_fallback=False,
    )
    space, inside = SentencePiece.SPACE, "##"
    pieces = [piece for piece in SentencePiece(model).pieces() if piece not in SPECIALS]
    letters = sorted({piece for piece in pieces if len(piece) == 1} - {space})
    longer = [piece for piece in pieces if len(piece.removeprefix(space)) > 1]
    spelt = [p.removeprefix(space) if p.startswith(space) else inside + p for p in longer]
    vocabulary = [*SPECIALS, *letters, *(inside + letter for letter in letters), *spelt][:size]
    built = tokenizers.Tokenizer(
        models.WordPiece(
            {piece: number for number, piece in enumerate(vocabulary)},
            unk_token=SPECIALS[Tokenizer.unk],
            continuing_subword_prefix=inside,
        )
    )
    built.normalizer, built.pre_tokenizer, built.decoder = normalizer, cut, decoders.WordPiece()
    built.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    return built.to_str().encode()


def _too_large(name: str, size: int, fits: int, why: str) -> ConfigError:
    what = f"this text is too small for a vocabulary of {size}"
    fix = f"--config.data.tokenizer={f'{name}:{fits}' if fits >= MIN_VOCABULARY else 'bytes'}"
    return ConfigError(what, where="data.tokenizer", why=why, fix=fix)


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield texts until they have `limit` bytes; the last is not cut."""
    read = 0
    for text in texts:
        yield text
        read += len(text.encode())
        if read >= limit:
            return


def _train_sentencepiece(name: str, texts: Iterator[str], size: int, **options: Any) -> bytes:
    """Train on the start of the text, cut into sentences of `CHUNK` characters."""
    import sentencepiece

    model, limit = io.BytesIO(), UNIGRAM_BYTES if name == "unigram" else TRAINING_BYTES
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=first_bytes(_sentences(texts), limit),
            model_writer=model,
            vocab_size=size,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_by_unicode_script=False,
            split_by_number=False,
            max_sentence_length=4 * CHUNK,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            pad_piece=SPECIALS[0],
            bos_piece=SPECIALS[1],
            eos_piece=SPECIALS[2],
            unk_piece=SPECIALS[3],
            control_symbols=list(SPECIALS[4:]),
            num_threads=1,  # merges do not depend on it; the order of ties might
            minloglevel=2,
            **(dict(byte_fallback=True, add_dummy_prefix=False) | options),
        )
    except RuntimeError as error:
        why = str(error).split("]")[-1].strip()[:300]
        most, least = re.search(r"value <= (\d+)", why), re.search(r"\d+ vs (\d+)", why)
        fits = int(most[1]) if most else int(least[1]) + 1000 if least else 0
        spare = int(name == "wordpiece")  # the space itself
        raise _too_large(name, size - spare, fits - spare, why) from error
    return model.getvalue()


def _sentences(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), CHUNK):
            # A piece can contain neither: NUL ends a C string, U+2581 is SentencePiece's space.
            yield text[start : start + CHUNK].replace("\0", " ").replace(SentencePiece.SPACE, " ")
