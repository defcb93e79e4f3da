"""All units compared: which documents and spans were there before, in the order of files and records.

Memory: 16 bytes a document and its place; with near duplicates up to three times 4 x bands x rows, about 2 kB; 12 bytes a long
span; 12 bytes a fingerprint, of which prose has one for about 14 words. What stays of a cluster is its first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxlm.corpus.config import Recipe
from jaxlm.corpus.dedup import minhash
from jaxlm.corpus.dedup.config import Substrings
from jaxlm.corpus.dedup.signatures import Signatures
from jaxlm.corpus.dedup.substrings import Finder, stretches


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Documents that are one, by their number among all; `agreement` is that of the pair that tied each to the others."""

    kind: str  # exact or near
    kept: int
    removed: tuple[int, ...]
    agreement: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is found twice in all units."""

    clusters: tuple[Cluster, ...]
    cut: dict[int, set[int]]  # long spans to cut out, by document
    ranges: dict[int, tuple[tuple[int, int], ...]]  # characters to cut out, by document
    repeated: dict[int, float]  # documents that go, and the share of their words that stood before


def merge(
    units: Sequence[Signatures],
    recipe: Recipe,
    settled: int,
    texts: Callable[[Sequence[int]], Iterator[str]],
) -> Verdict:
    """Exact duplicates first, near ones among what is left, then spans and runs of words of what stays.

    The first `settled` documents are those of earlier runs: nothing becomes of them, whatever they are like. `texts` gives
    the texts of documents, by their numbers in order.
    """
    count = sum(len(unit.digests) for unit in units)
    alive = np.ones(count, bool)
    clusters: list[Cluster] = []
    if "exact" in recipe.dedup:
        found = _exact(np.concatenate([unit.digests for unit in units]))
        clusters += _news(found, settled)
        for cluster in clusters:
            alive[list(cluster.removed)] = False
    if "near" in recipe.dedup:
        has_words = np.concatenate([unit.has_words for unit in units])
        rows = np.flatnonzero(alive & has_words)
        found = _near(np.concatenate([unit.minhash for unit in units])[rows], rows, recipe)
        near = _news(found, settled)
        for cluster in near:
            alive[list(cluster.removed)] = False
        clusters += near
    cut = _spans(units, alive) if "spans" in recipe.dedup else {}
    verdict = Verdict(tuple(clusters), {each: cut[each] for each in cut if each >= settled}, {}, {})
    if "substrings" in recipe.dedup:
        _substrings(units, alive, recipe.substrings, settled, texts, verdict)
    return verdict


def _news(clusters: list[Cluster], settled: int) -> list[Cluster]:
    """The clusters without what an earlier run kept twice."""
    found = []
    for cluster in clusters:
        is_new = [document >= settled for document in cluster.removed]
        if any(is_new):
            removed = tuple(itertools.compress(cluster.removed, is_new))
            agreement = tuple(itertools.compress(cluster.agreement, is_new))
            found.append(Cluster(cluster.kind, cluster.kept, removed, agreement))
    return found


def _exact(digests: np.ndarray) -> list[Cluster]:
    order = np.lexsort((np.arange(len(digests)), digests[:, 1], digests[:, 0]))
    differs = np.any(np.diff(digests[order], axis=0) != 0, axis=1)
    groups = np.split(order, np.flatnonzero(differs) + 1)
    found = [
        Cluster("exact", int(group[0]), tuple(map(int, group[1:])), (1.0,) * (len(group) - 1))
        for group in groups
        if len(group) > 1
    ]
    return sorted(found, key=lambda cluster: cluster.kept)


def _near(signatures: np.ndarray, rows: np.ndarray, recipe: Recipe) -> list[Cluster]:
    """Connected components of the pairs that are similar, by union of trees whose roots are their first members."""
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
    return [
        Cluster(
            "near",
            int(rows[top]),
            tuple(int(rows[row]) for row in group),
            tuple(round(agreement[row], 4) for row in group),
        )
        for top, group in sorted(members.items())
    ]


def _spans(units: Sequence[Signatures], alive: np.ndarray) -> dict[int, set[int]]:
    """Spans of documents that stay, which stood earlier in such a document."""
    owners = _numbered(units, [unit.owners for unit in units])
    numbers = np.concatenate([unit.spans for unit in units])
    # The number of each span in its document: its place among all less that of the document's first.
    within = np.arange(len(owners)) - np.searchsorted(owners, owners)
    stays = alive[owners] if len(owners) else np.zeros(0, bool)
    owners, numbers, within = owners[stays], numbers[stays], within[stays]
    later = np.ones(len(numbers), bool)
    later[np.unique(numbers, return_index=True)[1]] = False
    cut: dict[int, set[int]] = {}
    for owner, number in zip(owners[later].tolist(), within[later].tolist(), strict=True):
        cut.setdefault(owner, set()).add(number)
    return cut


def _numbered(units: Sequence[Signatures], owners: Sequence[np.ndarray]) -> np.ndarray:
    """i64: documents of units by their number among all."""
    begins = np.cumsum([0, *(len(unit.digests) for unit in units)])[:-1]
    return np.concatenate(
        [mine.astype(np.int64) + begin for mine, begin in zip(owners, begins, strict=True)]
    )


def _substrings(
    units: Sequence[Signatures],
    alive: np.ndarray,
    config: Substrings,
    settled: int,
    texts: Callable[[Sequence[int]], Iterator[str]],
    verdict: Verdict,
) -> None:
    """Runs of words in documents that stay, which stood earlier in such a document: added to a verdict."""
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
        found = stretches(text, finder.later(place), config)
        is_new = document >= settled
        if is_new and config.action == "remove" and found.share > config.share:
            verdict.repeated[document] = found.share
            continue
        finder.keep(place)
        if is_new and config.action == "cut" and found.ranges:
            verdict.ranges[document] = found.ranges
