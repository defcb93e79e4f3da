"""Ids of rendered chat text: control tokens of the template, and text that only spells one.

Before rendering, `GUARD` is put in front of every control token that a conversation spells. In the
rendered text a control token without it is the template's own. U+FDD0 to U+FDEF are noncharacters
of Unicode for internal use like this.
"""

import bisect
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.errors import DataError
from jaxlm.data.ascii_words import AsciiWords
from jaxlm.data.hub_tokenizer import ImportedTokenizer, ascii_words, library_errors
from jaxlm.data.tokenizer import Tokenizer

OPENS, CLOSES = "\ufdd0", "\ufdd1"  # around a content
BEGINS, ENDS = "\ufdd2", "\ufdd3"  # around what a template marks as generated
GUARD, NAME = "\ufdd4", "\ufdd5"
CUT = "\ufdd6"  # no piece of a tokenizer trained here crosses it
RESERVED = re.compile("[\ufdd0-\ufdef]")


class WeightedSpan(NamedTuple):
    """Trained characters of a text, start <= place < stop, and their weight."""

    start: int
    stop: int
    weight: float


class WeightedIds(NamedTuple):
    """Ids of a text, the weight of each, and the answers whose first token starts before them."""

    ids: Int[np.ndarray, "n"]
    weights: Float[np.ndarray, "n"]
    crossed: int


class ControlTokens:
    """The control tokens of a tokenizer in chat text.

    Raises:
      DataError: if the tokenizer cannot be separated from the spelling of its control tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = "|".join(map(re.escape, sorted(tokenizer.specials, key=len, reverse=True)))
        self._spelt = re.compile(f"(?={names or '(?!)'})")
        self._firsts = {name[0] for name in tokenizer.specials if name}
        self.pattern = re.compile(f"(?<!{GUARD})(?:{names or '(?!)'})")
        # A guard matches with the name behind it, as a lookbehind would be tried everywhere.
        self._separator = re.compile(f"{GUARD}(?:{names})?|{CUT}" + (names and f"|{names}"))
        self._cut = re.compile(f"({self._separator.pattern})")
        self._words: AsciiWords | None = None
        self._renamed: dict[str, str] = {}
        if isinstance(tokenizer, ImportedTokenizer):
            self._renamed = {n: f"{NAME}{i}{NAME}" for n, i in tokenizer.specials.items()}
            content = _renamed_content(tokenizer, self._renamed)
            self._library = _library(tokenizer, self._renamed, content)
            self._words = ascii_words(content, self._library, list)
            self._control = {n: np.int32(i).tobytes() for n, i in tokenizer.specials.items()}
            self._characters = tokenizer.token_bytes  # of ids of ASCII text and control tokens
            for name, number in tokenizer.specials.items():
                self._characters[number] = len(name)

    def guarded(self, text: str) -> str:
        """Return a text in which each spelled control token has a guard."""
        is_reserved = not text.isascii() and RESERVED.search(text)
        if not is_reserved and not any(first in text for first in self._firsts):
            return text
        return self._spelt.sub(GUARD, RESERVED.sub("", text))

    def encode(self, texts: Sequence[tuple[str, Sequence[WeightedSpan]]]) -> list[WeightedIds]:
        """Return the ids of guarded texts and their weights, from one encoding of each text.

        A token that starts before a span belongs to the prompt.
        """
        with library_errors("a tokenizer.json failed to encode a text", "tokenizer"):
            encoded = [self._by_words(text, spans) for text, spans in texts]
        others = [each for each, ids in zip(texts, encoded, strict=True) if ids is None]
        rest = iter(self._by_library(others))
        return [next(rest) if ids is None else ids for ids in encoded]

    def _by_words(self, text: str, spans: Sequence[WeightedSpan]) -> WeightedIds | None:
        """Encode ASCII text by its words; return None for one that only the library encodes."""
        if self._words is None:
            return None
        parts: list[Any] = self._cut.split(text)  # text and control token in turns
        parts[::2] = map(self._words.encode, parts[::2])
        parts[1::2] = map(self._control.get, parts[1::2])
        if None in parts:  # another text, a guard or a cut
            return None
        numbers = np.frombuffer(b"".join(parts), np.int32)
        lengths = self._characters[numbers]
        return _weighted(_Encoding(numbers, np.cumsum(lengths) - lengths), spans)

    def _by_library(self, texts: Sequence[tuple[str, Sequence[WeightedSpan]]]) -> list[WeightedIds]:
        """Encode texts without guards, whole or in parts."""
        laid = [_Laid(self._separator, text, self._renamed) for text, _ in texts]
        encoded = self._whole(laid) if self._renamed else self._parts(laid)
        return [
            _weighted(
                each,
                [WeightedSpan(lay.place(s.start), lay.place(s.stop), s.weight) for s in spans],
            )
            for lay, each, (_, spans) in zip(laid, encoded, texts, strict=True)
        ]

    def _whole(self, laid: Sequence["_Laid"]) -> list["_Encoding"]:
        """Encode texts by the model's tokenizer, in which control tokens have private names."""
        texts = ["".join(text for text, _ in lay.parts) for lay in laid]
        with library_errors("a tokenizer.json failed to encode a text", "tokenizer"):
            return list(
                map(_of_library, self._library.encode_batch(texts, add_special_tokens=False))
            )

    def _parts(self, laid: Sequence["_Laid"]) -> list["_Encoding"]:
        """Encode the texts between control tokens, which have no effect on them."""
        texts = [text for lay in laid for text, is_control in lay.parts if not is_control]
        encoded = iter(self._tokenizer.encode_with_starts(texts))
        results = []
        for lay in laid:
            ids: list[int] = []
            starts: list[int] = []
            place = 0
            for text, is_control in lay.parts:
                more, begins = (
                    ([self._tokenizer.specials[text]], [0]) if is_control else next(encoded)
                )
                ids += more
                starts += [place + begin for begin in begins]
                place += len(text)
            results.append(_Encoding(np.array(ids, np.int64), np.array(starts, np.int64)))
        return results


