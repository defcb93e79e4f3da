"""The tokenizer in a GGUF's metadata as tokenizer.json and tokenizer_config.json."""

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data.hub_tokenizer import ExtraToken, with_extra_tokens
from jaxlm.data.vocabularies import byte_pairs, pieces
from jaxlm.data.vocabularies.byte_pairs import Pattern
from jaxlm.data.vocabularies.pieces import PieceKind, PieceVocabulary, VocabularyPiece

PREFIX = "tokenizer.ggml."
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# The probes, and texts on which pre-tokenizers differ.
TEXTS = (
    *pieces.PROBES,
    "I'm WE'RE don'T\n\n\n  x1234567y a1b22c333 snake_case camelCase ABCDef \r\n!!\t\t7\n \n##",
    string.punctuation + " " + string.punctuation[::-1] + "\n" + string.printable,
)
# Keys that name special ids or repeat other keys.
NEUTRAL = ("tokenizer.huggingface.json", "tokenizer.chat_template", f"{PREFIX}token_type_count")
READ = frozenset(
    "model pre tokens scores token_type merges add_bos_token add_eos_token add_sep_token "
    "add_space_prefix remove_extra_whitespaces precompiled_charsmap".split()
)


class GgufPreTokenizer(NamedTuple):
    """Pre-tokenization of byte-level text, by `tokenizer.ggml.pre`."""

    pattern: Pattern
    composed: bool = False
    whole_words: bool = False
    begins: bool = False  # default if the file has no add_bos_token


PRE_TOKENIZERS = (
    dict.fromkeys(("gpt-2", "olmo", "phi-2"), GgufPreTokenizer("gpt2"))
    | dict.fromkeys(("smollm", "starcoder", "refact"), GgufPreTokenizer("gpt2, digits apart"))
    | dict.fromkeys(("smaug-bpe", "dbrx"), GgufPreTokenizer("cl100k"))
    | dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen"), GgufPreTokenizer("cl100k, digits apart", composed=True)
    )
    | dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        GgufPreTokenizer("cl100k", whole_words=True, begins=True),
    )
)


def as_json(metadata: Mapping[str, Any], where: str) -> tuple[bytes, dict[str, Any]]:
    """Return the content of tokenizer.json and of tokenizer_config.json.

    Raise DataError if the metadata has no tokenizer, or an unsupported one.
    """
    fields = {
        key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)
    }
    named = (key for key in metadata if key.startswith("tokenizer."))
    others = (key for key in named if not key.startswith(NEUTRAL) and not key.endswith("token_id"))
    unknown = [key for key in others if key.removeprefix(PREFIX) not in READ]
    if unknown:
        raise _refused(f"{', '.join(map(repr, unknown[:5]))} is unknown", where)
    tokens = _list(fields, "tokens", str, where)
    kinds = _list(fields, "token_type", int, where, default=[int(PieceKind.NORMAL)] * len(tokens))
    if len(kinds) != len(tokens) or not all(kind in PieceKind._value2member_map_ for kind in kinds):
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
    named = [metadata.get(f"{PREFIX}{what}_token_id") for what in ("eos", "eot", "eom")]
    return sorted({number for number in named if isinstance(number, int)})


