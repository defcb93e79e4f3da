"""The devices of a collective, as XLA writes them, and the axes of a mesh that they lie along."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

_LISTED = r"\{((?:\{[\d,]*\},?)*)\}"


@dataclasses.dataclass(frozen=True)
class Groups:
    """The sets of devices that exchange something, by their number in the mesh; for a permutation, (from, to) pairs."""

    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Devices in the largest set."""
        return max(map(len, self.members), default=1)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh, given by their sizes in order, along which the members of some set differ."""
        places = np.array(
            np.unravel_index(np.arange(math.prod(mesh.values())), tuple(mesh.values()))
        ).T
        differs = np.zeros(len(mesh), bool)
        for group in self.members:
            differs |= (places[list(group)] != places[group[0]]).any(0)
        return tuple(axis for axis, is_crossed in zip(mesh, differs, strict=True) if is_crossed)


def read_groups(line: str, devices: int) -> Groups:
    """The groups of one instruction, which XLA writes in one of four ways.

    - a list: `replica_groups={{0,1},{2,3}}`, where `{}` is all devices together, or `source_target_pairs={{0,1},{1,0}}`
    - by counting: `[2,2]<=[2,2]T(1,0)` counts from 0 in the shape on the right, transposes, and cuts into the shape on the left
    - by the axes of a mesh: `mesh['a'=2,'b'=2] {'b'}` groups the devices that differ along b; `'b':(1)2` is a part of b,
      2 devices long, with 1 before it
    - that with `device_ids=([2,2]T(1,0))` or `device_ids=(0,2,1,3)`: the order in which devices fill the mesh

    Raises:
      ValueError: where it is none of these.
    """
    pairs = re.search(rf"source_target_pairs={_LISTED}", line)
    text = re.search(r"replica_groups=(.*)", line)
    if pairs:
        return Groups(_listed(pairs[1]))
    if text is None:
        raise ValueError(f"no replica_groups in {line.strip()[:200]!r}")
    rest = text[1]
    if listed := re.match(_LISTED, rest):
        return Groups(_listed(listed[1]) or (tuple(range(devices)),))
    if counted := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return _rows(_count(counted[2]).reshape(_numbers(counted[1])))
    if meshed := re.match(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}", rest):
        return _meshed(*meshed.groups())
    raise ValueError(f"replica_groups that are written in an unknown way: {rest[:200]!r}")


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_numbers(part) for part in re.findall(r"\{([\d,]*)\}", text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _count(text: str) -> np.ndarray:
    """`[2,3]T(1,0)`: 0, 1, ... in a shape, then transposed."""
    shape, _, order = text.partition("T")
    sizes = _numbers(shape.strip("[]"))
    counted = np.arange(math.prod(sizes)).reshape(sizes)
    return counted.transpose(_numbers(order.strip("()"))) if order else counted


def _meshed(mesh: str, ids: str | None, wanted: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.-]+)'?=(\d+)", mesh)}
    order = np.arange(math.prod(sizes.values()))
    if ids:
        order = _count(ids).ravel() if ids.startswith("[") else np.array(_numbers(ids))
    crossed = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([\w.-]+)'(?::\((\d+)\)(\d+))?", wanted)
    ]
    # Each axis is cut where a part of it begins or ends, so that what is crossed is whole axes of a finer mesh.
    shape: list[int] = []
    is_crossed: list[bool] = []
    for name, size in sizes.items():
        parts = [(before, before * length) for other, before, length in crossed if other == name]
        cuts = sorted({1, size, *itertools.chain(*parts)})
        for low, high in itertools.pairwise(cuts):
            shape.append(high // low)
            is_crossed.append(any(start <= low and high <= stop for start, stop in parts))
    grid = order.reshape(shape)
    kept = [place for place, crosses in enumerate(is_crossed) if not crosses]
    moved = [place for place, crosses in enumerate(is_crossed) if crosses]
    length = math.prod(shape[place] for place in moved)
    return _rows(grid.transpose(kept + moved).reshape(-1, length))


def _rows(groups: np.ndarray) -> Groups:
    rows: Sequence[Sequence[int]] = groups.reshape(-1, groups.shape[-1]).tolist()
    return Groups(tuple(map(tuple, rows)))
