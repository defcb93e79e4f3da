"""The tokenizer in a GGUF's metadata as tokenizer.json and tokenizer_config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.vocabularies import byte_pairs, pieces
from jaxlm.data.vocabularies.added import Added, with_added
from jaxlm.data.vocabularies.patterns import Pattern
from jaxlm.data.vocabularies.pieces import Kind, Piece, Pieces

OWN = "tokenizer.ggml."
# Keys that name special ids or repeat other keys.
NEUTRAL = ("tokenizer.huggingface.json", "tokenizer.chat_template", f"{OWN}token_type_count")
READ = frozenset(
    "model pre tokens scores token_type merges add_bos_token add_eos_token add_sep_token "
    "add_space_prefix "
    "remove_extra_whitespaces precompiled_charsmap".split()
)


class Cut(NamedTuple):
    """Pre-tokenization of byte-level text, by `tokenizer.ggml.pre`."""

    pattern: Pattern
    composed: bool = False
    whole_words: bool = False
    begins: bool = False  # default if the file has no add_bos_token


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
    """Return the content of tokenizer.json and of tokenizer_config.json.

    Raises:
      DataError: if the metadata has no tokenizer, or an unsupported one.
    """
    fields = {
        key.removeprefix(OWN): value for key, value in metadata.items() if key.startswith(OWN)
    }
    unknown = [
        key
        for key in metadata
        if key.startswith("tokenizer.")
        and not key.startswith(NEUTRAL)
        and not key.endswith("token_id")
        and key.removeprefix(OWN) not in READ
    ]
    if unknown:
        raise _refused(f"{', '.join(map(repr, unknown[:5]))} is unknown", where)
    tokens = _list(fields, "tokens", str, where)
    kinds = _list(fields, "token_type", int, where, default=[int(Kind.NORMAL)] * len(tokens))
    if len(kinds) != len(tokens) or not all(kind in Kind._value2member_map_ for kind in kinds):
        raise _refused("token_type does not have a valid type for each token", where)
    if len(set(tokens)) < len(tokens):
        raise _refused("two of its tokens are the same", where)
    if fields.get("model") == "llama":
        content, begins = _pieces(fields, tokens, kinds, where), True
    elif fields.get("model") == "gpt2":
        content, begins = _byte_pairs(fields, tokens, kinds, where)
    else:
        raise _refused(f"its model is {fields.get('model')!r:.60}, not llama or gpt2", where)
    return content, _settings(metadata, fields, tokens, begins)


def ends(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a document, a turn or a message; empty if none are named."""
    named = [metadata.get(f"{OWN}{what}_token_id") for what in ("eos", "eot", "eom")]
    return sorted({number for number in named if isinstance(number, int)})


def _pieces(fields: dict[str, Any], tokens: list[str], kinds: list[int], where: str) -> bytes:
    scores = _list(fields, "scores", float, where)
    if len(scores) != len(tokens):
        raise _refused(f"{len(scores):,} scores of {len(tokens):,} tokens", where)
    rules = _list(fields, "precompiled_charsmap", int, where, default=[])
    parts = zip(tokens, scores, kinds, strict=True)
    vocabulary = Pieces(
        pieces=tuple(Piece(text, score, Kind(kind)) for text, score, kind in parts),
        algorithm="bpe",
        prefixed=fields.get("add_space_prefix", True) is True,
        squeezed=fields.get("remove_extra_whitespaces", False) is True,
        charsmap=bytes(byte % 256 for byte in rules),
    )
    return pieces.as_json(pieces.checked(vocabulary, where), where)


def _byte_pairs(
    fields: dict[str, Any], tokens: list[str], kinds: list[int], where: str
) -> tuple[bytes, bool]:
    name = fields.get("pre")
    if not isinstance(name, str) or name not in CUTS:
        raise _refused(
            f"tokenizer.ggml.pre is {name!r:.60}, not one of {', '.join(sorted(CUTS))}", where
        )
    cut = CUTS[name]
    content = byte_pairs.as_json(
        {text: number for number, text in enumerate(tokens)},
        byte_pairs.merges_of(_list(fields, "merges", str, where), where),
        pattern=cut.pattern,
        where=where,
        composed=cut.composed,
        whole_words=cut.whole_words,
    )
    added = [
        Added(tokens[number], number, kind == Kind.CONTROL)
        for number, kind in enumerate(kinds)
        if kind in (Kind.CONTROL, Kind.USER_DEFINED)
    ]
    return with_added(content, added, where), cut.begins


def _settings(
    metadata: Mapping[str, Any], fields: dict[str, Any], tokens: list[str], begins: bool
) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    settings["add_bos_token"] = fields.get("add_bos_token", begins) is True
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    return settings


def _list(
    fields: dict[str, Any], name: str, kind: type, where: str, default: list[Any] | None = None
) -> list[Any]:
    values = fields.get(name, default)
    if not isinstance(values, list) or not all(type(each) is kind for each in values):
        raise _refused(f"its {name} is not a list of {kind.__name__}", where)
    return values


def _refused(why: str, where: str) -> DataError:
    return DataError(
        "jaxlm does not support the tokenizer of a GGUF",
        where=where,
        why=why,
        fix="import the original folder of the model",
    )