def _pieces(fields: dict[str, Any], tokens: list[str], kinds: list[int], where: str) -> bytes:
    scores = _list(fields, "scores", float, where)
    if len(scores) != len(tokens):
        raise _refused(f"{len(scores):,} scores of {len(tokens):,} tokens", where)
    rules = _list(fields, "precompiled_charsmap", int, where, default=[])
    parts = zip(tokens, scores, kinds, strict=True)
    vocabulary = PieceVocabulary(
        pieces=tuple(VocabularyPiece(text, score, PieceKind(kind)) for text, score, kind in parts),
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
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise _refused(
            f"tokenizer.ggml.pre is {name!r:.60}, not one of {', '.join(sorted(PRE_TOKENIZERS))}",
            where,
        )
    cut = PRE_TOKENIZERS[name]
    content = byte_pairs.as_json(
        {text: number for number, text in enumerate(tokens)},
        byte_pairs.parse_merges(_list(fields, "merges", str, where), where),
        pattern=cut.pattern,
        where=where,
        composed=cut.composed,
        whole_words=cut.whole_words,
    )
    added = [
        ExtraToken(tokens[number], number, kind == PieceKind.CONTROL)
        for number, kind in enumerate(kinds)
        if kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    ]
    return with_extra_tokens(content, added, where), cut.begins


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
    what = "jaxlm does not support the tokenizer of a GGUF"
    return DataError(what, where=where, why=why, fix="import the original folder of the model")


def metadata(content: bytes, rows: int, where: str) -> dict[str, Any]:
    """Return tokens, pre-tokenization and token types; ids are checked on difficult texts.

    Args:
      rows: rows of the embedding; ids without a token are marked unused.
      where: file name in errors.

    Raises:
      ConfigError: if llama.cpp has no equivalent tokenizer.
    """
    parsed = json.loads(content)
    model = parsed["model"]
    if model.get("type") != "BPE":
        raise _not_written(f"its type is {model.get('type')}; only byte pairs are supported", where)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if not merges:
        raise _not_written("it has no merges, which llama.cpp requires", where)
    names = {number: piece for piece, number in model["vocab"].items()}
    added = {each["id"]: each for each in parsed.get("added_tokens") or ()}
    names |= {number: each["content"] for number, each in added.items()}
    kinds = [int(PieceKind.NORMAL if i in names else PieceKind.UNUSED) for i in range(rows)]
    for i, each in added.items():
        if i < rows:
            kinds[i] = int(PieceKind.CONTROL if each["special"] else PieceKind.USER_DEFINED)
    tokens = [names.get(number, f"[PAD{number}]") for number in range(rows)]
    common = {f"{PREFIX}tokens": tokens, f"{PREFIX}token_type": kinds}
    if "ByteLevel" in json.dumps(parsed.get("decoder") or {}):
        candidates = _pre_tokenized(common, merges, is_whole=bool(model.get("ignore_merges")))
    else:
        candidates = _scored(common, merges, model.get("unk_token"))
    for candidate in candidates:
        if _agrees(content, candidate, where):
            return candidate
    raise _not_written("no tokenizer of llama.cpp gives the same ids", where)


def _pre_tokenized(
    common: dict[str, Any], merges: list[tuple[str, ...]], *, is_whole: bool
) -> Iterator[dict[str, Any]]:
    """Yield the metadata with each known pre-tokenizer."""
    for name, cut in PRE_TOKENIZERS.items():
        if cut.whole_words == is_whole:
            yield common | {
                f"{PREFIX}model": "gpt2",
                f"{PREFIX}pre": name,
                f"{PREFIX}merges": [" ".join(pair) for pair in merges],
            }


def _scored(
    common: dict[str, Any], merges: list[tuple[str, ...]], unknown: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the metadata without and with a space in front; earlier merges get higher scores."""
    tokens = common[f"{PREFIX}tokens"]
    ranks: dict[str, int] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), len(ranks))
    kinds = list(common[f"{PREFIX}token_type"])
    for number, token in enumerate(tokens):
        if token == unknown:
            kinds[number] = int(PieceKind.UNKNOWN)
        elif BYTE.fullmatch(token):
            kinds[number] = int(PieceKind.BYTE)
    for has_space in (False, True):
        yield common | {
            f"{PREFIX}model": "llama",
            f"{PREFIX}scores": [-float(ranks.get(token, len(ranks))) for token in tokens],
            f"{PREFIX}token_type": kinds,
            f"{PREFIX}add_space_prefix": has_space,
        }


def _agrees(content: bytes, written: dict[str, Any], where: str) -> bool:
    """Return if the metadata, read back, normalizes, cuts and encodes texts equally."""
    import tokenizers

    try:
        converted, _ = as_json(written, where)
    except DataError:  # two equal tokens, or no unknown token
        return False
    built = [tokenizers.Tokenizer.from_buffer(each) for each in (content, converted)]
    for each in built:
        each.encode_special_tokens = True
    is_cut = written[f"{PREFIX}model"] == "gpt2"

    def done(tokenizer: Any) -> list[Any]:
        texts = TEXTS
        if is_cut:
            normalizer, cutter = tokenizer.normalizer, tokenizer.pre_tokenizer
            texts = tuple(normalizer.normalize_str(text) for text in TEXTS) if normalizer else TEXTS
            if cutter is None:
                return []
            cuts = [[piece for piece, _ in cutter.pre_tokenize_str(text)] for text in texts]
            return [texts, cuts, _ids(tokenizer)]
        return _ids(tokenizer)

    ours, theirs = map(done, built)
    return ours == theirs != []


def _ids(tokenizer: Any) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(list(TEXTS), add_special_tokens=False)]


def _not_written(why: str, where: str) -> ConfigError:
    fix = "--to=hf    # a folder with the full tokenizer"
    return ConfigError("a GGUF cannot hold this tokenizer", where=where, why=why, fix=fix)
