"""A `tokenizer.json` as the tokenizer in a GGUF's metadata, checked to give the same ids."""

import json
import re
import string
from collections.abc import Iterator
from typing import Any

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data.vocabularies import gguf_tokens
from jaxlm.data.vocabularies.gguf_tokens import CUTS, OWN
from jaxlm.data.vocabularies.pieces import PROBES, Kind

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# The probes, and texts on which pre-tokenizers differ.
TEXTS = (
    *PROBES,
    "I'm WE'RE don'T\n\n\n  x1234567y a1b22c333 snake_case camelCase ABCDef \r\n!!\t\t7\n \n##",
    string.punctuation + " " + string.punctuation[::-1] + "\n" + string.printable,
)


def metadata(content: bytes, rows: int, where: str) -> dict[str, Any]:
    """Return tokens, pre-tokenization and token types; ids are checked on difficult texts.

    Args:
      content: the tokenizer.json.
      rows: rows of the embedding; ids without a token are marked unused.
      where: file name in errors.

    Raises:
      ConfigError: if llama.cpp has no equivalent tokenizer.
    """
    parsed = json.loads(content)
    model = parsed["model"]
    if model.get("type") != "BPE":
        raise _refused(f"its type is {model.get('type')}; only byte pairs are supported", where)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if not merges:
        raise _refused("it has no merges, which llama.cpp requires", where)
    names = {number: piece for piece, number in model["vocab"].items()}
    added = {each["id"]: each for each in parsed.get("added_tokens") or ()}
    names |= {number: each["content"] for number, each in added.items()}
    kinds = {
        number: Kind.CONTROL if each["special"] else Kind.USER_DEFINED
        for number, each in added.items()
    }
    tokens = [names.get(number, f"[PAD{number}]") for number in range(rows)]
    common = {
        f"{OWN}tokens": tokens,
        f"{OWN}token_type": [
            int(kinds.get(i, Kind.NORMAL if i in names else Kind.UNUSED)) for i in range(rows)
        ],
    }
    if "ByteLevel" in json.dumps(parsed.get("decoder") or {}):
        candidates = _byte_pairs(common, merges, is_whole=bool(model.get("ignore_merges")))
    else:
        candidates = _pieces(common, merges, model.get("unk_token"))
    match = next(
        (candidate for candidate in candidates if _agrees(content, candidate, where)), None
    )
    if match is None:
        raise _refused("no tokenizer of llama.cpp gives the same ids", where)
    return match


def _byte_pairs(
    common: dict[str, Any], merges: list[tuple[str, ...]], *, is_whole: bool
) -> Iterator[dict[str, Any]]:
    """Yield the metadata with each known pre-tokenizer."""
    for name, cut in CUTS.items():
        if cut.whole_words == is_whole:
            yield common | {
                f"{OWN}model": "gpt2",
                f"{OWN}pre": name,
                f"{OWN}merges": [" ".join(pair) for pair in merges],
            }


def _pieces(
    common: dict[str, Any], merges: list[tuple[str, ...]], unknown: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the metadata without and with a space in front; earlier merges get higher scores."""
    tokens = common[f"{OWN}tokens"]
    ranks: dict[str, int] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), len(ranks))
    kinds = [
        int(Kind.UNKNOWN if token == unknown else Kind.BYTE if BYTE.fullmatch(token) else kind)
        for token, kind in zip(tokens, common[f"{OWN}token_type"], strict=True)
    ]
    for has_space in (False, True):
        yield common | {
            f"{OWN}model": "llama",
            f"{OWN}scores": [-float(ranks.get(token, len(ranks))) for token in tokens],
            f"{OWN}token_type": kinds,
            f"{OWN}add_space_prefix": has_space,
        }


def _agrees(content: bytes, written: dict[str, Any], where: str) -> bool:
    """Return if the metadata, read back, normalizes, cuts and encodes texts equally."""
    import tokenizers

    try:
        converted, _ = gguf_tokens.as_json(written, where)
    except DataError:  # two equal tokens, or no unknown token
        return False
    built = [tokenizers.Tokenizer.from_buffer(each) for each in (content, converted)]
    for each in built:
        each.encode_special_tokens = True
    is_cut = written[f"{OWN}model"] == "gpt2"

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


def _refused(why: str, where: str) -> ConfigError:
    return ConfigError(
        "a GGUF cannot hold this tokenizer",
        where=where,
        why=why,
        fix="--to=hf    # a folder with the full tokenizer",
    )
