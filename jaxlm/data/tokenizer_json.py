"""Our tokenizers as a `tokenizer.json`, which other programs read: the same ids for the same text."""

import dataclasses
import json
from typing import Any

from jaxlm.data.hub_tokenizer import BYTE_OF_CHARACTER, HuggingFace, Imported, Trained, rust_errors
from jaxlm.data.tokenizer import SPECIALS, Bytes, SentencePiece, Tokenizer
from jaxlm.data.vocabularies import pieces
from jaxlm.data.vocabularies.added import put_in_front


def as_json(tokenizer: Tokenizer) -> bytes | None:
    """The content of a tokenizer.json, with which a prompt begins as a document does; None where it would give other ids.

    Of a SentencePiece model, the character U+2581 itself is the exception: there it is a space. Of a unigram model, a long
    run of one character is too: the same pieces may come in another order, as their sum is rounded otherwise.
    """
    import tokenizers

    if isinstance(tokenizer, Imported):
        return tokenizer.content
    content = _same_ids(tokenizer)
    if content is None:
        return None
    built = tokenizers.Tokenizer.from_buffer(content)
    (first,) = tokenizer.before
    put_in_front(built, SPECIALS[first])
    return built.to_str().encode()


def _same_ids(tokenizer: Tokenizer) -> bytes | None:
    """The content of a tokenizer.json that gives the ids of a text, without what stands before a document."""
    import tokenizers

    if isinstance(tokenizer, Trained):
        return tokenizer.content
    if isinstance(tokenizer, SentencePiece):
        found = pieces.read(tokenizer.serialise(), "tokenizer")
        return pieces.as_json(dataclasses.replace(found, begins=None), "tokenizer")
    if isinstance(tokenizer, HuggingFace):
        return _moved(tokenizer)
    built = _bytes() if isinstance(tokenizer, Bytes) else _characters(tokenizer)
    built.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    return built.to_str().encode()


def _moved(tokenizer: HuggingFace) -> bytes | None:
    """A tokenizer.json whose ids are moved up behind our special tokens; None where that gives others than ours are."""
    import tokenizers

    parsed = json.loads(tokenizer.content)
    model, shift = parsed["model"], tokenizer.shift
    special = {each["content"] for each in parsed.get("added_tokens") or () if each.get("special")}
    if isinstance(model["vocab"], dict):
        own = {piece: number + shift for piece, number in model["vocab"].items()}
        model["vocab"] = {name: number for number, name in enumerate(SPECIALS)} | own
        if model.get("unk_token") in special:
            model["unk_token"] = SPECIALS[tokenizer.unk]
    else:
        unknown = model.get("unk_id")
        if unknown is not None:
            is_special = model["vocab"][unknown][0] in special
            model["unk_id"] = tokenizer.unk if is_special else unknown + shift
        model["vocab"] = [[name, pieces.NEVER] for name in SPECIALS] + model["vocab"]
    for token in parsed.get("added_tokens") or ():
        token["id"] += shift
    # What stands around a document is ours now.
    parsed |= {"post_processor": None, "truncation": None, "padding": None}
    with rust_errors("a tokenizer.json cannot be moved", "tokenizer"):
        built = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        built.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
        built.encode_special_tokens = True
        found = [built.encode(text, add_special_tokens=False).ids for text in pieces.PROBES]
    is_same = found == tokenizer.encode_many(pieces.PROBES)
    return built.to_str().encode() if is_same and built.token_to_id(SPECIALS[0]) == 0 else None


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


def _bytes() -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {name: number for number, name in enumerate(SPECIALS)}
    vocab |= {name: len(SPECIALS) + byte for name, byte in BYTE_OF_CHARACTER.items()}
    built = tokenizers.Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return built


def _characters(tokenizer: Tokenizer) -> Any:
    import tokenizers
    from tokenizers import decoders, models

    characters = json.loads(tokenizer.serialise())["characters"]
    vocab = {name: number for number, name in enumerate([*SPECIALS, *characters])}
    built = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=SPECIALS[tokenizer.unk]))
    built.decoder = decoders.Fuse()
    return built
