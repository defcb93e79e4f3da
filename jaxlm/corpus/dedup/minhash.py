"""Near duplicates by MinHash with banding (LSH).

The first run of words in a random order is the same for two documents with probability equal to
their Jaccard similarity |A and B| / |A or B|. A signature contains the first of `bands` x `rows`
orders. Documents that agree in all rows of a band are compared; they are near duplicates if they
agree in a share `jaccard` of the whole signature.

Source: Broder 1997, "On the resemblance and containment of documents"; bands as in Leskovec,
Rajaraman, Ullman, "Mining of Massive Datasets", §3.4. An order is the upper half of a product of
mixed hashes with an odd number (Dietzfelbinger et al. 1997, multiply-shift), which is only nearly
min-wise independent; tests compare with exact Jaccard. It is written here, not taken from a
library, so that signatures are the same on every machine and in every version.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxlm.corpus.config import MinHash
from jaxlm.corpus.ngrams import hashed, mixed, runs, words

_CHUNK = 2**9  # runs at a time, so that the products stay in a core's cache


def signature(text: str, config: MinHash) -> np.ndarray | None:
    """Return u32[bands x rows], or None for a text without words.

    Cost: bands x rows products a run.
    """
    numbers = hashed(words(text))
    if not len(numbers):
        return None
    hashes = np.unique(runs(numbers, min(config.words, len(numbers))))
    factors, offsets = _orders(config.bands * config.rows)
    least = np.full(len(factors), np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(hashes), _CHUNK):
        products = hashes[start : start + _CHUNK, None] * factors
        products += offsets
        np.minimum(least, products.min(axis=0), out=least)
    # The upper half of the minimum is the minimum of the upper halves.
    return (least >> np.uint64(32)).astype(np.uint32)


def recall(jaccard: float, config: MinHash) -> float:
    """Return a lower bound of the probability that a pair of this similarity is found.

    1 - (1 - s^rows)^bands - P(Binomial(bands x rows, s) < jaccard x bands x rows): the probability
    that a band agrees, less the probability that too few values agree.
    """
    size = config.bands * config.rows
    needed = math.ceil(config.jaccard * size - 1e-9)
    too_few = sum(
        math.comb(size, k) * jaccard**k * (1 - jaccard) ** (size - k) for k in range(needed)
    )
    return max(0.0, 1 - (1 - jaccard**config.rows) ** config.bands - too_few)


def similar(signatures: np.ndarray, config: MinHash) -> Iterator[tuple[int, int, float]]:
    """Yield pairs of near duplicates, the earlier row first, and the share of equal values.

    A row of a group with an equal band is paired with the first similar leader of the group, else
    becomes a leader: enough for clusters, and linear in a group of near duplicates.
    """
    for band in range(config.bands):
        keys = np.zeros(len(signatures), np.uint64)
        for column in signatures[:, band * config.rows : (band + 1) * config.rows].T:
            keys = mixed(keys + column)
        for group in groups(keys):  # a collision is resolved by comparing the signatures
            leaders = [group[0]]
            for row in group[1:]:
                agreement = (signatures[leaders] == signatures[row]).mean(axis=1)
                near = np.flatnonzero(agreement >= config.jaccard)
                if len(near):
                    yield int(leaders[near[0]]), int(row), float(agreement[near[0]])
                else:
                    leaders.append(row)


def _orders(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw odd factors and offsets from a fixed seed; NumPy's generators may change."""
    drawn = mixed(np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return drawn[:count] | np.uint64(1), drawn[count:]


def groups(*keys: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows, in order, of each combination of the keys that occurs several times."""
    order = np.lexsort(keys)  # stable
    differs = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    for group in np.split(order, np.flatnonzero(differs) + 1):
        if len(group) > 1:
            yield group
