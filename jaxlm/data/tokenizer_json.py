"""Export of our tokenizers as `tokenizer.json` for other programs, with the same ids."""

import dataclasses
import json
from typing import Any

from jaxlm.data import hub_tokenizer
from jaxlm.data.hub_tokenizer import HuggingFace, ImportedTokenizer, TrainedTokenizer
from jaxlm.data.tokenizer import SPECIALS, Bytes, SentencePiece, Tokenizer
from jaxlm.data.vocabularies import pieces


def as_json(tokenizer: Tokenizer) -> bytes | None:
    """Return a tokenizer.json that starts a prompt like a document; None if ids would differ.

    Two exceptions for a SentencePiece model: the character U+2581 becomes a space, and a unigram
    model may order the pieces of a long run of one character differently, as sums are rounded
    differently.
    """
    import tokenizers

    if isinstance(tokenizer, ImportedTokenizer):
        return tokenizer.content
    content = _same_ids(tokenizer)
    if content is None:
        return None
    built = tokenizers.Tokenizer.from_buffer(content)
    (first,) = tokenizer.before
    hub_tokenizer.prepend_token(built, SPECIALS[first])
    return built.to_str().encode()


def _same_ids(tokenizer: Tokenizer) -> bytes | None:
    """Return a tokenizer.json with the ids of a text, without the begin of a document."""
    import tokenizers

    if isinstance(tokenizer, TrainedTokenizer):
        return tokenizer.content
    if isinstance(tokenizer, SentencePiece):
        vocabulary = pieces.read(tokenizer.serialize(), "tokenizer")
        return pieces.as_json(dataclasses.replace(vocabulary, begins=None), "tokenizer")
    if isinstance(tokenizer, HuggingFace):
        return _moved(tokenizer)
    built = _bytes() if isinstance(tokenizer, Bytes) else _characters(tokenizer)
    built.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    return built.to_str().encode()


def _moved(tokenizer: HuggingFace) -> bytes | None:
    """Return a tokenizer.json with ids shifted behind our special tokens; None if ids differ."""
    import tokenizers

    parsed = json.loads(tokenizer.content)
    model, shift = parsed["model"], tokenizer.shift
    special = {each["content"] for each in parsed.get("added_tokens") or () if each.get("special")}
    if isinstance(model["vocab"], dict):
        shifted = {piece: number + shift for piece, number in model["vocab"].items()}
        model["vocab"] = {name: number for number, name in enumerate(SPECIALS)} | shifted
        if model.get("unk_token") in special:
            model["unk_token"] = SPECIALS[tokenizer.unk]
    else:
        unknown = model.get("unk_id")
        if unknown is not None:
            is_special = model["vocab"][unknown][0] in special
            model["unk_id"] = tokenizer.unk if is_special else unknown + shift
        model["vocab"] = [[name, pieces.UNREACHABLE_SCORE] for name in SPECIALS] + model["vocab"]
    for token in parsed.get("added_tokens") or ():
        token["id"] += shift
    # Our own ids stand around a document.
    parsed |= {"post_processor": None, "truncation": None, "padding": None}
    with hub_tokenizer.library_errors(
        "jaxlm cannot shift the ids of a tokenizer.json", "tokenizer"
    ):
        built = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        built.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
        built.encode_special_tokens = True
        encodings = [built.encode(text, add_special_tokens=False).ids for text in pieces.PROBES]
    is_same = encodings == tokenizer.encode_many(pieces.PROBES)
    return built.to_str().encode() if is_same and built.token_to_id(SPECIALS[0]) == 0 else None


def settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    names = {number: name for name, number in tokenizer.specials.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[tokenizer.before[0]] if tokenizer.before else None,
        "eos_token": names[tokenizer.eos],
        "pad_token": names[tokenizer.pad],
        "add_bos_token": bool(tokenizer.before),
        "clean_up_tokenization_spaces": False,
    }


def _bytes() -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {name: number for number, name in enumerate(SPECIALS)}
    vocab |= {name: len(SPECIALS) + byte for name, byte in hub_tokenizer.BYTE_OF_CHARACTER.items()}
    built = tokenizers.Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return built


def _characters(tokenizer: Tokenizer) -> Any:
    import tokenizers
    from tokenizers import decoders, models

    characters = json.loads(tokenizer.serialize())["characters"]
    vocab = {name: number for number, name in enumerate([*SPECIALS, *characters])}
    built = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=SPECIALS[tokenizer.unk]))
    built.decoder = decoders.Fuse()
    return built
