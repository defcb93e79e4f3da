"""Our tokenizers as a `tokenizer.json`, which other programs read: the same ids for the same text."""

import json
from typing import Any

from jaxlm.data.tokenizer import (
    BYTE_OF_CHARACTER,
    SPECIALS,
    Bytes,
    Characters,
    Imported,
    SentencePiece,
    Tokenizer,
)


def as_json(tokenizer: Tokenizer) -> bytes | None:
    """The content of a tokenizer.json, None where it would give other ids.

    Of a SentencePiece model, the character U+2581 itself is the exception: there it is a space.
    """
    import tokenizers

    if isinstance(tokenizer, Imported):
        return tokenizer.content
    if isinstance(tokenizer, SentencePiece):
        built = _pieces(tokenizer)
    elif isinstance(tokenizer, Bytes):
        built = _bytes()
    elif isinstance(tokenizer, Characters):
        built = _characters(tokenizer)
    else:  # the ids of a tokenizer.json that was moved up behind our special tokens
        return None
    built.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    return built.to_str().encode()


def settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """What belongs into the tokenizer_config.json beside it."""
    names = {number: name for name, number in tokenizer.specials.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[tokenizer.before[0]] if tokenizer.before else None,
        "eos_token": names[tokenizer.eos],
        "pad_token": names[tokenizer.pad],
        "add_bos_token": bool(tokenizer.before),
        "clean_up_tokenization_spaces": False,
    }


def _pieces(tokenizer: SentencePiece) -> Any:
    """Byte-pair merges in the order of the pieces that they make: SentencePiece merges what makes the best piece first."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    pieces = tokenizer.pieces()
    merges = []
    for piece, number in sorted(pieces.items(), key=lambda item: item[1]):
        ways = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        whole = [(pieces[a], pieces[b], a, b) for a, b in ways if a in pieces and b in pieces]
        if number >= len(SPECIALS):
            merges += [(a, b) for _, _, a, b in sorted(whole)]
    built = tokenizers.Tokenizer(
        models.BPE(pieces, merges, unk_token=SPECIALS[tokenizer.unk], byte_fallback=True)
    )
    built.normalizer = normalizers.Replace(" ", SentencePiece.SPACE)
    built.decoder = decoders.Sequence(
        [decoders.Replace(SentencePiece.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


def _bytes() -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {name: number for number, name in enumerate(SPECIALS)}
    vocab |= {name: len(SPECIALS) + byte for name, byte in BYTE_OF_CHARACTER.items()}
    built = tokenizers.Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return built


def _characters(tokenizer: Characters) -> Any:
    import tokenizers
    from tokenizers import decoders, models

    characters = json.loads(tokenizer.serialise())["characters"]
    vocab = {name: number for number, name in enumerate([*SPECIALS, *characters])}
    built = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=SPECIALS[tokenizer.unk]))
    built.decoder = decoders.Fuse()
    return built
