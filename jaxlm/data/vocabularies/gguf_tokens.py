"""The tokenizer in a GGUF's metadata as a `tokenizer.json`, with what belongs into the tokenizer_config.json beside it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.vocabularies import byte_pairs, pieces
from jaxlm.data.vocabularies.added import Added, with_added
from jaxlm.data.vocabularies.patterns import Pattern
from jaxlm.data.vocabularies.pieces import Kind, Piece, Pieces

OWN = "tokenizer.ggml."
# What says which ids are special, or again what others say.
NEUTRAL = ("tokenizer.huggingface.json", "tokenizer.chat_template", f"{OWN}token_type_count")
READ = frozenset(
    "model pre tokens scores token_type merges add_bos_token add_eos_token add_sep_token add_space_prefix "
    "remove_extra_whitespaces precompiled_charsmap".split()
)


class Cut(NamedTuple):
    """How byte-level text is made ready, by `tokenizer.ggml.pre`."""

    pattern: Pattern
    composed: bool = False
    whole_words: bool = False
    begins: bool = False  # where the file does not say


CUTS = (
    dict.fromkeys(("gpt-2", "olmo", "phi-2"), Cut("gpt2"))
    | dict.fromkeys(("smollm", "starcoder", "refact"), Cut("gpt2, digits apart"))
    | dict.fromkeys(("smaug-bpe", "dbrx"), Cut("cl100k"))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Cut("cl100k, digits apart", composed=True))
    | dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), Cut("cl100k", whole_words=True, begins=True)
    )
)


def as_json(metadata: Mapping[str, Any], where: str) -> tuple[bytes, dict[str, Any]]:
    """The content of a tokenizer.json, and the settings beside it: its named tokens, its chat template.

    Raises:
      DataError: where the metadata has no tokenizer, or one that is not understood.
    """
    own = {key.removeprefix(OWN): value for key, value in metadata.items() if key.startswith(OWN)}
    unknown = [
        key
        for key in metadata
        if key.startswith("tokenizer.")
        and not key.startswith(NEUTRAL)
        and not key.endswith("token_id")
        and key.removeprefix(OWN) not in READ
    ]
    if unknown:
        raise _refused(f"{', '.join(map(repr, unknown[:5]))} is not known", where)
    tokens = _list(own, "tokens", str, where)
    kinds = _list(own, "token_type", int, where, default=[int(Kind.NORMAL)] * len(tokens))
    if len(kinds) != len(tokens) or not all(kind in Kind._value2member_map_ for kind in kinds):
        raise _refused("token_type does not say what each token is", where)
    if len(set(tokens)) < len(tokens):
        raise _refused("two of its tokens are the same", where)
    if own.get("model") == "llama":
        content, begins = _pieces(own, tokens, kinds, where), True
    elif own.get("model") == "gpt2":
        content, begins = _byte_pairs(own, tokens, kinds, where)
    else:
        raise _refused(
            f"its model is {own.get('model')!r:.60}, and llama and gpt2 are known", where
        )
    return content, _settings(metadata, own, tokens, begins)


def ends(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end a document, a turn of a conversation, or a message; [] where none is named."""
    named = [metadata.get(f"{OWN}{what}_token_id") for what in ("eos", "eot", "eom")]
    return sorted({number for number in named if isinstance(number, int)})


def _pieces(own: dict[str, Any], tokens: list[str], kinds: list[int], where: str) -> bytes:
    scores = _list(own, "scores", float, where)
    if len(scores) != len(tokens):
        raise _refused(f"{len(scores):,} scores of {len(tokens):,} tokens", where)
    rules = _list(own, "precompiled_charsmap", int, where, default=[])
    parts = zip(tokens, scores, kinds, strict=True)
    found = Pieces(
        pieces=tuple(Piece(text, score, Kind(kind)) for text, score, kind in parts),
        algorithm="bpe",
        prefixed=own.get("add_space_prefix", True) is True,
        squeezed=own.get("remove_extra_whitespaces", False) is True,
        charsmap=bytes(byte % 256 for byte in rules),
    )
    return pieces.as_json(pieces.checked(found, where), where)


def _byte_pairs(
    own: dict[str, Any], tokens: list[str], kinds: list[int], where: str
) -> tuple[bytes, bool]:
    name = own.get("pre")
    if not isinstance(name, str) or name not in CUTS:
        raise _refused(
            f"tokenizer.ggml.pre is {name!r:.60}, and known are {', '.join(sorted(CUTS))}", where
        )
    cut = CUTS[name]
    content = byte_pairs.as_json(
        {text: number for number, text in enumerate(tokens)},
        byte_pairs.merges_of(_list(own, "merges", str, where), where),
        pattern=cut.pattern,
        where=where,
        composed=cut.composed,
        whole_words=cut.whole_words,
    )
    beside = [
        Added(tokens[number], number, kind == Kind.CONTROL)
        for number, kind in enumerate(kinds)
        if kind in (Kind.CONTROL, Kind.USER_DEFINED)
    ]
    return with_added(content, beside, where), cut.begins


def _settings(
    metadata: Mapping[str, Any], own: dict[str, Any], tokens: list[str], begins: bool
) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = own.get(f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    settings["add_bos_token"] = own.get("add_bos_token", begins) is True
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    return settings


def _list(
    own: dict[str, Any], name: str, kind: type, where: str, default: list[Any] | None = None
) -> list[Any]:
    found = own.get(name, default)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise _refused(f"its {name} are no list of {kind.__name__}", where)
    return found


def _refused(why: str, where: str) -> DataError:
    return DataError(
        "the tokenizer of a GGUF is not understood",
        where=where,
        why=why,
        fix="import the folder that it was converted from",
    )
