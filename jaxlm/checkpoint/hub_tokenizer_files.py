"""The tokenizer of an imported model, from any of the file formats that models come with."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxlm.checkpoint.hub_folder import ModelSource, damaged
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data.hub_tokenizer import ExtraToken, ImportedTokenizer, with_extra_tokens
from jaxlm.data.tokenizer_file import MAX_FILE_BYTES
from jaxlm.data.vocabularies import byte_pairs, pieces, word_pieces
from jaxlm.data.vocabularies.byte_pairs import Pattern

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # first line of a tiktoken file
# Pretokenization by model_type for tokenizers that are tiktoken files, which do not contain it.
CUTS: dict[str, Pattern] = {
    "gpt2": "gpt2",
    "llama": "cl100k",
    "qwen2": "cl100k, digits apart",
    "qwen3": "cl100k, digits apart",
    "qwen3_moe": "cl100k, digits apart",
}
COMPOSED = ("qwen2", "qwen3", "qwen3_moe")  # models that normalize text to Unicode NFC
# Special tokens: each is NAME_token in tokenizer_config.json.
NAMED = ("bos", "eos", "unk", "pad", "cls", "sep", "mask")
GPT2_END = "<|endoftext|>"


class TokenizerSource(NamedTuple):
    """A tokenizer.json, its source file, and the default tokens around a document."""

    content: bytes
    name: str
    begins: str | None = None
    ends: str | None = None


def read_tokenizer(folder: ModelSource, say: Log = lambda _: None) -> ImportedTokenizer:
    """Read a model's tokenizer, with the tokens around its documents and those that end an answer.

    SentencePiece models, WordPiece vocabularies, BPE merges and tiktoken ranks are converted to a
    tokenizer.json first. Raises InputMissing if the folder has no tokenizer; DataError if the
    tokenizer is damaged, or no token ends a document.
    """
    name = "tokenizer_config.json"
    settings = folder.read_json(name) if folder.has(name) else {}
    form = _form(folder, settings, say)
    where = str(folder.path / form.name)
    try:
        parsed = json.loads(form.content)
        extra = {entry["content"]: entry["id"] for entry in parsed.get("added_tokens") or ()}
        added = extra | _vocabulary(parsed)
        begun = _begun(parsed)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"[:300]
        raise damaged("tokenizer.json is not a tokenizer's JSON", where, why, "file") from error

    def ids(*names: str) -> list[int]:
        for name in names:
            if (text := _text(settings.get(f"{name}_token"))) in added:
                return [added[text]]
            number = folder.config.get(f"{name}_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and not isinstance(number, bool):
                return [number]
        return []

    def in_vocabulary(name: str | None) -> list[int]:
        return [added[name]] if name in added else []

    # BERT uses its class token to begin a document, and its separator to end one.
    bos = ids("bos", "cls") or in_vocabulary(form.begins)
    is_begun = settings.get("add_bos_token", bool(bos) and added.get(begun) == bos[0])
    ends = _ends(folder)
    tokenizer = ImportedTokenizer(
        form.content,
        before=bos if is_begun else (),
        after=ids("eos", "sep") or in_vocabulary(form.ends),
        ends=ends,
        where=where,
    )
    if others := set(ends).difference(tokenizer.ends):
        why = f"the tokenizer has only {tokenizer.size:,} ids"
        say(f"eos_token_id {sorted(others)} is ignored: {why}")
    return tokenizer


def _ends(folder: ModelSource) -> list[int]:
    """Return the ids that end an answer, as transformers does; a chat model may add its own."""
    name = "generation_config.json"
    generation = folder.read_json(name) if folder.has(name) else {}
    ids = generation.get("eos_token_id", folder.config.get("eos_token_id"))
    return [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]


def _form(folder: ModelSource, settings: dict[str, Any], say: Log) -> TokenizerSource:
    if folder.has("tokenizer.json"):
        return TokenizerSource(folder.read("tokenizer.json", MAX_FILE_BYTES), "tokenizer.json")
    for form in (_sentencepiece, _word_pieces, _byte_pairs, _ranks):
        source = form(folder, settings, say)
        if source is not None:
            extra, where = _added(folder, settings, source), str(folder.path / source.name)
            content = with_extra_tokens(source.content, extra, where)
            say(f"{source.name} was converted to a tokenizer.json, which an export has too")
            return source._replace(content=content)
    raise InputMissing(
        "there is no tokenizer in the folder",
        where=str(folder.path),
        why="looked for tokenizer.json, a SentencePiece .model, vocab.txt, vocab.json with "
        "merges.txt, and .tiktoken",
        fix="download the tokenizer's files of the model too",
    )


def _sentencepiece(
    folder: ModelSource, settings: dict[str, Any], say: Log
) -> TokenizerSource | None:
    name = next((name for name in SENTENCEPIECE if folder.has(name)), None)
    if name is None:
        return None
    model, where = folder.read(name, MAX_FILE_BYTES), str(folder.path / name)
    if RANKS.match(model):
        return None
    vocabulary = pieces.read(model, where)
    content = pieces.as_json(vocabulary, where)
    if others := pieces.differences(model, content, where):
        count = f"{len(others)} of {len(pieces.PROBES)} probe texts otherwise than SentencePiece"
        say(f"{name} as a tokenizer.json encodes {count}; the first is {others[0]!a}")
    return TokenizerSource(content, name, vocabulary.begins, vocabulary.ends)


def _word_pieces(folder: ModelSource, settings: dict[str, Any], say: Log) -> TokenizerSource | None:
    if not folder.has("vocab.txt"):
        return None
    where = str(folder.path / "vocab.txt")
    vocabulary = word_pieces.vocabulary_of(folder.read("vocab.txt", MAX_FILE_BYTES), where)
    content = word_pieces.as_json(
        vocabulary,
        where,
        lowercase=_flag(settings, "do_lower_case", True),
        accents=_flag(settings, "strip_accents", None),
        apart=_flag(settings, "tokenize_chinese_chars", True),
    )
    return TokenizerSource(content, "vocab.txt", word_pieces.BEGINS, word_pieces.ENDS)


def _byte_pairs(folder: ModelSource, settings: dict[str, Any], say: Log) -> TokenizerSource | None:
    if not (folder.has("vocab.json") and folder.has("merges.txt")):
        return None
    kind = folder.config.get("model_type")
    vocabulary, where = folder.read_json("vocab.json"), str(folder.path / "merges.txt")
    if not all(type(number) is int for number in vocabulary.values()):
        path, why = folder.path / "vocab.json", "every token needs a whole number"
        raise damaged("vocab.json does not hold token ids", path, why, "file")
    try:
        lines = folder.read("merges.txt", MAX_FILE_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise damaged("merges.txt is not UTF-8", where, str(error), "file") from error
    merges = byte_pairs.parse_merges(
        [line for line in lines if line and not line.startswith("#version")], where
    )
    content = byte_pairs.as_json(
        vocabulary,
        merges,
        pattern=CUTS[kind] if kind in COMPOSED else "gpt2",
        where=where,
        composed=kind in COMPOSED,
    )
    return TokenizerSource(content, "merges.txt", GPT2_END, GPT2_END)


def _ranks(folder: ModelSource, settings: dict[str, Any], say: Log) -> TokenizerSource | None:
    names = sorted(path.name for path in folder.path.glob("*.tiktoken"))
    name = next((name for name in ("tokenizer.model", *names) if folder.has(name)), None)
    if name is None:
        return None
    kind, where = folder.config.get("model_type"), str(folder.path / name)
    if kind not in CUTS:
        raise DataError(
            "the pretokenization of a tiktoken file is unknown",
            where=where,
            why=f"it is known for {', '.join(sorted(CUTS))}; the model is a {kind!r:.60}",
            fix="convert the folder with transformers, which writes a tokenizer.json",
        )
    ranks = byte_pairs.parse_ranks(folder.read(name, MAX_FILE_BYTES), where)
    vocabulary, merges = byte_pairs.from_ranks(ranks)
    form: Any = {"pattern": CUTS[kind], "composed": kind in COMPOSED, "whole_words": True}
    content = byte_pairs.as_json(vocabulary, merges, where=where, **form)
    return TokenizerSource(content, name, None, GPT2_END)


def _added(
    folder: ModelSource, settings: dict[str, Any], form: TokenizerSource
) -> Iterator[ExtraToken]:
    """Yield tokens that the settings add to a vocabulary, and named special tokens in it."""
    vocabulary = _vocabulary(json.loads(form.content))
    named = [_text(settings.get(f"{name}_token")) for name in NAMED]
    ids = {text: vocabulary[text] for text in (*named, form.ends) if text in vocabulary}
    tokens = {n: ExtraToken(text, n, True) for text, n in ids.items() if text is not None}
    listed = settings.get("added_tokens_decoder")
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        text = _text(entry)
        if not (isinstance(key, str) and key.isdigit() and text):
            what = "tokenizer_config.json adds a token without an id or a text"
            path = folder.path / "tokenizer_config.json"
            raise damaged(what, path, f"{key!r:.60}: {entry!r:.200}", "file")
        tokens[int(key)] = ExtraToken(text, int(key), bool(entry.get("special")))
    yield from tokens.values()
    if listed is None and settings.get("tokenizer_class") == "T5Tokenizer":
        yield from _sentinels(json.loads(form.content), settings)


def _sentinels(parsed: dict[str, Any], settings: dict[str, Any]) -> Iterator[ExtraToken]:
    """Yield T5's sentinel tokens, whose ids follow the pieces in descending order."""
    pieces_of_model, count = len(parsed["model"]["vocab"]), settings.get("extra_ids", 100)
    for number in range(count if isinstance(count, int) and 0 <= count <= 1000 else 0):
        yield ExtraToken(f"<extra_id_{count - 1 - number}>", pieces_of_model + number, True)


def _flag(settings: dict[str, Any], name: str, default: bool | None) -> Any:
    value = settings.get(name)
    return value if isinstance(value, bool) else default


def _text(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, which may be an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _vocabulary(parsed: dict[str, Any]) -> dict[str | None, int]:
    """Return the ids by token, if the tokenizer's model stores a mapping; else nothing."""
    pieces_by_text = parsed["model"].get("vocab")
    return pieces_by_text if isinstance(pieces_by_text, dict) else {}


def _begun(parsed: dict[str, Any]) -> str | None:
    """Return the special token that tokenizer.json puts before an encoded text."""
    after = parsed.get("post_processor") or {}
    for step in after.get("processors", [after]):
        if "cls" in step:  # as BERT and RoBERTa do
            return str(step["cls"][0])
        first = (step.get("single") or [{}])[0] if step.get("type") == "TemplateProcessing" else {}
        if "SpecialToken" in first:
            return str(first["SpecialToken"]["id"])
    return None
