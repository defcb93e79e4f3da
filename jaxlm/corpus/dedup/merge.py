"""Deduplication across all units, in the order of files and records; the first of a cluster stays.

Memory: 16 bytes a document and its place; with near duplicates up to three times
4 x bands x rows, about 2 kB; 12 bytes a long span; 12 bytes a fingerprint (prose has one for about
14 words).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.corpus.config import Recipe, Substrings
from jaxlm.corpus.dedup import minhash
from jaxlm.corpus.dedup.signatures import Signatures
from jaxlm.corpus.dedup.substrings import Finder, stretches
from jaxlm.corpus.ngrams import occurred


class Cluster(NamedTuple):
    """Duplicates by document number; `agreement` is that of the pair that linked each document."""

    kind: str  # exact or near
    representative: int
    removed: tuple[int, ...]
    agreement: tuple[float, ...]


class Duplicates(NamedTuple):
    """The duplicates among all units."""

    clusters: tuple[Cluster, ...]
    cut: dict[int, set[int]]  # long spans to cut out, by document
    ranges: dict[int, tuple[tuple[int, int], ...]]  # characters to cut out, by document
    repeated: dict[int, float]  # documents to remove, with their share of repeated words


def merge(
    units: Sequence[Signatures],
    recipe: Recipe,
    first_new: int,
    texts: Callable[[Sequence[int]], Iterator[str]],
) -> Duplicates:
    """Find exact duplicates, then near ones, then repeated spans and runs of words in the rest.

    Args:
      units: signatures of all units.
      recipe: settings.
      first_new: the number of documents of earlier runs, which come first and are never changed.
      texts: yields the texts of documents, given by ascending number.
    """
    alive = np.ones(sum(len(unit.digests) for unit in units), bool)
    clusters: list[Cluster] = []

    def add(clusters_of_all: list[Cluster]) -> None:
        """Add clusters without the duplicates that belong to an earlier run."""
        for kind, representative, every, agreements in clusters_of_all:
            is_new = [document >= first_new for document in every]
            if any(is_new):
                removed = tuple(itertools.compress(every, is_new))
                agreement = tuple(itertools.compress(agreements, is_new))
                clusters.append(Cluster(kind, representative, removed, agreement))
                alive[list(removed)] = False

    if "exact" in recipe.dedup:
        add(_exact(np.concatenate([unit.digests for unit in units])))
    if "near" in recipe.dedup:
        rows = np.flatnonzero(alive & np.concatenate([unit.has_words for unit in units]))
        add(_near(np.concatenate([unit.minhash for unit in units])[rows], rows, recipe))
    cut = _spans(units, alive) if "spans" in recipe.dedup else {}
    cut = {document: spans for document, spans in cut.items() if document >= first_new}
    verdict = Duplicates(tuple(clusters), cut, {}, {})
    if "substrings" in recipe.dedup:
        _substrings(units, alive, recipe.substrings, first_new, texts, verdict)
    return verdict


def _exact(digests: np.ndarray) -> list[Cluster]:
    clusters = [
        Cluster("exact", int(group[0]), tuple(map(int, group[1:])), (1.0,) * (len(group) - 1))
        for group in minhash.groups(digests[:, 1], digests[:, 0])
    ]
    return sorted(clusters, key=lambda cluster: cluster.representative)


def _near(signatures: np.ndarray, rows: np.ndarray, recipe: Recipe) -> list[Cluster]:
    """Return the connected components of similar pairs, by union-find rooted at first members."""
    parent = list(range(len(rows)))
    agreement: dict[int, float] = {}

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for first, second, share in minhash.similar(signatures, recipe.near):
        one, other = sorted((root(first), root(second)))
        parent[other] = one
        agreement[second] = max(share, agreement.get(second, 0.0))
        agreement.setdefault(other, share)
    members: dict[int, list[int]] = {}
    for row in range(len(rows)):
        if (top := root(row)) != row:
            members.setdefault(top, []).append(row)
    clusters = []
    for top, group in sorted(members.items()):
        shares = tuple(round(agreement[row], 4) for row in group)
        clusters.append(Cluster("near", int(rows[top]), tuple(rows[group].tolist()), shares))
    return clusters


def _spans(units: Sequence[Signatures], alive: np.ndarray) -> dict[int, set[int]]:
    """Return, by document, the spans that occurred earlier in a kept document."""
    owners = _numbered(units, [unit.owners for unit in units])
    numbers = np.concatenate([unit.spans for unit in units])
    # The index of each span in its document.
    within = np.arange(len(owners)) - np.searchsorted(owners, owners)
    stays = alive[owners] if len(owners) else np.zeros(0, bool)
    owners, numbers, within = owners[stays], numbers[stays], within[stays]
    later = occurred(numbers)
    cut: dict[int, set[int]] = {}
    for owner, number in zip(owners[later].tolist(), within[later].tolist(), strict=True):
        cut.setdefault(owner, set()).add(number)
    return cut


def _numbered(units: Sequence[Signatures], owners: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of documents among all units, i64."""
    begins = np.cumsum([0, *(len(unit.digests) for unit in units[:-1])])
    pairs = zip(owners, begins, strict=True)
    return np.concatenate([mine.astype(np.int64) + begin for mine, begin in pairs])


def _substrings(
    units: Sequence[Signatures],
    alive: np.ndarray,
    config: Substrings,
    first_new: int,
    texts: Callable[[Sequence[int]], Iterator[str]],
    verdict: Duplicates,
) -> None:
    """Find runs of words that occurred earlier in a kept document; add them to a verdict."""
    owners = _numbered(units, [unit.print_owners for unit in units])
    prints = np.concatenate([unit.prints for unit in units])
    owners, prints = owners[alive[owners]], prints[alive[owners]]
    values, count = np.unique(prints, return_counts=True)
    shared = values[count > 1]
    candidates = np.unique(owners[np.isin(prints, shared)]).tolist()
    finder = Finder(shared, config)
    for text in texts(candidates):
        finder.add(text)
    for place, (document, text) in enumerate(zip(candidates, texts(candidates), strict=True)):
        ranges, share = stretches(text, finder.later(place), config)
        is_new = document >= first_new
        if is_new and config.action == "remove" and share > config.share:
            verdict.repeated[document] = share
            continue
        finder.keep(place)
        if is_new and config.action == "cut" and ranges:
            verdict.ranges[document] = ranges
