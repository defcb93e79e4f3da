"""A `tokenizer.json` as the tokenizer in a GGUF's metadata: the same ids for the same text, or none at all."""

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
# Beside the probes, what ways to cut words treat differently.
TEXTS = (
    *PROBES,
    "I'm WE'RE don'T\n\n\n  x1234567y a1b22c333 snake_case camelCase ABCDef \r\n!!\t\t7\n \n##",
    string.punctuation + " " + string.punctuation[::-1] + "\n" + string.printable,
)


def metadata(content: bytes, rows: int, where: str) -> dict[str, Any]:
    """The tokens, how text is cut into them, and what each is; read back, it gives the same ids on texts that are hard.

    Args:
      content: the tokenizer.json.
      rows: of the embedding; ids that are no token's are told to be unused.
      where: for errors.

    Raises:
      ConfigError: where llama.cpp has no tokenizer that does the same.
    """
    parsed = json.loads(content)
    model = parsed["model"]
    if model.get("type") != "BPE":
        raise _refused(
            f"it is of the kind {model.get('type')}, and byte pairs alone are written", where
        )
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if not merges:
        raise _refused("it has no merges, without which llama.cpp reads none", where)
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
        ways = _byte_pairs(common, merges, is_whole=bool(model.get("ignore_merges")))
    else:
        ways = _pieces(common, merges, model.get("unk_token"))
    found = next((way for way in ways if _agrees(content, way, where)), None)
    if found is None:
        raise _refused("none that llama.cpp has gives the same ids", where)
    return found


def _byte_pairs(
    common: dict[str, Any], merges: list[tuple[str, ...]], *, is_whole: bool
) -> Iterator[dict[str, Any]]:
    """By each way to cut text that is known."""
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
    """With a space in front of a text, and without. The sooner a piece is merged, the higher its score."""
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
    """Whether what is read back does the same: to a text before it is cut, where it is cut, and the ids."""
    import tokenizers

    try:
        again, _ = gguf_tokens.as_json(written, where)
    except DataError:  # two tokens that are spelt the same, or none for what is unknown
        return False
    built = [tokenizers.Tokenizer.from_buffer(each) for each in (content, again)]
    for each in built:
        each.encode_special_tokens = True
    is_cut = written[f"{OWN}model"] == "gpt2"

    def done(tokenizer: Any) -> list[Any]:
        texts = TEXTS
        if is_cut:
            normaliser, cutter = tokenizer.normalizer, tokenizer.pre_tokenizer
            texts = tuple(normaliser.normalize_str(text) for text in TEXTS) if normaliser else TEXTS
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
        "the tokenizer cannot be written in a GGUF",
        where=where,
        why=why,
        fix="--to=hf    # a folder, with the tokenizer in full",
    )
