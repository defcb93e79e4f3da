"""BERT's `vocab.txt` as a `tokenizer.json` (WordPiece, arXiv:1609.08144)."""

from collections.abc import Mapping

from jaxlm.data.hub_tokenizer import library_errors, vocabulary_error
from jaxlm.data.tokenizer import MAX_VOCABULARY

MAX_WORD_CHARACTERS = 100  # characters; a longer word is unknown, as in BERT
UNKNOWN, BEGINS, ENDS = "[UNK]", "[CLS]", "[SEP]"
SPECIAL = ("[PAD]", UNKNOWN, BEGINS, ENDS, "[MASK]")


def as_json(
    vocabulary: Mapping[str, int],
    where: str,
    *,
    lowercase: bool = True,
    accents: bool | None = None,
    apart: bool = True,
) -> bytes:
    """Return the content of a tokenizer.json.

    Args:
      vocabulary: ids of pieces; pieces inside a word begin with "##".
      where: file name in errors.
      lowercase: convert text to lower case first.
      accents: strip accents; None does so if `lowercase`.
      apart: treat each Chinese character as a word.

    Raises:
      DataError: if a piece that the model needs is missing.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    missing = [piece for piece in (UNKNOWN, BEGINS, ENDS) if piece not in vocabulary]
    if missing:
        what = f"a vocabulary of word pieces has no {', '.join(missing)}"
        raise vocabulary_error(what, where, f"{len(vocabulary):,} pieces were read")
    with library_errors("the word pieces are not a valid tokenizer", where):
        model = models.WordPiece(
            dict(vocabulary), unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD_CHARACTERS
        )
        built = tokenizers.Tokenizer(model)
        built.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=apart, strip_accents=accents, lowercase=lowercase
        )
        built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        built.decoder = decoders.WordPiece()
        built.post_processor = processors.TemplateProcessing(
            single=f"{BEGINS} $A {ENDS}",
            pair=f"{BEGINS} $A {ENDS} $B:1 {ENDS}:1",
            special_tokens=[(BEGINS, vocabulary[BEGINS]), (ENDS, vocabulary[ENDS])],
        )
        built.add_special_tokens(
            [tokenizers.AddedToken(piece, special=True) for piece in SPECIAL if piece in vocabulary]
        )
        return built.to_str().encode()


def vocabulary_of(content: bytes, where: str) -> dict[str, int]:
    """Return the pieces of a vocab.txt by line. Raise DataError if it is not text or too long."""
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise vocabulary_error("vocab.txt is not UTF-8", where, str(error)) from error
    if lines and not lines[-1]:
        lines.pop()
    if len(lines) > MAX_VOCABULARY:
        why = f"it has {len(lines):,}; {MAX_VOCABULARY:,} are allowed"
        raise vocabulary_error("vocab.txt has too many lines", where, why)
    return {line.removesuffix("\r"): number for number, line in enumerate(lines)}
