"""Matches in a text."""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PiiMatch(NamedTuple):
    """The range of a match in a text, and its kind."""

    start: int
    end: int
    kind: str


def apart(every: Iterable[PiiMatch], order: Sequence[str]) -> list[PiiMatch]:
    """Select matches without overlap, in order: the longer of two, then by the order of kinds."""
    ranked = sorted(
        every, key=lambda each: (each.start - each.end, order.index(each.kind), each.start)
    )
    selected: list[PiiMatch] = []  # sorted, so only the two adjacent ones can overlap the next
    for each in ranked:
        place = bisect.bisect(selected, each)
        if (not place or selected[place - 1].end <= each.start) and (
            place == len(selected) or each.end <= selected[place].start
        ):
            selected.insert(place, each)
    return selected
