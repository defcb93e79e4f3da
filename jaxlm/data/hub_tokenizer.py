"""Tokenizers from a Hugging Face `tokenizer.json`: given by the user, trained here, or imported."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.data.ascii_words import AsciiWords
from jaxlm.data.tokenizer import (
    MAX_SPAN,
    MAX_VOCABULARY,
    SPECIALS,
    SentencePiece,
    Tokenizer,
    tokenizer_error,
)


class HuggingFace(Tokenizer):
    """A user's `tokenizer.json`, its ids shifted behind our special tokens."""

    shift = len(SPECIALS)

    def __init__(self, content: bytes, where: str = "tokenizer"):
        import tokenizers

        self.content, self._where = content, where
        with library_errors("a tokenizer.json cannot be read", where):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # the spelling of a special token in text stays text
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self._spelt = added.keys() - self._special  # these are plain text, not byte-level
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        size = max(ids, default=-1) + 1  # ids may have gaps
        if size > MAX_VOCABULARY:
            what = "a tokenizer.json has an id above the allowed maximum"
            why = f"its largest id is {size - 1:,}; ids below {MAX_VOCABULARY:,} are allowed"
            raise tokenizer_error(what, where, why)
        parsed = json.loads(content)
        self._is_byte_level = "ByteLevel" in json.dumps(parsed.get("decoder") or {})
        is_words = parsed["model"].get("type") == "WordPiece"
        self._inside = parsed["model"].get("continuing_subword_prefix", "##") if is_words else None
        table = [self._bytes(i) for i in range(size)]
        super().__init__([b""] * self.shift + table)
        self._words = ascii_words(parsed, self._tokenizer, self._shifted)
        self.span = _span(parsed)
        self.lead = " " if self.decode(self.encode("a")).startswith(" ") else ""

    def _bytes(self, number: int) -> bytes:
        piece = self._tokenizer.id_to_token(number)
        if piece is None or number in self._special:
            return b""
        if self._inside is not None:
            is_inside = piece.startswith(self._inside)
            return (piece[len(self._inside) :] if is_inside else f" {piece}").encode()
        if self._is_byte_level:
            with contextlib.suppress(KeyError):  # a piece with another character is spelt
                if number not in self._spelt:
                    return bytes(map(BYTE_OF_CHARACTER.__getitem__, piece))
            return piece.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SentencePiece.SPACE, " ").encode()

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special ids. Raise DataError if encoding fails."""
        with library_errors("a tokenizer.json failed to encode a text", self._where):
            encoded = [self._words.encode(text) if self._words else None for text in texts]
            others = [text for text, ids in zip(texts, encoded, strict=True) if ids is None]
            rest = iter(self._tokenizer.encode_batch_fast(others, add_special_tokens=False))
        return [
            self._shifted(next(rest).ids) if ids is None else np.frombuffer(ids, np.int32).tolist()
            for ids in encoded
        ]

    def encode_with_starts(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each text, and the character at which each id starts."""
        with library_errors("a tokenizer.json failed to encode a text", self._where):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(self._shifted(one.ids), [start for start, _ in one.offsets]) for one in encoded]

    def _shifted(self, ids: Sequence[int]) -> list[int]:
        special, unk, shift = self._special, self.unk, self.shift
        return [unk if i in special else i + shift for i in ids]

    def serialize(self) -> bytes:
        """Return the content of the tokenizer file."""
        return self.content


class TrainedTokenizer(HuggingFace):
    """A `tokenizer.json` trained by jaxlm, with our special tokens first.

    Raise DataError if the first tokens are others.
    """

    kinds = ("bpe", "wordpiece")
    shift = 0

    def __init__(self, content: bytes, where: str = "tokenizer"):
        super().__init__(content, where)
        first_tokens = tuple(map(self._tokenizer.id_to_token, range(len(SPECIALS))))
        if first_tokens != SPECIALS or self._special != set(range(len(SPECIALS))):
            what = "a trained tokenizer does not start with the special tokens that jaxlm reserves"
            raise tokenizer_error(what, where, f"its first tokens are {first_tokens[:4]}")

    def serialize(self) -> bytes:
        """Return the content of the tokenizer file."""
        return json.dumps({"kind": "trained", "content": self.content.decode()}).encode()


