"""Tokenizers: text to ids and back, without loss.

Example:
  >>> tokenizer = Characters("abc")
  >>> tokenizer.encode("cab"), tokenizer.decode(tokenizer.encode("cab"))
  ([42, 40, 41], 'cab')
"""

import abc
import codecs
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data.config import FIND_TOKENIZERS

SENTINELS = 32
# Reserved in every tokenizer, so that a model can learn infilling later.
_NAMES = "pad bos eos unk mask fim_prefix fim_middle fim_suffix".split()
SPECIALS = tuple(f"<|{n}|>" for n in (*_NAMES, *(f"sentinel_{i}" for i in range(SENTINELS))))
MAX_VOCABULARY = 2**24  # ids, a hundred times the largest in use
# Characters that are encoded together by a tokenizer whose cuts are not exact.
MAX_SPAN = 2**20
UNIGRAM_PART = 2**11  # least characters over which SentencePiece sums scores


class Tokenizer(abc.ABC):
    """Base class. Ids 0 to 39 are `SPECIALS`, except for an imported model's own tokenizer.

    Text never encodes to special ids, even if it spells them. `table[i]` are the bytes of id i,
    empty for specials, so decoding is joining. `before` and `after` are the ids around each
    document, `eos` is the first of `after`, `ends` are all ids that end a model's answer, and `pad`
    fills rows up. `lead` is text that encoding adds in front, and decoding returns: a space in many
    imported tokenizers.
    """

    kinds: tuple[str, ...] = ()  # kinds of `data.tokenizer` that train this class
    pad, eos, unk = 0, 2, 3
    before: tuple[int, ...] = (1,)
    after: tuple[int, ...] = (2,)
    ends: tuple[int, ...] = (2,)
    lead = ""
    # Maximum characters that `long_text` encodes together; None encodes each text as one.
    span: int | None = 2**14
    specials = {name: number for number, name in enumerate(SPECIALS)}
    reserved = specials  # and all other added tokens of an imported tokenizer

    def __init__(self, table: list[bytes]):
        self.table = table

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.table)

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of each id, int32 [size]."""
        return np.array([len(entry) for entry in self.table], np.int32)

    @functools.cached_property
    def is_text(self) -> np.ndarray:
        """Ids of text, bool [size]: not empty and not reserved."""
        mask = np.array([bool(entry) for entry in self.table])
        mask[list(self.reserved.values())] = False
        return mask

    @functools.cached_property
    def pairs(self) -> frozenset[str]:
        """Every two adjacent characters inside a token, without partial characters."""
        texts = {entry.decode(errors="replace") for entry in self.table}
        return frozenset(text[i : i + 2] for text in texts for i in range(len(text) - 1))

    def cuts(self, text: str) -> list[int] | None:
        """Return the places at which `encode` itself cuts a text; None if it does not."""
        return None

    @property
    def digest(self) -> str:
        """sha256 of everything that determines how text is encoded."""
        return hashlib.sha256(self.serialize()).hexdigest()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        stream = StreamDecoder(self)
        return stream.push(ids) + stream.end()

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self.encode_many([text])[0]

    @abc.abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special ids."""

    def encode_with_starts(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each text, and the character at which each id starts."""
        encodings = self.encode_many(texts)
        starts = []
        for text, ids in zip(texts, encodings, strict=True):
            lengths = self.token_bytes[ids]
            starts.append(_characters_at(text, np.cumsum(lengths) - lengths - len(self.lead)))
        return list(zip(encodings, starts, strict=True))

    @abc.abstractmethod
    def serialize(self) -> bytes:
        """Return the content of the tokenizer file."""


def _characters_at(text: str, places: np.ndarray) -> list[int]:
    """Return the character that each byte of a text belongs to."""
    places = np.maximum(places, 0)
    if text.isascii():
        return places.tolist()
    is_first = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
    return (np.cumsum(is_first)[places] - 1).tolist()


class StreamDecoder:
    """Incremental decoder: yields a character once all of its bytes have arrived."""

    def __init__(self, tokenizer: Tokenizer):
        self._table = tokenizer.table
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that the next ids complete; invalid bytes become U+FFFD."""
        return self._characters.decode(b"".join(self._table[i] for i in ids))

    def end(self) -> str:
        """Return U+FFFD if a character is incomplete, else nothing."""
        return self._characters.decode(b"", final=True)


class Bytes(Tokenizer):
    """One id for each byte of UTF-8."""

    def __init__(self) -> None:
        super().__init__([b""] * len(SPECIALS) + [bytes([value]) for value in range(256)])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        arrays = (np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts)
        return [(array + len(SPECIALS)).tolist() for array in arrays]

    def serialize(self) -> bytes:
        return json.dumps({"kind": "bytes"}).encode()


class Characters(Tokenizer):
    """One id for each character of the training text; others become <|unk|>, which is reported."""

    kinds = ("characters",)

    def __init__(self, characters: str):
        super().__init__([b""] * len(SPECIALS) + [character.encode() for character in characters])
        self._characters = characters
        self._ids = {each: number for number, each in enumerate(characters, len(SPECIALS))}

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(character, self.unk) for character in text] for text in texts]

    def encode_with_starts(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        return [(ids, list(range(len(ids)))) for ids in self.encode_many(texts)]

    def serialize(self) -> bytes:
        return json.dumps({"kind": "characters", "characters": self._characters}).encode()


class SentencePiece(Tokenizer):
    """A SentencePiece model with byte fallback and no normalization.

    Source: Kudo & Richardson 2018, arXiv:1808.06226.
    """

    kinds = ("sentencepiece", "unigram")
    SPACE = "\u2581"  # SentencePiece's space; in text it is encoded as bytes

    def __init__(self, model: bytes, where: str = "tokenizer"):
        import sentencepiece

        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            table = [self._bytes(i) for i in range(self._processor.vocab_size())]
            first = range(min(len(table), len(SPECIALS)))
            first_pieces = tuple(map(self._processor.id_to_piece, first))
        except (RuntimeError, ValueError) as error:
            raise tokenizer_error(
                "a tokenizer file is not a SentencePiece model", where, str(error)
            ) from error
        super().__init__(table)
        if first_pieces != SPECIALS:
            raise tokenizer_error(
                "a SentencePiece model does not start with the special tokens that jaxlm reserves",
                where,
                f"its first pieces are {' '.join(first_pieces[:4])} ...",
            )
        spelt = (f"<0x{byte:02X}>" for byte in self.SPACE.encode())
        self._spelt = list(map(self._processor.piece_to_id, spelt))
        changes_text, is_unigram = _properties(model)
        self.lead = " " if self.decode(self._processor.encode("a")).startswith(" ") else ""
        # A model with normalization rules reads U+2581 as a space.
        self._spells_space = not changes_text and self.unk not in self._spelt
        self._is_divided = is_unigram and self._spells_space
        if is_unigram and not self._is_divided:
            self.span = MAX_SPAN

    def _bytes(self, number: int) -> bytes:
        pieces = self._processor
        name = pieces.id_to_piece(number)
        if pieces.is_control(number) or pieces.is_unknown(number):
            return b""
        if pieces.is_byte(number):
            return bytes([int(name[3:5], 16)])
        return name.replace(self.SPACE, " ").encode()

    def pieces(self) -> dict[str, int]:
        """Return the id of every piece; normal pieces come in the order of their scores."""
        return {self._processor.id_to_piece(number): number for number in range(self.size)}

    def cuts(self, text: str) -> list[int] | None:
        """Return places that no piece crosses, at least `UNIGRAM_PART` apart, for a unigram model.

        SentencePiece sums piece scores from the start of a text in float32. Far from it the sums
        are too coarse to choose the best pieces: 0.03% of the ids of 1 MB of Python differ. A part
        between two such places has the same best pieces in any surroundings.
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
        encodings = iter(self._encode([part for each in parts for part in each]))
        return [list(itertools.chain(*itertools.islice(encodings, len(each)))) for each in parts]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._spells_space or not any(self.SPACE in text for text in texts):
            return self._processor.encode(list(texts), num_threads=-1)
        out = []
        for text in texts:
            ids, *rest = self._processor.encode(text.split(self.SPACE), num_threads=-1)
            for part in rest:
                ids += self._spelt + part
            out.append(ids)
        return out

    def encode_with_starts(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        if self._spells_space:
            return super().encode_with_starts(texts)
        from sentencepiece import sentencepiece_pb2

        encodings = []
        for text in texts:
            proto = sentencepiece_pb2.SentencePieceText()  # type: ignore[attr-defined]
            proto.ParseFromString(self._processor.encode(text, out_type="serialized_proto"))
            places = np.array([piece.begin for piece in proto.pieces], np.int64)
            is_inside = np.minimum(places, len(text.encode()) - 1)
            encodings.append(
                ([piece.id for piece in proto.pieces], _characters_at(text, is_inside))
            )
        return encodings

    def serialize(self) -> bytes:
        return self._model


def _properties(model: bytes) -> tuple[bool, bool]:
    """Return (changes text before cutting it, is a unigram model) of a SentencePiece model."""
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


def tokenizer_error(what: str, where: str, why: str) -> DataError:
    """Return the error of a file that is not a usable tokenizer."""
    return DataError(what, where=where, why=why, fix=FIND_TOKENIZERS)
