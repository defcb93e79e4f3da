"""Text to ids and back, without loss."""

import abc
import codecs
import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import DataError, InputMissing, JaxlmError

SENTINELS = 32
# Reserved in every tokenizer from the start, so that a model trained today can learn infilling tomorrow.
SPECIALS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|unk|>",
    "<|mask|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    *(f"<|sentinel_{i}|>" for i in range(SENTINELS)),
)
LARGEST_FILE = 256 * 2**20  # bytes; the largest vocabularies in use take a sixth of it
LARGEST_VOCABULARY = 2**24  # ids, a hundred times that of the largest in use


class Tokenizer(abc.ABC):
    """Ids 0 to 39 are `SPECIALS`, in that order, but for a model's own; text never encodes to specials, even where it spells them.

    `table[i]` are the bytes that id i stands for, none for specials, so decoding is joining them. `before` and `after` are
    the ids around each document, `eos` is the first of those after it, and `pad` fills rows up. `lead` is what encoding puts
    in front of a text, and decoding gives back: a space, in many an imported one.
    """

    pad, eos, unk = 0, 2, 3
    before: tuple[int, ...] = (1,)
    after: tuple[int, ...] = (2,)
    lead = ""
    specials = {name: number for number, name in enumerate(SPECIALS)}

    def __init__(self, table: list[bytes]):
        self.table = table

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.table)

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes that each id stands for, int32 [size]."""
        return np.array([len(entry) for entry in self.table], np.int32)

    @property
    def digest(self) -> str:
        """sha256 of everything that decides how text is encoded."""
        return hashlib.sha256(self.serialise()).hexdigest()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are not UTF-8, as where a character was cut, show as U+FFFD."""
        stream = Stream(self)
        return stream.push(ids) + stream.end()

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_many([text])[0]

    @abc.abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, specials never among them."""

    @abc.abstractmethod
    def serialise(self) -> bytes:
        """The content of the file that `load` reads back."""


class Stream:
    """Text of ids that come one after another: a character is given once all of its bytes are there, never a part of it."""

    def __init__(self, tokenizer: Tokenizer):
        self._table = tokenizer.table
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """What the next ids make whole; it may be nothing. What can no longer become a character is U+FFFD."""
        return self._characters.decode(b"".join(self._table[i] for i in ids))

    def end(self) -> str:
        """What is left of a character that was cut: U+FFFD, or nothing."""
        return self._characters.decode(b"", final=True)


class Bytes(Tokenizer):
    """One id for each byte of UTF-8."""

    def __init__(self) -> None:
        super().__init__([b""] * len(SPECIALS) + [bytes([value]) for value in range(256)])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIALS)).tolist()
            for text in texts
        ]

    def serialise(self) -> bytes:
        return _as_json({"kind": "bytes"})


class Characters(Tokenizer):
    """One id for each character of the training text; others become <|unk|>, which the data report counts."""

    def __init__(self, characters: str):
        super().__init__([b""] * len(SPECIALS) + [character.encode() for character in characters])
        self._characters = characters
        self._ids = {
            character: len(SPECIALS) + number for number, character in enumerate(characters)
        }

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(character, self.unk) for character in text] for text in texts]

    def serialise(self) -> bytes:
        return _as_json({"kind": "characters", "characters": self._characters})


class SentencePiece(Tokenizer):
    """A SentencePiece model with byte fallback and no normalisation (Kudo & Richardson 2018, arXiv:1808.06226)."""

    SPACE = "\u2581"  # what SentencePiece writes for a space; met in text, it is spelt in bytes

    def __init__(self, model: bytes, where: str = "tokenizer"):
        import sentencepiece

        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            table = [self._bytes(i) for i in range(self._processor.vocab_size())]
            found = tuple(map(self._processor.id_to_piece, range(min(len(table), len(SPECIALS)))))
        except (RuntimeError, ValueError) as error:
            raise DataError(
                "a tokenizer file is not a SentencePiece model", where=where, why=str(error)
            ) from error
        super().__init__(table)
        if found != SPECIALS:
            raise DataError(
                "a SentencePiece model does not start with the special tokens that jaxlm reserves",
                where=where,
                why=f"its first pieces are {' '.join(found[:4])} ...",
                fix="jaxlm tokenizer train --config=... makes one that does",
            )
        self._spelt = [
            self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in self.SPACE.encode()
        ]

    def _bytes(self, number: int) -> bytes:
        pieces = self._processor
        name = pieces.id_to_piece(number)
        if pieces.is_control(number) or pieces.is_unknown(number):
            return b""
        if pieces.is_byte(number):
            return bytes([int(name[3:5], 16)])
        return name.replace(self.SPACE, " ").encode()

    def pieces(self) -> dict[str, int]:
        """Every piece with its id, as SentencePiece spells them; in the order of their scores behind the special ones."""
        return {self._processor.id_to_piece(number): number for number in range(self.size)}

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if not any(self.SPACE in text for text in texts):
            return self._processor.encode(list(texts), num_threads=-1)
        out = []
        for text in texts:
            ids, *rest = self._processor.encode(text.split(self.SPACE), num_threads=-1)
            for part in rest:
                ids += self._spelt
                ids += part
            out.append(ids)
        return out

    def serialise(self) -> bytes:
        return self._model


class HuggingFace(Tokenizer):
    """A `tokenizer.json` of Hugging Face's tokenizers, shifted up behind our special tokens."""

    shift = len(SPECIALS)

    def __init__(self, content: bytes, where: str = "tokenizer"):
        import tokenizers

        self.content, self._where = content, where
        with rust_errors("a tokenizer.json cannot be read", where):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self._spelt = (
            added.keys() - self._special
        )  # as in text, whatever the model's own pieces are
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        size = max(ids, default=-1) + 1  # there may be gaps
        if size > LARGEST_VOCABULARY:
            raise DataError(
                "a tokenizer.json has an id that no embedding would hold",
                where=where,
                why=f"id {size - 1:,}, and ids below {LARGEST_VOCABULARY:,} are allowed",
                fix="--config.data.tokenizer=sentencepiece:4096 trains one",
            )
        parsed = json.loads(content)
        self._is_byte_level = "ByteLevel" in json.dumps(parsed.get("decoder") or {})
        is_words = parsed["model"].get("type") == "WordPiece"
        self._inside = parsed["model"].get("continuing_subword_prefix", "##") if is_words else None
        table = [self._bytes(i) for i in range(size)]
        super().__init__([b""] * self.shift + table)
        self.lead = " " if self.decode(self.encode("a")).startswith(" ") else ""

    def _bytes(self, number: int) -> bytes:
        piece = self._tokenizer.id_to_token(number)
        if piece is None or number in self._special:
            return b""
        if self._inside is not None:
            return (
                piece[len(self._inside) :] if piece.startswith(self._inside) else f" {piece}"
            ).encode()
        if self._is_byte_level:
            return (
                bytes(BYTE_OF_CHARACTER[c] for c in piece)
                if number not in self._spelt and all(c in BYTE_OF_CHARACTER for c in piece)
                else piece.encode()
            )
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SentencePiece.SPACE, " ").encode()

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        with rust_errors("a tokenizer.json cannot encode a text", self._where):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            [self.unk if i in self._special else i + self.shift for i in one.ids] for one in encoded
        ]

    def serialise(self) -> bytes:
        return self.content


