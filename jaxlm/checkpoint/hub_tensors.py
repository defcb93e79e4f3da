"""A model's tensors as a folder of Hugging Face has them, and as ours: which lies where, and the numbers of either. Free of JAX."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlm.models.config import ModelConfig
from jaxlm.models.cost.tensors import Place, Tensor, places
from jaxlm.models.families.hub import Hub, TensorMapping, uncomputed

Slices = tuple[slice, ...]
# The part of a tensor in a file, by name: ([start:stop] of each dimension) -> array.
Fetch = Callable[[str, Slices], np.ndarray]


class MappedSlice(NamedTuple):
    """Where one tensor of theirs, or a part of it, lies in a leaf of ours."""

    path: str
    lead: tuple[int, ...]  # the layer in the leaf, and the expert
    shape: tuple[int, ...]  # without these
    ins: int  # dimensions of inputs

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs, all dimensions of each as one."""
        return math.prod(self.shape[: self.ins]), math.prod(self.shape[self.ins :])


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """One tensor of theirs, and the leaves of ours that lie side by side in it."""

    name: str
    layout: str
    parts: tuple[MappedSlice, ...]
    is_exact: bool = False  # in float32, whatever the other tensors are in

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        ins = self.parts[0].sizes[0]
        outs = sum(part.sizes[1] for part in self.parts)
        if not self.parts[0].ins:
            return (outs,)
        return (ins, outs) if self.layout == "same" else (outs, ins)

    def kept(self, dtype: np.dtype) -> np.dtype:
        """Its dtype in a folder of this one."""
        return np.dtype(np.float32) if self.is_exact else dtype

    def part(self, number: int, fetch: Fetch, within: Slices) -> np.ndarray:
        """What lies `within` a part's dimensions, of which only the first of its inputs and of its outputs may be cut."""
        part = self.parts[number]
        ins, outs = (
            _span(part.shape[: part.ins], within),
            _span(part.shape[part.ins :], within[part.ins :]),
        )
        shape = tuple(
            len(range(*cut.indices(size))) for cut, size in zip(within, part.shape, strict=True)
        )
        if self.layout == "by head":
            sizes = [each.shape[-1] for each in self.parts]
            before, size, all_sizes = sum(sizes[:number]), sizes[number], sum(sizes)
            rows = slice(outs.start // size * all_sizes, outs.stop // size * all_sizes)
            found = fetch(self.name, (rows, ins) if part.ins else (rows,))
            heads = found.reshape(-1, all_sizes, *found.shape[1:])[:, before : before + size]
            found = heads.reshape(-1, *found.shape[1:])
        else:
            before = sum(each.sizes[1] for each in self.parts[:number])
            outs = slice(outs.start + before, outs.stop + before)
            cut = (ins, outs) if self.layout == "same" else (outs, ins)
            found = fetch(self.name, cut if part.ins else (outs,))
        if part.ins and self.layout != "same":
            found = found.T
        return found.reshape(shape)

    def joined(self, leaf: Callable[[MappedSlice], np.ndarray]) -> np.ndarray:
        """The tensor as the file has it, from what `leaf` gives for each part."""
        flat = []
        for part in self.parts:
            ins, outs = part.sizes
            array = leaf(part)
            matrix = array.reshape(ins, outs) if part.ins else array.reshape(outs)
            flat.append(matrix if self.layout == "same" else matrix.T)
        if self.layout == "by head":
            apart = [
                each.reshape(-1, part.shape[-1], *each.shape[1:])
                for part, each in zip(self.parts, flat, strict=True)
            ]
            return np.concatenate(apart, axis=1).reshape(self.shape)
        return np.concatenate(flat, axis=0 if self.layout == "transposed" else -1)


def round_to_dtype(dtype: np.dtype) -> Callable[[Any], Any]:
    """What a dtype holds of an array, of NumPy or of JAX, in the array's own: a function of it."""
    return lambda array: array.astype(dtype).astype(array.dtype)


def _span(shape: tuple[int, ...], within: Slices) -> slice:
    """The same cut where these dimensions are one. Only the first may be cut."""
    if not shape:
        return slice(0, 1)
    cuts = [cut.indices(size) for cut, size in zip(within, shape, strict=False)]
    assert all(cut == (0, size, 1) for cut, size in zip(cuts[1:], shape[1:], strict=True))
    rest = math.prod(shape[1:])
    return slice(cuts[0][0] * rest, cuts[0][1] * rest)


def layout(config: ModelConfig, hub: Hub) -> list[HFTensor]:
    """Every tensor of theirs, in the order of layers.

    Raises:
      ConfigError: where a leaf of ours has no name there.
    """
    by_layer: dict[int | None, dict[str, Place]] = defaultdict(dict)
    for place in places(config):
        by_layer[place.layer][place.tensor.path] = place
    found = []
    for layer, own in by_layer.items():
        left = set(own)
        for row in hub.rows:
            if row.is_of_layer == (layer is not None):
                for name, parts in _matched(row, layer, own):
                    found.append(HFTensor(name, row.layout, parts, row.is_exact))
                    left -= set(row.param_path)
        if left:
            raise uncomputed(hub, f"it has no tensor for {', '.join(sorted(left))}")
    return found


def _matched(
    row: TensorMapping, layer: int | None, own: Mapping[str, Place]
) -> Iterator[tuple[str, tuple[MappedSlice, ...]]]:
    """The tensors of a row in a layer; none where the layer has no such leaves."""
    if not all(
        path in own and _is_of_experts(own[path].tensor) == row.is_of_expert
        for path in row.param_path
    ):
        return
    if row.without in own or not (row.beside is None or row.beside in own):
        return
    tensors = [own[path] for path in row.param_path]
    name = row.hf_name.replace("{i}", str(layer))
    if not row.is_of_expert:
        yield name, tuple(_part(place) for place in tensors)
        return
    for number in range(tensors[0].tensor.shape[0]):
        yield (
            name.replace("{e}", str(number)),
            tuple(_part(place, number) for place in tensors),
        )


def _is_of_experts(tensor: Tensor) -> bool:
    return tensor.axes[0] == "experts"


def _part(place: Place, *expert: int) -> MappedSlice:
    lead = () if place.row is None else (place.row,)
    shape = place.tensor.shape[1:] if expert else place.tensor.shape
    return MappedSlice(place.path, (*lead, *expert), shape, place.tensor.ins)


class Reader:
    """Leaves of ours, whole or in part, from the tensors of a folder; of no more is read than is asked for.

    Args:
      tensors: what `layout` gives.
      fetch: reads from the folder.
    """

    def __init__(self, tensors: list[HFTensor], fetch: Fetch):
        self._fetch = fetch
        self._sources: dict[str, dict[tuple[int, ...], tuple[HFTensor, int]]] = defaultdict(dict)
        for theirs in tensors:
            for number, part in enumerate(theirs.parts):
                self._sources[part.path][part.lead] = (theirs, number)

    def leaf(
        self, path: str, shape: tuple[int, ...], within: Slices, dtype: np.dtype
    ) -> np.ndarray:
        """What lies `within` a leaf, tensor by tensor: beside the result, no more is held than the part of one of them.

        What is of one tensor alone is that part itself, where it has the dtype.
        """
        sources = self._sources[path]
        lead = len(next(iter(sources)))
        if not lead:
            theirs, number = sources[()]
            return theirs.part(number, self._fetch, within).astype(dtype, copy=False)
        starts, stops = zip(
            *(cut.indices(size)[:2] for cut, size in zip(within, shape, strict=True)), strict=True
        )
        out = np.empty([stop - start for start, stop in zip(starts, stops, strict=True)], dtype)
        rest = tuple(slice(a, b) for a, b in zip(starts[lead:], stops[lead:], strict=True))
        for at in np.ndindex(*out.shape[:lead]):
            theirs, number = sources[tuple(a + first for a, first in zip(at, starts, strict=False))]
            out[at] = theirs.part(number, self._fetch, rest)
        return out
