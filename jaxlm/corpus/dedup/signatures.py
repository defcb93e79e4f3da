"""Signatures of the documents of a unit, with which units are compared without their texts."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxlm.corpus.config import Recipe, Spans
from jaxlm.corpus.dedup.minhash import signature
from jaxlm.corpus.dedup.substrings import fingerprints
from jaxlm.corpus.document import CorpusDocument

_EMPTY_LINES = re.compile(r"(\n(?:[ \t]*\n)+)")


@dataclasses.dataclass(frozen=True)
class Signatures:
    """For each document, in order: a digest, a MinHash signature, long spans and fingerprints."""

    digests: np.ndarray  # u64[documents, 2]
    minhash: np.ndarray  # u32[documents or 0, bands x rows]
    has_words: np.ndarray  # bool[documents or 0]: false if there is no signature
    spans: np.ndarray  # u64[spans]
    owners: np.ndarray  # u32[spans]: the document of each
    prints: np.ndarray  # u64[fingerprints]
    print_owners: np.ndarray  # u32[fingerprints]

    def write(self, path: Path) -> None:
        """Write the arrays one after another; an .npz would contain the time."""
        with open(path, "wb") as file:
            for field in dataclasses.fields(self):
                np.save(file, getattr(self, field.name), allow_pickle=False)

    @classmethod
    def read(cls, path: Path) -> "Signatures":
        """Read arrays of `write`."""
        with open(path, "rb") as file:
            return cls(*(np.load(file, allow_pickle=False) for _ in dataclasses.fields(cls)))


class Signer:
    """Computes the signatures that the recipe's dedup needs."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._digests: list[bytes] = []
        self._minhash: list[np.ndarray | None] = []
        self._spans: list[int] = []
        self._owners: list[int] = []
        self._prints: list[np.ndarray] = []

    def add(self, document: CorpusDocument) -> None:
        """Add the next document."""
        recipe, number = self._recipe, len(self._digests)
        self._digests.append(digest(document.text, 16))
        if "near" in recipe.dedup:
            self._minhash.append(signature(document.text, recipe.near))
        if "spans" in recipe.dedup:
            for span in spans(document.text, recipe.spans):
                if _is_long(span, recipe.spans):
                    self._spans.append(int.from_bytes(digest(span.strip(), 8), "little"))
                    self._owners.append(number)
        if "substrings" in recipe.dedup:
            self._prints.append(fingerprints(document.text, recipe.substrings))

    def add_signed(self, signatures: Signatures, number: int) -> None:
        """Add the next document, signed before."""
        size = len(self._digests)
        self._digests.append(signatures.digests[number].tobytes())
        if "near" in self._recipe.dedup:
            has_words = signatures.has_words[number]
            self._minhash.append(signatures.minhash[number] if has_words else None)
        begin, end = np.searchsorted(signatures.owners, (number, number + 1))
        self._spans += signatures.spans[begin:end].tolist()
        self._owners += [size] * int(end - begin)
        if "substrings" in self._recipe.dedup:
            begin, end = np.searchsorted(signatures.print_owners, (number, number + 1))
            self._prints.append(signatures.prints[begin:end])

    def finish(self) -> Signatures:
        """Return all signatures as arrays."""
        size = self._recipe.near.bands * self._recipe.near.rows
        none = np.zeros(size, np.uint32)
        rows = [none if each is None else each for each in self._minhash]
        documents = np.arange(len(self._prints), dtype=np.uint32)
        return Signatures(
            digests=np.frombuffer(b"".join(self._digests), "<u8").reshape(-1, 2),
            minhash=np.array(rows, np.uint32).reshape(-1, size),
            has_words=np.array([each is not None for each in self._minhash], bool),
            spans=np.array(self._spans, np.uint64),
            owners=np.array(self._owners, np.uint32),
            prints=np.concatenate([*self._prints, np.zeros(0, np.uint64)]),
            print_owners=np.repeat(documents, list(map(len, self._prints))),
        )


def digest(text: str, size: int) -> bytes:
    """Return the first bytes of the BLAKE2b digest of a text."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size).digest()


def spans(text: str, config: Spans) -> Iterator[str]:
    """Split into lines with their ends, or paragraphs with the empty lines after them."""
    if config.unit == "line":
        yield from text.splitlines(keepends=True)
        return
    pieces = [*_EMPTY_LINES.split(text), ""]
    yield from map(str.__add__, pieces[::2], pieces[1::2])


def ranges(text: str, config: Spans, cut: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the long spans of a text whose numbers, from 0, are in `cut`."""
    number = end = 0
    for span in spans(text, config):
        begin, end = end, end + len(span)
        if _is_long(span, config):
            number += 1
            if number - 1 in cut:
                yield begin, end


def without(text: str, cut: Iterable[Sequence[int]]) -> str:
    """Remove ranges of characters, which may overlap, from a text."""
    pieces, end = [], 0
    for begin, after in sorted(map(tuple, cut)):
        pieces.append(text[end:begin])
        end = max(end, after)
    return "".join([*pieces, text[end:]])


def _is_long(span: str, config: Spans) -> bool:
    return len(span.strip()) >= config.characters
