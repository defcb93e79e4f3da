"""Settings of what is found twice."""

import dataclasses
from typing import Literal

from jaxlm.core.config import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinHash:
    """Near duplicates. `data.prepare.dedup.minhash.recall` says which share of them is found."""

    words: int = setting(5, "length of the runs of words that are compared", low=1)
    bands: int = setting(16, "bands of a signature: more find more pairs", low=1, high=256)
    rows: int = setting(8, "values in a band: more find fewer unlike pairs", low=1, high=64)
    jaccard: float = setting(
        0.7, "pairs whose signatures agree in a smaller share are no duplicates", low=0, high=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """Lines or paragraphs that stood in an earlier document, or earlier in this one, are cut out."""

    unit: Literal["line", "paragraph"] = setting("paragraph", "paragraphs end at an empty line")
    characters: int = setting(
        100, "shorter ones stay: what is short is said often", unit="characters", low=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Substrings:
    """Runs of words that stood in an earlier document, or earlier in this one, wherever they begin."""

    words: int = setting(50, "length of a run, in words whatever is between them", low=2)
    action: Literal["cut", "remove"] = setting(
        "cut", "cut such runs out, or remove documents that consist of them"
    )
    share: float = setting(
        0.5,
        "largest share of its words that a document may have in them, else removed",
        low=0,
        high=1,
    )