class Trained(HuggingFace):
    """A `tokenizer.json` that was trained here, with our special tokens where every tokenizer of ours has them.

    Raises:
      DataError: where it has others.
    """

    shift = 0

    def __init__(self, content: bytes, where: str = "tokenizer"):
        super().__init__(content, where)
        found = tuple(map(self._tokenizer.id_to_token, range(len(SPECIALS))))
        if found != SPECIALS or self._special != set(range(len(SPECIALS))):
            raise DataError(
                "a trained tokenizer does not start with the special tokens that jaxlm reserves",
                where=where,
                why=f"its first tokens are {found[:4]}",
                fix="jaxlm tokenizer train --config=... makes one that does",
            )

    def serialise(self) -> bytes:
        return _as_json({"kind": "trained", "content": self.content.decode()})


class Imported(HuggingFace):
    """The `tokenizer.json` of an imported model, with the model's own ids and its own tokens around a document.

    Args:
      content: the tokenizer.json.
      before: ids in front of each document, such as Llama's <s>; many models have none.
      after: ids behind each document, at least one.
      where: for errors.

    Raises:
      DataError: where an id is not one of the tokenizer's.
    """

    shift = 0

    def __init__(
        self,
        content: bytes,
        *,
        before: Sequence[int],
        after: Sequence[int],
        where: str = "tokenizer",
    ):
        self.before, self.after = tuple(before), tuple(after)
        super().__init__(content, where)
        outside = [i for i in (*before, *after) if not 0 <= i < self.size]
        if outside or not after:
            raise DataError(
                "a model's tokens around a document are none of its tokenizer's",
                where=where,
                why=f"ids {outside} of {self.size:,}" if outside else "nothing ends a document",
                fix="config.json or tokenizer_config.json of the model names them: eos_token, bos_token",
            )
        self.pad = self.eos = self.after[0]
        model = json.loads(content)["model"]
        unknown = model.get("unk_id")
        if unknown is None:
            unknown = self._tokenizer.token_to_id(model.get("unk_token") or "")
        self.unk = self.eos if unknown is None else unknown
        tokens = self._tokenizer.get_added_tokens_decoder()
        self.specials = {tokens[number].content: number for number in sorted(self._special)}

    def encode_spelt(self, text: str) -> list[int]:
        """The ids of a text in which special tokens that are spelt out are meant: what a chat template made."""
        self._tokenizer.encode_special_tokens = False
        try:
            with rust_errors("a tokenizer.json cannot encode a text", self._where):
                return self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def serialise(self) -> bytes:
        own = {"kind": "imported", "before": self.before, "after": self.after}
        return _as_json(own | {"content": self.content.decode()})


