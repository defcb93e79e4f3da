"""Tensors of PEFT's folder for the adapted layers of a model: names, layouts, patterns.

PEFT stores A as [rank, inputs] and B as [outputs, rank], for GPT-2's transposed `Conv1D` too.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice
from jaxlm.core.errors import DataError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every key
LORA_A, LORA_B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
IA3 = "ia3_l"


@dataclasses.dataclass(frozen=True)
class AdapterPlace:
    """A linear map of transformers: its weight, and the weights of ours side by side in it."""

    weight: HFTensor

    @property
    def name(self) -> str:
        """Path of the module, as in `named_modules` of the transformers model."""
        return self.weight.name.removesuffix(".weight")

    @property
    def inputs(self) -> int:
        """Number of inputs, which all parts share."""
        return self.weight.parts[0].sizes[0]

    def key(self, suffix: str) -> str:
        """Return the name of a tensor in PEFT's file."""
        return f"{PREFIX}{self.name}.{suffix}"

    def outputs(self, suffix: str, rank: int | None = None) -> HFTensor:
        """Return the tensor [outputs, rank] in the order of the weight's outputs, or [outputs]."""
        rows = () if rank is None else (rank,)
        parts = tuple(
            MappedSlice(part.path, part.lead, (*rows, *part.shape[part.ins :]), len(rows))
            for part in self.weight.parts
        )
        layout = "by head" if self.weight.layout == "by head" else "transposed"
        return HFTensor(self.key(suffix), layout, parts)


def places(tensors: Iterable[HFTensor]) -> dict[str, AdapterPlace]:
    """Return the linear maps of a model by name; those of experts have no adapter.

    Args:
      tensors: result of `hub_tensors.layout`.
    """
    return {
        place.name: place
        for each in tensors
        if each.parts[0].path.endswith("/weight") and len(each.parts[0].lead) < 2
        for place in [AdapterPlace(each)]
    }


def saved_whole(
    tensors: Iterable[HFTensor], keys: Collection[str], modules: Iterable[str], prefix: str
) -> dict[str, HFTensor]:
    """Return the tensors of modules that a file has whole, by key.

    Args:
      tensors: those of the base.
      keys: of the file.
      modules: ends of the modules' names, `modules_to_save`.
      prefix: of each key, before the name of a tensor.
    """
    ends = tuple(map(str, modules))
    return {
        f"{prefix}{each.name}": each
        for each in tensors
        if f"{prefix}{each.name}" in keys and each.name.rpartition(".")[0].endswith(ends)
    }


def not_saved(saved: Mapping[str, HFTensor], modules: Iterable[str]) -> list[str]:
    """Return a line for each of `modules_to_save` that the file has no tensor of."""
    names = [each.name.rpartition(".")[0] for each in saved.values()]
    return [
        f"missing     a module of modules_to_save: {module}"
        for module in map(str, modules)
        if not any(name.endswith(module) for name in names)
    ]


def whole_paths(
    saved: Mapping[str, HFTensor], *, is_tied: bool, folder: Path, fix: str
) -> list[str]:
    """Return the paths of the leaves of `saved`. Raises DataError for a tied embedding."""
    paths = {part.path for each in saved.values() for part in each.parts}
    if is_tied and "embedding/table" in paths:
        raise DataError(
            "the adapter has an embedding of its own",
            where=str(folder / CONFIG),
            why="modules_to_save has the embedding, which is tied to the head of the base",
            fix=fix,
        )
    return sorted(paths)


def part_of(tensor: HFTensor, number: int, array: np.ndarray) -> np.ndarray:
    """Return a part of a tensor in the order of our leaf, as float32."""
    within = tuple(slice(0, size) for size in tensor.parts[number].shape)
    return tensor.part(number, lambda _, cut: array[cut], within).astype(np.float32)


def write_whole(
    leaves: Mapping[str, np.ndarray],
    saved: Mapping[str, HFTensor],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Copy the tensors of a file that are saved whole to the leaves of a model."""
    for key, each in saved.items():
        for number, part in enumerate(each.parts):
            leaf = leaves[part.path]
            (leaf[part.lead] if part.lead else leaf)[...] = part_of(each, number, arrays[key])


def leaf(part: MappedSlice, name: str) -> str:
    """Return the path of an adapter's leaf of the layer of a weight."""
    return f"{part.path.removesuffix('weight')}{name}"


def at(array: jax.Array | np.ndarray, part: MappedSlice) -> np.ndarray:
    """Return the leaf of one layer, as float32."""
    return np.asarray(array[part.lead] if part.lead else array, np.float32)


def suffixes(selected: Collection[str], names: Collection[str]) -> list[str]:
    """Return the shortest ends of module names that match those selected, and no other name."""
    return sorted({_short(each, lambda name: name in selected, names, ".") for each in selected})


def patterns(selected: Collection[str], paths: Collection[str]) -> tuple[str, ...]:
    """Return patterns over paths of weights that match those selected, and no other path."""
    ends = {_short(each, lambda path: path in selected, paths, "/") for each in selected}
    return tuple(sorted(end if end in selected else f"*/{end}" for end in ends))


def _short(
    name: str, is_selected: Callable[[str], bool], names: Collection[str], separator: str
) -> str:
    parts = name.split(separator)
    for count in range(1, len(parts)):
        end = separator.join(parts[-count:])
        if end == "weight":
            continue
        if all(is_selected(other) for other in names if other.endswith(end)):
            return end
    return name


def as_written(number: float) -> Any:
    """Return a whole number as an integer, as PEFT writes alpha."""
    return int(number) if float(number).is_integer() else float(number)
