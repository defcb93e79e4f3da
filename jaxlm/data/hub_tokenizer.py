"""Tokenizers that are a `tokenizer.json` of Hugging Face: one that was given, one that was trained here, that of a model."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.data.config import FIND_TOKENIZERS
from jaxlm.data.tokenizer import (
    LARGEST_VOCABULARY,
    LONGEST,
    SPECIALS,
    SentencePiece,
    Tokenizer,
    as_json,
)


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
                fix=FIND_TOKENIZERS,
            )
        parsed = json.loads(content)
        self._is_byte_level = "ByteLevel" in json.dumps(parsed.get("decoder") or {})
        is_words = parsed["model"].get("type") == "WordPiece"
        self._inside = parsed["model"].get("continuing_subword_prefix", "##") if is_words else None
        table = [self._bytes(i) for i in range(size)]
        super().__init__([b""] * self.shift + table)
        self.span = _span(parsed)
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
        """The ids of each text, specials never among them. Raises DataError where the library fails."""
        with rust_errors("a tokenizer.json cannot encode a text", self._where):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            [self.unk if i in self._special else i + self.shift for i in one.ids] for one in encoded
        ]

    def serialise(self) -> bytes:
        """The content of the file that `tokenizer_file.load` reads back."""
        return self.content


class Trained(HuggingFace):
    """A `tokenizer.json` that was trained here, with our special tokens where every tokenizer of ours has them.

    Raises:
      DataError: where it has others.
    """

    kinds = ("bpe", "wordpiece")
    shift = 0

    def __init__(self, content: bytes, where: str = "tokenizer"):
        super().__init__(content, where)
        found = tuple(map(self._tokenizer.id_to_token, range(len(SPECIALS))))
        if found != SPECIALS or self._special != set(range(len(SPECIALS))):
            raise DataError(
                "a trained tokenizer does not start with the special tokens that jaxlm reserves",
                where=where,
                why=f"its first tokens are {found[:4]}",
                fix=FIND_TOKENIZERS,
            )

    def serialise(self) -> bytes:
        """The content of the file that `tokenizer_file.load` reads back."""
        return as_json({"kind": "trained", "content": self.content.decode()})


class Imported(HuggingFace):
    """The `tokenizer.json` of an imported model, with the model's own ids and its own tokens around a document.

    Args:
      content: the tokenizer.json.
      before: ids in front of each document, such as Llama's <s>; many models have none.
      after: ids behind each document, at least one.
      ends: ids that end an answer, beside the first of those; what is no id of the tokenizer is left out.
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
        ends: Sequence[int] = (),
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
        self.ends = tuple(sorted({self.eos, *(i for i in ends if 0 <= i < self.size)}))
        model = json.loads(content)["model"]
        unknown = model.get("unk_id")
        if unknown is None:
            unknown = self._tokenizer.token_to_id(model.get("unk_token") or "")
        self.unk = self.eos if unknown is None else unknown
        tokens = self._tokenizer.get_added_tokens_decoder()
        self.reserved = {tokens[number].content: number for number in sorted(tokens)}
        self.specials = {name: i for name, i in self.reserved.items() if i in self._special}

    def encode_spelt(self, text: str) -> list[int]:
        """The ids of a text in which special tokens that are spelt out are meant: what a chat template made."""
        self._tokenizer.encode_special_tokens = False
        try:
            with rust_errors("a tokenizer.json cannot encode a text", self._where):
                return self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def serialise(self) -> bytes:
        """The content of the file that `tokenizer_file.load` reads back."""
        around = {"before": self.before, "after": self.after, "ends": self.ends}
        return as_json({"kind": "imported", **around, "content": self.content.decode()})


def _span(parsed: dict[str, Any]) -> int | None:
    """Return `Tokenizer.span` of a tokenizer.json.

    Words of a fixed number of characters depend on all text in front of them. A unigram model over
    a whole text, without words, breaks ties by sums that are rounded by what is in front of them.
    """
    steps = _steps(parsed.get("pre_tokenizer"))
    if any(step["type"] == "FixedLength" for step in steps):
        return None
    has_words = any(step["type"] != "Metaspace" or step.get("split", True) for step in steps)
    is_rounded = parsed["model"].get("type") == "Unigram" and not has_words
    return LONGEST if is_rounded else Tokenizer.span


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the pre-tokenizers that a pre-tokenizer consists of."""
    if step is None:
        return []
    inner = step.get("pretokenizers")
    return [step] if inner is None else [each for one in inner for each in _steps(one)]


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
                fix=FIND_TOKENIZERS,
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
