"""Settings of deduplication."""

import dataclasses
from typing import Literal

from jaxlm.core.config import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinHash:
    """Near duplicates. `dedup.minhash.recall` computes the share of them that is found."""

    words: int = setting(5, "length of the compared runs of words", low=1)
    bands: int = setting(16, "bands of a signature; more find more pairs", low=1, high=256)
    rows: int = setting(8, "values in a band; more compare fewer dissimilar pairs", low=1, high=64)
    jaccard: float = setting(
        0.7, "smallest share of equal signature values of near duplicates", low=0, high=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """Lines or paragraphs that occurred before, in any document, are cut out."""

    unit: Literal["line", "paragraph"] = setting("paragraph", "unit; empty lines end paragraphs")
    characters: int = setting(
        100,
        "smallest length; shorter ones are kept, as they often repeat",
        unit="characters",
        low=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Substrings:
    """Runs of words that occurred before, in any document and at any position."""

    words: int = setting(
        50, "length of a run in words; characters between words are ignored", low=2
    )
    action: Literal["cut", "remove"] = setting(
        "cut", "cut repeated runs out, or remove documents that mostly consist of them"
    )
    share: float = setting(
        0.5,
        "largest share of words in repeated runs; documents above it are removed",
        low=0,
        high=1,
    )
