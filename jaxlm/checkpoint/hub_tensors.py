"""Mapping between the tensors of a Hugging Face folder and the leaves of our tree. Free of JAX."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlm.models.config import ModelConfig
from jaxlm.models.cost.tensors import LayerTensor, Tensor, layer_tensors
from jaxlm.models.families.hub import Hub, TensorMapping, uncomputed

Slices = tuple[slice, ...]
# Reads a slice of a tensor by name: ([start:stop] of each dimension) -> array.
Fetch = Callable[[str, Slices], np.ndarray]


class MappedSlice(NamedTuple):
    """Position of one HF tensor, or of a part of it, in a leaf of our tree."""

    path: str
    lead: tuple[int, ...]  # index of the layer in the leaf, and of the expert
    shape: tuple[int, ...]  # without the leading dimensions
    ins: int  # number of input dimensions

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the number of inputs and of outputs, each the product of its dimensions."""
        return math.prod(self.shape[: self.ins]), math.prod(self.shape[self.ins :])


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face folder, and the leaves that are concatenated in it."""

    name: str
    layout: str
    parts: tuple[MappedSlice, ...]
    is_exact: bool = False  # float32, regardless of the dtype of the other tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the file."""
        ins = self.parts[0].sizes[0]
        outs = sum(part.sizes[1] for part in self.parts)
        if not self.parts[0].ins:
            return (outs,)
        return (ins, outs) if self.layout == "same" else (outs, ins)

    def file_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in a folder whose tensors have `dtype`."""
        return np.dtype(np.float32) if self.is_exact else dtype

    def part(self, number: int, fetch: Fetch, within: Slices) -> np.ndarray:
        """Return a slice of a part; only the first input and first output dimension may be cut."""
        part = self.parts[number]
        ins = _span(part.shape[: part.ins], within)
        outs = _span(part.shape[part.ins :], within[part.ins :])
        cuts = (cut.indices(size) for cut, size in zip(within, part.shape, strict=True))
        shape = tuple(len(range(*cut)) for cut in cuts)
        if self.layout == "by head":
            sizes = [each.shape[-1] for each in self.parts]
            before, size, all_sizes = sum(sizes[:number]), sizes[number], sum(sizes)
            rows = slice(outs.start // size * all_sizes, outs.stop // size * all_sizes)
            array = fetch(self.name, (rows, ins) if part.ins else (rows,))
            heads = array.reshape(-1, all_sizes, *array.shape[1:])[:, before : before + size]
            array = heads.reshape(-1, *array.shape[1:])
        else:
            before = sum(each.sizes[1] for each in self.parts[:number])
            outs = slice(outs.start + before, outs.stop + before)
            cut = (ins, outs) if self.layout == "same" else (outs, ins)
            array = fetch(self.name, cut if part.ins else (outs,))
        if part.ins and self.layout != "same":
            array = array.T
        return array.reshape(shape)

    def joined(self, leaf: Callable[[MappedSlice], np.ndarray]) -> np.ndarray:
        """Return the tensor as the file has it; `leaf` returns the numbers of each part."""
        flat = []
        for part in self.parts:
            ins, outs = part.sizes
            array = leaf(part)
            matrix = array.reshape(ins, outs) if part.ins else array.reshape(outs)
            flat.append(matrix if self.layout == "same" else matrix.T)
        if self.layout == "by head":
            pairs = zip(self.parts, flat, strict=True)
            apart = [each.reshape(-1, part.shape[-1], *each.shape[1:]) for part, each in pairs]
            return np.concatenate(apart, axis=1).reshape(self.shape)
        return np.concatenate(flat, axis=0 if self.layout == "transposed" else -1)


def round_to_dtype(dtype: np.dtype) -> Callable[[Any], Any]:
    """Return a function that rounds a NumPy or JAX array to `dtype` and keeps the array's dtype."""
    return lambda array: array.astype(dtype).astype(array.dtype)


def _span(shape: tuple[int, ...], within: Slices) -> slice:
    """Return the same slice of the flattened dimensions; only the first may be cut."""
    if not shape:
        return slice(0, 1)
    cuts = [cut.indices(size) for cut, size in zip(within, shape, strict=False)]
    assert all(cut == (0, size, 1) for cut, size in zip(cuts[1:], shape[1:], strict=True))
    rest = math.prod(shape[1:])
    return slice(cuts[0][0] * rest, cuts[0][1] * rest)


def layout(config: ModelConfig, hub: Hub) -> list[HFTensor]:
    """Return every HF tensor, layer by layer. Raises ConfigError if a leaf of ours has no name."""
    by_layer: dict[int | None, dict[str, LayerTensor]] = defaultdict(dict)
    for place in layer_tensors(config):
        by_layer[place.layer][place.tensor.path] = place
    tensors = []
    for layer, leaves in by_layer.items():
        unmapped = set(leaves)
        for row in hub.mappings:
            if row.is_of_layer == (layer is not None):
                for name, parts in _matched(row, layer, leaves):
                    tensors.append(HFTensor(name, row.layout, parts, row.is_exact))
                    unmapped -= set(row.param_path)
        if unmapped:
            raise uncomputed(hub, f"it has no tensor for {', '.join(sorted(unmapped))}")
    return tensors


def _matched(
    row: TensorMapping, layer: int | None, leaves: Mapping[str, LayerTensor]
) -> Iterator[tuple[str, tuple[MappedSlice, ...]]]:
    """Yield the tensors of a mapping in a layer; none if the layer has no such leaves."""
    if not all(
        path in leaves and _is_of_experts(leaves[path].tensor) == row.is_of_expert
        for path in row.param_path
    ):
        return
    if row.excludes in leaves or not (row.requires is None or row.requires in leaves):
        return
    tensors = [leaves[path] for path in row.param_path]
    name = row.hf_name.replace("{i}", str(layer))
    if not row.is_of_expert:
        yield name, tuple(_part(place) for place in tensors)
        return
    for number in range(tensors[0].tensor.shape[0]):
        yield (name.replace("{e}", str(number)), tuple(_part(place, number) for place in tensors))


def _is_of_experts(tensor: Tensor) -> bool:
    return tensor.axes[0] == "experts"


def _part(place: LayerTensor, *expert: int) -> MappedSlice:
    lead = () if place.row is None else (place.row,)
    shape = place.tensor.shape[1:] if expert else place.tensor.shape
    return MappedSlice(place.path, (*lead, *expert), shape, place.tensor.ins)


class Reader:
    """Reads leaves of our tree, whole or in part, from HF tensors; reads only what is requested.

    Args:
      tensors: result of `layout`.
      fetch: reads a slice of a tensor of the folder.
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
        """Return a slice of a leaf.

        At most one tensor's part is in memory besides the result. If the slice comes from one
        tensor alone and already has the dtype, it is returned without a copy.
        """
        sources = self._sources[path]
        lead = len(next(iter(sources)))
        if not lead:
            theirs, number = sources[()]
            return theirs.part(number, self._fetch, within).astype(dtype, copy=False)
        cuts = [slice(*cut.indices(size)[:2]) for cut, size in zip(within, shape, strict=True)]
        out = np.empty([cut.stop - cut.start for cut in cuts], dtype)
        for index in np.ndindex(*out.shape[:lead]):
            source = tuple(a + cut.start for a, cut in zip(index, cuts, strict=False))
            theirs, number = sources[source]
            out[index] = theirs.part(number, self._fetch, tuple(cuts[lead:]))
        return out
