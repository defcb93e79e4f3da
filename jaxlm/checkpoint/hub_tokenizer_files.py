"""The tokenizer of a model that is imported, in whichever form it came."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxlm.checkpoint.hub_folder import Source
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data.hub_tokenizer import Imported
from jaxlm.data.tokenizer_file import LARGEST_FILE
from jaxlm.data.vocabularies import byte_pairs, pieces, word_pieces
from jaxlm.data.vocabularies.added import Added, with_added
from jaxlm.data.vocabularies.patterns import Pattern

Say = Callable[[str], None]
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # the first line of a file of tiktoken
# How models whose tokenizer is a file of ranks cut text, which the file does not say.
CUTS: dict[str, Pattern] = {
    "gpt2": "gpt2",
    "llama": "cl100k",
    "qwen2": "cl100k, digits apart",
    "qwen3": "cl100k, digits apart",
    "qwen3_moe": "cl100k, digits apart",
}
COMPOSED = ("qwen2", "qwen3", "qwen3_moe")  # read text in Unicode's composed form
NAMED = (
    "bos",
    "eos",
    "unk",
    "pad",
    "cls",
    "sep",
    "mask",
)  # each with _token, in tokenizer_config.json
GPT2_END = "<|endoftext|>"


class Form(NamedTuple):
    """A tokenizer.json, the file it was made of, and the tokens around a document where no setting names them."""

    content: bytes
    name: str
    begins: str | None = None
    ends: str | None = None


def read_tokenizer(folder: Source, say: Say = lambda _: None) -> Imported:
    """The model's tokenizer, with the tokens that its documents begin and end with, and those that end an answer.

    A SentencePiece model, word pieces, byte pairs or tiktoken's ranks become a tokenizer.json first.

    Raises:
      InputMissing: where the folder has no tokenizer.
      DataError: where it is none, or nothing says what ends a document.
    """
    settings = (
        folder.read_json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    )
    form = _form(folder, settings, say)
    where = str(folder.path / form.name)
    try:
        parsed = json.loads(form.content)
        added = {
            entry["content"]: entry["id"] for entry in parsed.get("added_tokens") or ()
        } | _vocabulary(parsed)
        begun = _begun(parsed)
    except (
        ValueError,
        RecursionError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:
        raise DataError(
            "tokenizer.json is not the JSON of a tokenizer",
            where=where,
            why=f"{type(error).__name__}: {error}"[:300],
            fix="fetch the file again where it came from",
        ) from error

    def ids(*names: str) -> list[int]:
        for name in names:
            if (text := _text(settings.get(f"{name}_token"))) in added:
                return [added[text]]
            number = folder.config.get(f"{name}_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and not isinstance(number, bool):
                return [number]
        return []

    def own(name: str | None) -> list[int]:
        return [added[name]] if name in added else []

    # BERT calls what begins a document its class, and what ends one a separator.
    bos = ids("bos", "cls") or own(form.begins)
    is_begun = settings.get("add_bos_token", bool(bos) and added.get(begun) == bos[0])
    ends = _ends(folder)
    tokenizer = Imported(
        form.content,
        before=bos if is_begun else (),
        after=ids("eos", "sep") or own(form.ends),
        ends=ends,
        where=where,
    )
    if others := set(ends).difference(tokenizer.ends):
        say(
            f"eos_token_id {sorted(others)}: the tokenizer has {tokenizer.size:,} ids, so they end nothing"
        )
    return tokenizer


def _ends(folder: Source) -> list[int]:
    """Ids that end an answer, as transformers finds them; a chat model may have its own beside the end of a document."""
    name = "generation_config.json"
    generation = folder.read_json(name) if folder.has(name) else {}
    found = generation.get("eos_token_id", folder.config.get("eos_token_id"))
    return [i for i in (found if isinstance(found, list) else [found]) if type(i) is int]


def _form(folder: Source, settings: dict[str, Any], say: Say) -> Form:
    if folder.has("tokenizer.json"):
        return Form(folder.read("tokenizer.json", LARGEST_FILE), "tokenizer.json")
    for form in (_sentencepiece, _word_pieces, _byte_pairs, _ranks):
        found = form(folder, settings, say)
        if found is not None:
            where = str(folder.path / found.name)
            content = with_added(found.content, _added(folder, settings, found), where)
            say(f"{found.name} was made a tokenizer.json, which an export has too")
            return found._replace(content=content)
    raise InputMissing(
        "there is no tokenizer in the folder",
        where=str(folder.path),
        why="a tokenizer.json, a SentencePiece .model, a vocab.txt, a vocab.json with merges.txt, or a .tiktoken was looked for",
        fix="download the tokenizer's files of the model too",
    )


def _sentencepiece(folder: Source, settings: dict[str, Any], say: Say) -> Form | None:
    name = next((name for name in SENTENCEPIECE if folder.has(name)), None)
    if name is None:
        return None
    model, where = folder.read(name, LARGEST_FILE), str(folder.path / name)
    if RANKS.match(model):
        return None
    found = pieces.read(model, where)
    content = pieces.as_json(found, where)
    if others := pieces.differences(model, content, where):
        say(
            f"{name} as a tokenizer.json gives other ids than SentencePiece to {len(others)} of "
            f"{len(pieces.PROBES)} texts that are compared, of which the first is {others[0]!a}"
        )
    return Form(content, name, found.begins, found.ends)


def _word_pieces(folder: Source, settings: dict[str, Any], say: Say) -> Form | None:
    if not folder.has("vocab.txt"):
        return None
    where = str(folder.path / "vocab.txt")
    vocabulary = word_pieces.vocabulary_of(folder.read("vocab.txt", LARGEST_FILE), where)
    content = word_pieces.as_json(
        vocabulary,
        where,
        lowercase=_flag(settings, "do_lower_case", True),
        accents=_flag(settings, "strip_accents", None),
        apart=_flag(settings, "tokenize_chinese_chars", True),
    )
    return Form(content, "vocab.txt", word_pieces.BEGINS, word_pieces.ENDS)


def _byte_pairs(folder: Source, settings: dict[str, Any], say: Say) -> Form | None:
    if not (folder.has("vocab.json") and folder.has("merges.txt")):
        return None
    kind = folder.config.get("model_type")
    vocabulary, where = folder.read_json("vocab.json"), str(folder.path / "merges.txt")
    if not all(type(number) is int for number in vocabulary.values()):
        raise DataError(
            "vocab.json does not hold ids of tokens",
            where=str(folder.path / "vocab.json"),
            why="every token has a whole number",
            fix="fetch the file again where it came from",
        )
    try:
        lines = folder.read("merges.txt", LARGEST_FILE).decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            "merges.txt is not UTF-8",
            where=where,
            why=str(error),
            fix="fetch the file again where it came from",
        ) from error
    merges = byte_pairs.merges_of(
        [line for line in lines if line and not line.startswith("#version")], where
    )
    content = byte_pairs.as_json(
        vocabulary,
        merges,
        pattern=CUTS[kind] if kind in COMPOSED else "gpt2",
        where=where,
        composed=kind in COMPOSED,
    )
    return Form(content, "merges.txt", GPT2_END, GPT2_END)


def _ranks(folder: Source, settings: dict[str, Any], say: Say) -> Form | None:
    names = sorted(path.name for path in folder.path.glob("*.tiktoken"))
    name = next((name for name in ("tokenizer.model", *names) if folder.has(name)), None)
    if name is None:
        return None
    kind, where = folder.config.get("model_type"), str(folder.path / name)
    if kind not in CUTS:
        raise DataError(
            "nothing says how a file of ranks cuts text into words",
            where=where,
            why=f"it is known of {', '.join(sorted(CUTS))}, and the model is a {kind!r:.60}",
            fix="a folder with tokenizer.json, as transformers writes it, is read as it is",
        )
    ranks = byte_pairs.ranks(folder.read(name, LARGEST_FILE), where)
    vocabulary, merges = byte_pairs.of_ranks(ranks)
    content = byte_pairs.as_json(
        vocabulary,
        merges,
        pattern=CUTS[kind],
        where=where,
        composed=kind in COMPOSED,
        whole_words=True,
    )
    return Form(content, name, None, GPT2_END)


def _added(folder: Source, settings: dict[str, Any], form: Form) -> Iterator[Added]:
    """Tokens that the settings beside a vocabulary add to it, and those of it that they name, which are special."""
    vocabulary = _vocabulary(json.loads(form.content))
    named = [_text(settings.get(f"{name}_token")) for name in NAMED]
    ids = {text: vocabulary[text] for text in (*named, form.ends) if text in vocabulary}
    found = {number: Added(text, number, True) for text, number in ids.items() if text is not None}
    listed = settings.get("added_tokens_decoder")
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        text = _text(entry)
        if not (isinstance(key, str) and key.isdigit() and text):
            raise DataError(
                "a token that tokenizer_config.json adds has no id or no text",
                where=str(folder.path / "tokenizer_config.json"),
                why=f"{key!r:.60}: {entry!r:.200}",
                fix="fetch the file again where it came from",
            )
        found[int(key)] = Added(text, int(key), bool(entry.get("special")))
    yield from found.values()
    if listed is None and settings.get("tokenizer_class") == "T5Tokenizer":
        yield from _sentinels(json.loads(form.content), settings)


def _sentinels(parsed: dict[str, Any], settings: dict[str, Any]) -> Iterator[Added]:
    """T5's, behind the pieces, the last of them first."""
    pieces_of_model, count = len(parsed["model"]["vocab"]), settings.get("extra_ids", 100)
    for number in range(count if isinstance(count, int) and 0 <= count <= 1000 else 0):
        yield Added(f"<extra_id_{count - 1 - number}>", pieces_of_model + number, True)


def _flag(settings: dict[str, Any], name: str, default: bool | None) -> Any:
    value = settings.get(name)
    return value if isinstance(value, bool) else default


def _text(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which may be an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _vocabulary(parsed: dict[str, Any]) -> dict[str | None, int]:
    """Pieces by text, where the model keeps them so."""
    found = parsed["model"].get("vocab")
    return found if isinstance(found, dict) else {}


def _begun(parsed: dict[str, Any]) -> str | None:
    """The special token that tokenizer.json puts in front of a text once it is encoded."""
    after = parsed.get("post_processor") or {}
    for step in after.get("processors", [after]):
        if "cls" in step:  # as BERT and RoBERTa do
            return str(step["cls"][0])
        first = (step.get("single") or [{}])[0] if step.get("type") == "TemplateProcessing" else {}
        if "SpecialToken" in first:
            return str(first["SpecialToken"]["id"])
    return None
