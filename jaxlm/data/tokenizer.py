"""Text to ids and back, without loss."""

import abc
import codecs
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data.config import FIND_TOKENIZERS

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
LARGEST_VOCABULARY = 2**24  # ids, a hundred times that of the largest in use
LONGEST = (
    2**20
)  # characters of a text that are encoded together by a tokenizer whose cuts are not exact
UNIGRAM_PART = 2**11  # characters of which SentencePiece adds up the scores


class Tokenizer(abc.ABC):
    """Ids 0 to 39 are `SPECIALS`, in that order, but for a model's own; text never encodes to specials, even where it spells them.

    `table[i]` are the bytes that id i stands for, none for specials, so decoding is joining them. `before` and `after` are
    the ids around each document, `eos` is the first of those after it, `ends` are all that end what a model writes, and
    `pad` fills rows up. `lead` is what encoding puts in front of a text, and decoding gives back: a space, in many an
    imported one.
    """

    kinds: tuple[str, ...] = ()  # of the setting that trains one
    pad, eos, unk = 0, 2, 3
    before: tuple[int, ...] = (1,)
    after: tuple[int, ...] = (2,)
    ends: tuple[int, ...] = (2,)
    lead = ""
    # Characters of a text that `long_text` encodes together at most; None encodes every text as one.
    span: int | None = 2**14
    specials = {name: number for number, name in enumerate(SPECIALS)}
    reserved = (
        specials  # and, of an imported one, all else that was added to what its model of text knows
    )

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

    @functools.cached_property
    def is_text(self) -> np.ndarray:
        """Which ids stand for text, bool [size]: those that have bytes and are not reserved."""
        found = np.array([bool(entry) for entry in self.table])
        found[list(self.reserved.values())] = False
        return found

    @functools.cached_property
    def pairs(self) -> frozenset[str]:
        """Every two characters that are neighbours inside a token; those of partial characters are left out."""
        texts = {entry.decode(errors="replace") for entry in self.table}
        return frozenset(text[i : i + 2] for text in texts for i in range(len(text) - 1))

    def cuts(self, text: str) -> list[int] | None:
        """Return the places at which `encode` itself cuts a text into parts, None if it does not."""
        return None

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
        return as_json({"kind": "bytes"})


class Characters(Tokenizer):
    """One id for each character of the training text; others become <|unk|>, which the data report counts."""

    kinds = ("characters",)

    def __init__(self, characters: str):
        super().__init__([b""] * len(SPECIALS) + [character.encode() for character in characters])
        self._characters = characters
        self._ids = {
            character: len(SPECIALS) + number for number, character in enumerate(characters)
        }

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(character, self.unk) for character in text] for text in texts]

    def serialise(self) -> bytes:
        return as_json({"kind": "characters", "characters": self._characters})


class SentencePiece(Tokenizer):
    """A SentencePiece model with byte fallback and no normalisation (Kudo & Richardson 2018, arXiv:1808.06226)."""

    kinds = ("sentencepiece", "unigram")
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
                "a tokenizer file is not a SentencePiece model",
                where=where,
                why=str(error),
                fix=FIND_TOKENIZERS,
            ) from error
        super().__init__(table)
        if found != SPECIALS:
            raise DataError(
                "a SentencePiece model does not start with the special tokens that jaxlm reserves",
                where=where,
                why=f"its first pieces are {' '.join(found[:4])} ...",
                fix=FIND_TOKENIZERS,
            )
        self._spelt = [
            self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in self.SPACE.encode()
        ]
        changes_text, is_unigram = _properties(model)
        self.lead = " " if self.decode(self._processor.encode("a")).startswith(" ") else ""
        # A model with rules of its own for text reads U+2581 as a space.
        self._spells_space = not changes_text and self.unk not in self._spelt
        self._is_divided = is_unigram and self._spells_space
        if is_unigram and not self._is_divided:
            self.span = LONGEST

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

    def cuts(self, text: str) -> list[int] | None:
        """Return places that no piece crosses, at least `UNIGRAM_PART` characters apart, for a unigram model.

        SentencePiece adds the scores of pieces from the beginning of a text as float32. Far from
        it the sums are too coarse to choose the best pieces: of 1 MB of Python 0.03% of the ids
        differ. A part between two such places has the same best pieces whatever surrounds it.
        """
        if not self._is_divided:
            return None
        places, place = [], UNIGRAM_PART
        while place < len(text):
            if text[place - 1 : place + 1] in self.pairs:
                place += 1
            else:
                places.append(place)
                place += UNIGRAM_PART
        return places

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._is_divided:
            return self._encode(texts)
        places = [[0, *(self.cuts(text) or ()), len(text)] for text in texts]
        parts = [
            [text[a:b] for a, b in itertools.pairwise(each)]
            for text, each in zip(texts, places, strict=True)
        ]
        found = iter(self._encode([part for each in parts for part in each]))
        return [list(itertools.chain(*itertools.islice(found, len(each)))) for each in parts]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._spells_space or not any(self.SPACE in text for text in texts):
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


def _properties(model: bytes) -> tuple[bool, bool]:
    """Return whether a SentencePiece model changes text before it cuts it, and whether it is a unigram model."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    rules = proto.normalizer_spec
    changes = (
        rules.add_dummy_prefix
        or rules.remove_extra_whitespaces
        or bool(rules.precompiled_charsmap)
        or not rules.escape_whitespaces
    )
    return changes, proto.trainer_spec.model_type == 1


def as_json(value: dict[str, Any]) -> bytes:
    """The content of a file of ours."""
    return json.dumps(value).encode()