class _Encoding(NamedTuple):
    """Ids of a text, and the character at which each starts."""

    ids: Int[np.ndarray, "n"]
    starts: Int[np.ndarray, "n"]


class _Laid:
    """A guarded text without guards, as texts and control tokens, and the places of both forms."""

    def __init__(self, separator: re.Pattern[str], text: str, renamed: dict[str, str]):
        self.parts: list[tuple[str, bool]] = []
        self._before, self._after = [0], [0]
        waiting, start, length = "", 0, 0
        for match in separator.finditer(text):
            waiting += text[start : match.start()]
            length += match.start() - start
            start = match.end()
            if (name := match[0]) == CUT:
                self.parts += [(waiting, False)] if waiting else []
                waiting = ""
            elif name.startswith(GUARD):
                start = match.start() + 1  # the name is text
            else:
                name = renamed.get(name, name)
                self.parts += [(waiting, False), (name, True)] if waiting else [(name, True)]
                waiting = ""
                length += len(name)
            self._before.append(start)
            self._after.append(length)
        if waiting := waiting + text[start:]:
            self.parts.append((waiting, False))

    def place(self, place: int) -> int:
        """Return the place of a character of the guarded text in the joined parts."""
        nearest = bisect.bisect_right(self._before, place) - 1
        return self._after[nearest] + place - self._before[nearest]


def _of_library(encoding: Any) -> _Encoding:
    starts = [start for start, _ in encoding.offsets]
    return _Encoding(np.array(encoding.ids, np.int64), np.array(starts, np.int64))


def _weighted(encoding: _Encoding, spans: Sequence[WeightedSpan]) -> WeightedIds:
    ids, starts = encoding
    begins = np.maximum.accumulate(starts)
    weights, crossed = np.zeros(len(ids), np.float32), 0
    places = np.searchsorted(begins, [each[:2] for each in spans])
    for (start, _, weight), (first, end) in zip(spans, places, strict=True):
        weights[first:end] = weight
        crossed += weight > 0 and first < len(begins) and begins[first] > start
    return WeightedIds(ids, weights, int(crossed))


def _renamed_content(tokenizer: ImportedTokenizer, renamed: dict[str, str]) -> dict[str, Any]:
    """Return the tokenizer.json with other names of its special tokens."""
    parsed = json.loads(tokenizer.content)
    for token in parsed["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    model = parsed["model"]
    vocabulary = model["vocab"]
    model["vocab"] = (
        {renamed.get(piece, piece): number for piece, number in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else [[renamed.get(piece, piece), score] for piece, score in vocabulary]
    )
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return parsed | {"post_processor": None, "truncation": None, "padding": None}


def _library(tokenizer: ImportedTokenizer, renamed: dict[str, str], content: dict[str, Any]) -> Any:
    """Return the library's tokenizer of renamed content, with the same ids."""
    import tokenizers

    with library_errors("jaxlm cannot rename the special tokens of a tokenizer.json", "tokenizer"):
        built = tokenizers.Tokenizer.from_str(json.dumps(content))
    for name, number in tokenizer.specials.items():
        if built.token_to_id(renamed[name]) != number:
            raise DataError(
                "a special token would get another id in chat text",
                where="tokenizer",
                why=f"{name!r:.60} has id {number:,}",
                fix="use a folder with tokenizer.json, as transformers writes it",
            )
    return built
