"""Where something lies in a text."""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """Where something lies in a text, and of which kind it is."""

    start: int
    end: int
    kind: str


def apart(every: Iterable[Found], order: Sequence[str]) -> list[Found]:
    """What is found, in order, none over another: of two the longer, then the one whose kind comes first."""
    ranked = sorted(
        every, key=lambda each: (each.start - each.end, order.index(each.kind), each.start)
    )
    taken: list[Found] = []  # in order, so that only those on either side can lie over the next
    for each in ranked:
        at = bisect.bisect(taken, each)
        if (not at or taken[at - 1].end <= each.start) and (
            at == len(taken) or each.end <= taken[at].start
        ):
            taken.insert(at, each)
    return taken
