"""Map from leaves of stacked parameters to the layers they belong to, by path."""

import re
from collections.abc import Mapping
from typing import NamedTuple

_STACKED = re.compile(r"(.+?)/(\d+)/(.+)")  # stack, kind of layer, path within the layer


class Place(NamedTuple):
    """Layers of a stacked leaf, counted from 0, prefix first; and its path within a layer."""

    stack: str  # "" for the model's main stack, else the path of the stack
    numbers: range
    part: str


def places(sizes: Mapping[str, int]) -> dict[str, Place]:
    """Return the layers of each leaf `STACK/KIND/...`; `sizes` are the sizes of the first axes.

    Other paths are left out. A stack's kinds of layers alternate: the n-th layer of kind k is layer
    k + n x kinds.
    """
    kinds: dict[str, dict[str, int]] = {}
    matches = {path: match for path in sizes if (match := _STACKED.fullmatch(path))}
    for path, match in matches.items():
        kinds.setdefault(match[1], {})[match[2]] = sizes[path]
    before = sum(kinds.get("prefix", {}).values())

    def place(path: str, match: re.Match[str]) -> Place:
        stack, kind, part = match.groups()
        first = int(kind) + (before if stack == "stack" else 0)
        step = len(kinds[stack])
        numbers = range(first, first + step * sizes[path], step)
        return Place("" if stack in ("prefix", "stack") else stack, numbers, part)

    return {path: place(path, match) for path, match in matches.items()}