class ImportedTokenizer(HuggingFace):
    """The `tokenizer.json` of an imported model, with the model's own ids and special tokens.

    Args:
      before: ids in front of each document, such as Llama's <s>; empty for many models.
      after: ids behind each document, at least one.
      ends: more ids that end an answer; unknown ids are ignored.
      where: file name in errors.

    Raises:
      DataError: if an id is not in the tokenizer.
    """

    shift = 0

    def __init__(
        self,
        content: bytes,
        *,
        before: Sequence[int],
        after: Sequence[int],
        ends: Sequence[int] = (),
        where: str = "tokenizer",
    ):
        self.before, self.after = tuple(before), tuple(after)
        super().__init__(content, where)
        outside = [i for i in (*before, *after) if not 0 <= i < self.size]
        if outside or not after:
            raise DataError(
                "a model's begin or end token is not in its tokenizer",
                where=where,
                why=f"ids {outside} of {self.size:,}" if outside else "no id ends a document",
                fix="set eos_token and bos_token in the model's config.json or "
                "tokenizer_config.json",
            )
        self.pad = self.eos = self.after[0]
        self.ends = tuple(sorted({self.eos, *(i for i in ends if 0 <= i < self.size)}))
        model = json.loads(content)["model"]
        unknown = model.get("unk_id")
        if unknown is None:
            unknown = self._tokenizer.token_to_id(model.get("unk_token") or "")
        self.unk = self.eos if unknown is None else unknown
        tokens = self._tokenizer.get_added_tokens_decoder()
        self.reserved = {tokens[number].content: number for number in sorted(tokens)}
        self.specials = {name: i for name, i in self.reserved.items() if i in self._special}

    def serialize(self) -> bytes:
        """Return the content of the tokenizer file."""
        around = {"before": self.before, "after": self.after, "ends": self.ends}
        return json.dumps({"kind": "imported", **around, "content": self.content.decode()}).encode()


def _span(parsed: dict[str, Any]) -> int | None:
    """Return `Tokenizer.span` of a tokenizer.json.

    Words of a fixed number of characters depend on all preceding text. A unigram model over a whole
    text, without words, breaks ties by sums whose rounding depends on the preceding text.
    """
    steps = _steps(parsed.get("pre_tokenizer"))
    if any(step["type"] == "FixedLength" for step in steps):
        return None
    has_words = any(step["type"] != "Metaspace" or step.get("split", True) for step in steps)
    is_rounded = parsed["model"].get("type") == "Unigram" and not has_words
    return MAX_SPAN if is_rounded else Tokenizer.span


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the pre-tokenizers of a pre-tokenizer sequence."""
    if step is None:
        return []
    inner = step.get("pretokenizers")
    return [step] if inner is None else [each for one in inner for each in _steps(one)]


def ascii_words(
    parsed: dict[str, Any], library: Any, convert: Callable[[list[int]], list[int]]
) -> AsciiWords | None:
    """Return the words of a library tokenizer; None if it has another form or this is no faster.

    Args:
      parsed: its tokenizer.json.
      library: the tokenizer.
      convert: returns our ids of its ids.
    """
    model = library.model

    def encode_word(word: str) -> list[int]:
        tokens = model.tokenize(word.translate(CHARACTER_OF_BYTE))
        return convert([token.id for token in tokens])

    return AsciiWords.of(parsed, encode_word)


@contextlib.contextmanager
def library_errors(what: str, where: str) -> Iterator[None]:
    """Convert what `tokenizers` and `sentencepiece` raise to DataError.

    They raise plain Exceptions, or a Rust panic, which is not an Exception.
    """
    try:
        yield
    except JaxlmError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise tokenizer_error(what, where, str(error)[:300]) from error
        raise


# GPT-2's printable character of each byte, mapped to the byte. A printable byte stands for itself,
# others take the next unused character from U+0100.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE}
BYTE_OF_CHARACTER |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


class ExtraToken(NamedTuple):
    """An added token; a special one never results from text."""

    text: str
    number: int
    is_special: bool


def with_extra_tokens(content: bytes, added: Iterable[ExtraToken], where: str) -> bytes:
    """Add tokens to a tokenizer.json. Raise DataError if one would get another id."""
    import tokenizers

    with library_errors("a tokenizer.json failed to take added tokens", where):
        built = tokenizers.Tokenizer.from_buffer(content)
        for token in sorted(added, key=lambda token: token.number):
            entry = tokenizers.AddedToken(token.text, normalized=False, special=token.is_special)
            built.add_tokens([entry])
            if (number := built.token_to_id(token.text)) != token.number:
                raise DataError(
                    "an added token would get another id than in the model",
                    where=where,
                    why=f"{token.text!r:.60} has id {token.number:,}, and would get {number}",
                    fix="use a folder with tokenizer.json, as transformers writes it",
                )
        return built.to_str().encode()


def prepend_token(built: Any, name: str) -> None:
    """Make a library tokenizer begin every text with one of its special tokens."""
    from tokenizers import processors

    built.post_processor = processors.TemplateProcessing(
        single=f"{name} $A",
        pair=f"{name} $A {name} $B",
        special_tokens=[(name, built.token_to_id(name))],
    )


def vocabulary_error(what: str, where: str, why: str) -> DataError:
    """Return the error of a vocabulary file that is damaged."""
    return DataError(what, where=where, why=why, fix="fetch the file again")
