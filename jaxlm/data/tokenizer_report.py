"""Measures of a tokenizer on a text: compression, coverage, losslessness and speed."""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxlm.data import parts
from jaxlm.data.config import DataConfig
from jaxlm.data.documents import Corpus
from jaxlm.data.records import LeftOut
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.data.train_tokenizer import first_bytes

MEASURED_BYTES = 8 * 2**20  # of measured text; shares converge long before


@dataclasses.dataclass(frozen=True)
class TokenizerStats:
    """Measures of a tokenizer on texts, without special tokens."""

    size: int  # ids
    documents: int
    bytes: int
    tokens: int
    bytes_per_token: float
    tokens_per_word: float  # words are separated by white space
    unknown: float  # share of the tokens
    coverage: float  # share of the characters with an id
    lossless: float  # share of the documents that decode exactly
    bytes_per_second: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dataclasses.asdict(self)


def measure(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenizerStats:
    """Measure a tokenizer on texts, at least one of them not empty."""
    begun = time.perf_counter()
    encoded = tokenizer.encode_many(texts)
    seconds = time.perf_counter() - begun
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(map(len, encoded))
    unknown = sum(ids.count(tokenizer.unk) for ids in encoded)
    characters = Counter[str]()
    for text in texts:
        characters.update(text)
    known = tokenizer.encode_many(list(characters))
    occurrences = zip(known, characters.values(), strict=True)
    covered = sum(count for ids, count in occurrences if tokenizer.unk not in ids)
    decoded = (tokenizer.decode(ids).removeprefix(tokenizer.lead) for ids in encoded)
    same = sum(a == b for a, b in zip(decoded, texts, strict=True))
    return TokenizerStats(
        size=tokenizer.size,
        documents=len(texts),
        bytes=size,
        tokens=tokens,
        bytes_per_token=size / max(1, tokens),
        tokens_per_word=tokens / max(1, sum(len(text.split()) for text in texts)),
        unknown=unknown / max(1, tokens),
        coverage=covered / max(1, characters.total()),
        lossless=same / len(texts),
        bytes_per_second=size / max(1e-9, seconds),
    )


def sample_texts(config: DataConfig, pattern: str | None) -> list[str]:
    """Return the first `MEASURED_BYTES` of files, or of the held-out text of a config.

    The list is empty if the config names token shards. Raise JaxlmError if reading fails.
    """
    if pattern is not None:
        documents = Corpus.find((pattern,), config.text_key, "--text").documents(LeftOut())
    else:
        held_out = [part for part in parts.find_parts(config)[1] if part.corpus is not None]
        documents = itertools.chain.from_iterable(p.documents(LeftOut()) for p in held_out)
    texts = (document.text for document in documents if document.text)
    return list(first_bytes(texts, MEASURED_BYTES))
