"""Tokenizers from text."""

import io
import re
from collections.abc import Iterator

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import SPECIALS, Bytes, Characters, SentencePiece, Tokenizer

TRAINING_BYTES = 64 * 2**20  # of text that a tokenizer is trained on at most
SMALLEST = 512  # vocabulary that is trained: the special tokens, 256 bytes, and some pieces
CHUNK = 4000  # characters of a training sentence


def train(kind: str, texts: Iterator[str]) -> Tokenizer:
    """The tokenizer that a setting such as "sentencepiece:4096" describes, from training text.

    Raises:
      ConfigError: where the text is too small for the vocabulary.
    """
    if kind == "bytes":
        return Bytes()
    if kind == "characters":
        return Characters("".join(sorted(set().union(*texts))))
    return SentencePiece(_train_sentencepiece(texts, int(kind.partition(":")[2])))


def _train_sentencepiece(texts: Iterator[str], size: int) -> bytes:
    """Byte-pair merges over the first `TRAINING_BYTES` of the text, cut into sentences of `CHUNK` characters.

    Pieces may span words, so that indentation, line ends and common phrases of code become one token: on Python's
    library 4.9 bytes a token at 8,192 pieces, against 3.8 with pieces inside words.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=0.9999,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_by_whitespace=False,
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
            num_threads=1,  # the merges do not depend on it; the order of ties might
            minloglevel=2,
        )
    except RuntimeError as error:
        why = str(error).split("]")[-1].strip()[:300]
        most, least = re.search(r"value <= (\d+)", why), re.search(r"\d+ vs (\d+)", why)
        fits = int(most[1]) if most else int(least[1]) + 1000 if least else 0
        raise ConfigError(
            f"a vocabulary of {size} cannot be trained on this text",
            where="data.tokenizer",
            why=why,
            fix=f"--config.data.tokenizer={f'sentencepiece:{fits}' if fits >= SMALLEST else 'bytes'}",
        ) from error
    return model.getvalue()


def _sentences(texts: Iterator[str]) -> Iterator[str]:
    read = 0
    for text in texts:
        for start in range(0, len(text), CHUNK):
            # Neither can be in a piece: NUL ends a C string, and U+2581 is SentencePiece's own space.
            part = text[start : start + CHUNK].replace("\0", " ").replace(SentencePiece.SPACE, " ")
            yield part
            read += len(part.encode())
            if read >= TRAINING_BYTES:
                return
