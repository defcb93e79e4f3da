"""Which layers the leaves of a stack belong to, by their paths."""

import re
from collections.abc import Mapping
from typing import NamedTuple

_STACKED = re.compile(r"(.+?)/(\d+)/(.+)")  # stack, kind of layer, what it is of it


class Place(NamedTuple):
    """The layers of a stacked leaf, counted from 0, those of a prefix before those of the stack; and what it is of them."""

    stack: str  # of a model's own layers "", of another stack its path
    numbers: range
    part: str


def places(sizes: Mapping[str, int]) -> dict[str, Place]:
    """The place of each leaf `STACK/KIND/...` whose first axis are so many layers; of other paths none.

    A stack's kinds of layers take turns, so the n-th of kind k is layer k + n x kinds.
    """
    kinds: dict[str, dict[str, int]] = {}
    found = {path: match for path in sizes if (match := _STACKED.fullmatch(path))}
    for path, match in found.items():
        kinds.setdefault(match[1], {})[match[2]] = sizes[path]
    before = sum(kinds.get("prefix", {}).values())

    def place(path: str, match: re.Match[str]) -> Place:
        stack, kind, part = match.groups()
        first = int(kind) + (before if stack == "stack" else 0)
        step = len(kinds[stack])
        numbers = range(first, first + step * sizes[path], step)
        return Place("" if stack in ("prefix", "stack") else stack, numbers, part)

    return {path: place(path, match) for path, match in found.items()}