@contextlib.contextmanager
def rust_errors(what: str, where: str) -> Iterator[None]:
    """Turns what `tokenizers` and `sentencepiece` raise into a DataError: plain Exceptions, or a panic of Rust, which is none."""
    try:
        yield
    except JaxlmError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(
                what,
                where=where,
                why=str(error)[:300],
                fix="--config.data.tokenizer=sentencepiece:4096 trains one",
            ) from error
        raise


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next unused character from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = _byte_characters()


def _as_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def load(content: bytes, where: str) -> Tokenizer:
    """A tokenizer from the content of its file: our JSON, Hugging Face's tokenizer.json, or a SentencePiece model.

    Raises:
      DataError: where it is none of them.
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
            return Trained(str(ours.get("content")).encode(), where)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "a tokenizer file is not the JSON of a tokenizer",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="--config.data.tokenizer=sentencepiece:4096 trains one",
        ) from error
    if kind == "bytes":
        return Bytes()
    return Characters(characters) if kind == "characters" else HuggingFace(content, where)


def _imported(ours: dict[str, Any], where: str) -> Imported:
    """Raises ValueError where a part is missing or of another type."""
    content, before, after = (ours.get(name) for name in ("content", "before", "after"))
    if not isinstance(content, str) or not isinstance(before, list) or not isinstance(after, list):
        raise ValueError("its content or its ids are missing")
    if not all(type(number) is int for number in (*before, *after)):
        raise ValueError("its ids are no integers")
    return Imported(content.encode(), before=before, after=after, where=where)


def read(path: str | Path) -> Tokenizer:
    """The tokenizer in a file.

    Raises:
      InputMissing: where there is no such file.
      DataError: where it is none, or too large to be one; then nothing of it is read.
    """
    path = Path(path)
    if not path.is_file():
        raise InputMissing(
            f"there is no tokenizer file {path}",
            where="data.tokenizer",
            fix="--config.data.tokenizer=sentencepiece:4096 trains one",
        )
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise DataError(
            "a tokenizer file is too large",
            where=str(path),
            why=f"it has {size:,} bytes, and {LARGEST_FILE:,} are allowed",
            fix="--config.data.tokenizer=sentencepiece:4096 trains one",
        )
    return load(path.read_bytes(), str(path))
