"""The word that was probably meant."""

from collections.abc import Iterable


def distance(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.

    Source: Damerau 1964, in the restricted form (no piece is edited twice).
    """
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def nearest(word: str, words: Iterable[str], *, within: float = 0.5) -> str | None:
    """The nearest of `words`, or None where more than the share `within` of the letters would change."""
    best = min(words, key=lambda known: distance(word, known), default=None)
    if best is None or distance(word, best) > max(1, within * max(len(word), len(best))):
        return None
    return best
