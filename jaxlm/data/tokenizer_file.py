"""Loading of tokenizer files of every kind."""

import json
import shlex
from pathlib import Path
from typing import Any

from jaxlm.core.errors import InputMissing
from jaxlm.core.nearest import nearest_word
from jaxlm.data.config import FIND_TOKENIZERS
from jaxlm.data.hub_tokenizer import HuggingFace, ImportedTokenizer, TrainedTokenizer
from jaxlm.data.tokenizer import Bytes, Characters, SentencePiece, Tokenizer, tokenizer_error

MAX_FILE_BYTES = 256 * 2**20  # bytes, six times the largest vocabularies in use


def load(content: bytes, where: str) -> Tokenizer:
    """Return the tokenizer of a file's content: our JSON, tokenizer.json, or SentencePiece.

    Raise DataError if the content is none of these.
    """
    if content.lstrip()[:1] != b"{":
        return SentencePiece(content, where)
    try:
        ours = json.loads(content)
        kind, characters = ours.get("kind"), ours.get("characters")
        if kind == "characters" and not (isinstance(characters, str) and characters.encode()):
            raise ValueError("its characters are not text")
        if kind == "imported":
            return _imported(ours, where)
        if kind == "trained":
            return TrainedTokenizer(str(ours.get("content")).encode(), where)
    except (ValueError, RecursionError) as error:
        raise tokenizer_error(
            "a tokenizer file contains no tokenizer", where, f"{type(error).__name__}: {error}"
        ) from error
    if kind == "bytes":
        return Bytes()
    return Characters(characters) if kind == "characters" else HuggingFace(content, where)


def _imported(ours: dict[str, Any], where: str) -> ImportedTokenizer:
    """Raise ValueError if a field is missing or has a wrong type."""
    content = ours.get("content")
    around: dict[str, Any] = {name: ours.get(name) for name in ("before", "after", "ends")}
    if not isinstance(content, str) or not all(isinstance(ids, list) for ids in around.values()):
        raise ValueError("content or ids are missing")
    if not all(type(number) is int for ids in around.values() for number in ids):
        raise ValueError("its ids are not integers")
    return ImportedTokenizer(content.encode(), **around, where=where)


def read(path: str | Path) -> Tokenizer:
    """Return the tokenizer in a file.

    Raise InputMissing if the file does not exist. Raise DataError if it is not a tokenizer; a file
    that is too large is not read.
    """
    path = Path(path)
    if not path.is_file():
        what = f"tokenizer file {path} does not exist"
        why = "a value that is not a kind of tokenizer is a path, relative to the current directory"
        raise InputMissing(what, where="data.tokenizer", why=why, fix=_near(path))
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        why = f"it has {size:,} bytes; {MAX_FILE_BYTES:,} are allowed"
        raise tokenizer_error("a tokenizer file is too large", str(path), why)
    return load(path.read_bytes(), str(path))


def _near(path: Path) -> str:
    """Return the flag of a file with a similar name, or the command that lists tokenizers."""
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest_word(path.name, names)
    return (
        shlex.quote(f"--config.data.tokenizer={path.with_name(near)}") if near else FIND_TOKENIZERS
    )
