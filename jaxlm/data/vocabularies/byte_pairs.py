"""Byte-level BPE as a `tokenizer.json`, from a vocabulary with merges or from tiktoken ranks."""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxlm.data.hub_tokenizer import CHARACTER_OF_BYTE, library_errors, vocabulary_error
from jaxlm.data.tokenizer import MAX_VOCABULARY
from jaxlm.data.vocabularies.pieces import MAX_CHARACTERS

MAX_TOKEN_BYTES = 1000  # bytes; every split of a token in two is tried

Pattern = Literal["gpt2", "gpt2, digits apart", "cl100k", "cl100k, digits apart"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEX: dict[Pattern, str] = {
    "cl100k": _WORDS.format(digits="{1,3}"),  # tiktoken's, and Llama 3's
    "cl100k, digits apart": _WORDS.format(digits=""),  # Qwen's
}


def build_pre_tokenizer(pattern: Pattern) -> Any:
    """Return a pre-tokenizer that splits by the pattern and spells bytes as characters."""
    import tokenizers
    from tokenizers import pre_tokenizers

    if pattern in REGEX:
        words = pre_tokenizers.Split(tokenizers.Regex(REGEX[pattern]), "isolated")
        byte_level_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, byte_level_text])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "gpt2":
        return gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])


def as_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    pattern: Pattern,
    where: str,
    composed: bool = False,
    whole_words: bool = False,
) -> bytes:
    """Return the content of a tokenizer.json.

    Args:
      vocabulary: ids of tokens, spelled in GPT-2's printable characters.
      merges: pairs of tokens, the first to merge first.
      pattern: pre-tokenization.
      where: file name in errors.
      composed: normalize text to Unicode's composed form (NFC) first.
      whole_words: a word that is a token is one, without merges.

    Raises:
      DataError: if the library rejects them.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    with library_errors("a vocabulary and its merges are not a valid tokenizer", where):
        model = models.BPE(dict(vocabulary), list(merges), ignore_merges=whole_words)
        built = tokenizers.Tokenizer(model)
        if composed:
            built.normalizer = normalizers.NFC()
        built.pre_tokenizer = build_pre_tokenizer(pattern)
        built.decoder = decoders.ByteLevel()
        return built.to_str().encode()


def parse_ranks(content: bytes, where: str) -> dict[bytes, int]:
    """Return the tokens and ids of a tiktoken file: one line with base64, space, rank for each.

    Raise DataError if a line is invalid, a token or rank repeats, or a byte has no token.
    """
    tokens: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        word, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(word, validate=True)
            if not token or token in tokens or not rank.strip().isdigit():
                raise ValueError("it is empty, repeated, or without a rank")
            if len(token) > MAX_TOKEN_BYTES or int(rank) >= MAX_VOCABULARY:
                raise ValueError(f"it has {len(token):,} bytes and the rank {int(rank):,}")
        except (binascii.Error, ValueError) as error:
            raise vocabulary_error(
                "a tiktoken file has an invalid line", f"{where}, line {number}", str(error)[:300]
            ) from error
        tokens[token] = int(rank)
    if (total := sum(map(len, tokens))) > MAX_CHARACTERS:
        why = f"they have {total:,} bytes in all; {MAX_CHARACTERS:,} are allowed"
        raise vocabulary_error("the tokens of a tiktoken file are too long", where, why)
    if len(set(tokens.values())) < len(tokens):
        why = f"{len(tokens):,} tokens have {len(set(tokens.values())):,} ranks"
        raise vocabulary_error("two tokens of a tiktoken file have the same rank", where, why)
    if missing := [byte for byte in range(256) if bytes([byte]) not in tokens]:
        why = f"{len(missing)} of 256 are missing, the first is {missing[0]}"
        raise vocabulary_error("a tiktoken file lacks tokens for some bytes", where, why)
    return tokens


def from_ranks(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of tiktoken's ranks: every split of a token in rank order."""
    vocabulary = {byte_level_text(token): rank for token, rank in ranks.items()}
    pairs = [
        (byte_level_text(a), byte_level_text(b))
        for token in sorted(ranks, key=lambda token: ranks[token])
        for a, b in sorted(_ways(token, ranks), key=lambda way: (ranks[way[0]], ranks[way[1]]))
    ]
    return vocabulary, pairs


def _ways(token: bytes, ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for cut in range(1, len(token)):
        if token[:cut] in ranks and token[cut:] in ranks:
            yield token[:cut], token[cut:]


def byte_level_text(token: bytes) -> str:
    """Return bytes as GPT-2's printable characters."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def parse_merges(lines: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Parse lines "a b" of merges.txt. Raise DataError if one is invalid."""
    pairs = []
    for line in lines:
        a, space, b = line.partition(" ")
        if not (a and space and b):
            raise vocabulary_error("a merge does not have two tokens", where, f"it is {line!r:.80}")
        pairs.append((a, b))
    return pairs
