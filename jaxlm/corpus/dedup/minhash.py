"""Near duplicates by MinHash: signatures that agree where sets of runs of words overlap, and bands that bring pairs together.

Of a random order of all runs, two documents have the same first one with a probability that is their Jaccard similarity,
|A and B| / |A or B|. A signature holds the first of `bands` x `rows` orders; two documents are compared where they agree in
all rows of a band, and taken for near duplicates where they agree in a share `jaccard` of the whole signature.

Source: Broder 1997, "On the resemblance and containment of documents"; bands as in Leskovec, Rajaraman, Ullman, "Mining of
Massive Datasets", §3.4. An order is the upper half of a product with an odd number, of hashes that are mixed before:
Dietzfelbinger et al. 1997, multiply-shift, which is only nearly min-wise independent; tests compare with exact Jaccard.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxlm.corpus.dedup.config import MinHash
from jaxlm.corpus.ngrams import hashed, mixed, runs, words

_CHUNK = 2**9  # runs at a time: what is made of them stays in a core's cache


def signature(text: str, config: MinHash) -> np.ndarray | None:
    """u32[bands x rows], the same on every machine; None for a text without words. Cost: bands x rows products a run."""
    numbers = hashed(words(text))
    if not len(numbers):
        return None
    found = np.unique(runs(numbers, min(config.words, len(numbers))))
    factors, offsets = _orders(config.bands * config.rows)
    least = np.full(len(factors), np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(found), _CHUNK):
        piece = found[start : start + _CHUNK, None] * factors
        piece += offsets
        np.minimum(least, piece.min(axis=0), out=least)
    return (least >> np.uint64(32)).astype(np.uint32)  # the upper half of the least is the least


def recall(jaccard: float, config: MinHash) -> float:
    """A lower bound of the probability that a pair of this similarity is found.

    1 - (1 - s^rows)^bands - P(Binomial(bands x rows, s) < jaccard x bands x rows): that a band agrees, less that too few
    values do.
    """
    size = config.bands * config.rows
    needed = math.ceil(config.jaccard * size - 1e-9)
    too_few = sum(
        math.comb(size, k) * jaccard**k * (1 - jaccard) ** (size - k) for k in range(needed)
    )
    return max(0.0, 1 - (1 - jaccard**config.rows) ** config.bands - too_few)


def similar(signatures: np.ndarray, config: MinHash) -> Iterator[tuple[int, int, float]]:
    """Pairs of rows that are near duplicates, the earlier row first, and the share in which they agree.

    Every row of a group that agrees in a band is paired with the first that is similar to it among those that lead: enough
    for clusters, and linear where all are alike.
    """
    for band in range(config.bands):
        columns = signatures[:, band * config.rows : (band + 1) * config.rows]
        for group in _groups(_keys(columns)):
            leaders = [group[0]]
            for row in group[1:]:
                agreement = (signatures[leaders] == signatures[row]).mean(axis=1)
                near = np.flatnonzero(agreement >= config.jaccard)
                if len(near):
                    yield int(leaders[near[0]]), int(row), float(agreement[near[0]])
                else:
                    leaders.append(row)


def _orders(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Odd factors and offsets, drawn from a fixed seed by a function of our own: NumPy's may change with its version."""
    drawn = mixed(np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return drawn[:count] | np.uint64(1), drawn[count:]


def _keys(columns: np.ndarray) -> np.ndarray:
    """One number for each row of a band. Rows that get one by accident are told apart by their signatures."""
    keys = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        keys = mixed(keys + column)
    return keys


def _groups(keys: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of each key that more than one has, in order."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    for group in np.split(order, ends):
        if len(group) > 1:
            yield group
