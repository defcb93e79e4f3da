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
