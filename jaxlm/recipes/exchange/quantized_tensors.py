"""Codes of a quantized run as tensors of a folder of compressed-tensors, and back."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from jaxlm.checkpoint.gguf_blocks import CodeSteps
from jaxlm.checkpoint.gguf_writer import Scheme
from jaxlm.checkpoint.hub_folder import Folder, ModelSource
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice
from jaxlm.checkpoint.quantized_folder import (
    CODES,
    FOUR_BITS,
    SCALE,
    ZERO,
    QuantizedFolder,
    open_quantized,
    packed,
    unpacked,
)
from jaxlm.core.errors import ConfigError
from jaxlm.ops import integer_product
from jaxlm.tune.config import PROJECTIONS, Quantized, is_at
from jaxlm.tune.quantized import QuantizedEmbedding, StoredWeight

# The name of each format, and its settings of weights in config.json.
SCHEMES = {
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True}),
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True}),
    "int4_zero": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False}),
    "w4a8": ("int-quantized", {"num_bits": 4, "type": "int", "symmetric": True}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True}),
}
# Storage of a GGUF with the same codes.
KEPT: dict[str, Scheme] = {
    "int8": "q8_0", "w8a8": "q8_0", "int4": "q4_0", "w4a8": "q4_0", "int4_zero": "q4_1"
}  # fmt: skip
UNSUPPORTED = "no format of compressed-tensors has"
Layers = Mapping[str, StoredWeight]  # by the paths of their weights
Array = Callable[[HFTensor], np.ndarray]


def open_exported(place: Path) -> ModelSource:
    """Open a folder that was just written."""
    return open_quantized(Folder(place))


def leaf_tensors(tensors: Sequence[HFTensor], layers: Layers) -> list[HFTensor]:
    """Return the tensors with codes, scales and zeros, NAME_codes and so on, for each quantized.

    Raises ConfigError if some but not all matrices of one tensor are quantized.
    """
    result = []
    for each in tensors:
        quantized = [part.path in layers for part in each.parts]
        if not any(quantized):
            result.append(each)
            continue
        if not all(quantized):
            paths = [part.path for part in each.parts]
            plain = paths[quantized.index(False)]
            why = f"{each.name} joins {', '.join(paths)}, and {plain} is not quantized"
            raise _refused(layers, why)
        format = layers[each.parts[0].path].format
        for leaf in (CODES, SCALE, *((ZERO,) if format.base == "int4_zero" else ())):
            parts = tuple(_leaf_part(part, layers[part.path], leaf) for part in each.parts)
            result.append(dataclasses.replace(each, name=f"{each.name}_{leaf}", parts=parts))
    return result


def _leaf_part(part: MappedSlice, layer: StoredWeight, leaf: str) -> MappedSlice:
    inputs, format = part.sizes[0], layer.format
    if leaf != CODES:
        rows = 1 if format.block == "all" else -(-inputs // format.block)
    else:
        rows = -(-inputs // 2) if format.base in FOUR_BITS else inputs
    return MappedSlice(f"{part.path}_{leaf}", part.lead, (rows, *part.shape[part.ins :]), 1)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of the folder, and how it is made."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[Array], np.ndarray]

    def file_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in the file, which does not depend on that of other tensors."""
        del dtype
        return self.dtype


def file_tensors(
    plain: Sequence[HFTensor], layers: Layers
) -> tuple[list[HFTensor | FileTensor], dict[str, Any]]:
    """Return the tensors of the folder, and `quantization_config` of its config.json.

    Args:
      plain: the tensors of the model if nothing were quantized.
      layers: the quantized layers.

    Raises ConfigError if no format of compressed-tensors has the same numbers.
    """
    format = next(iter(layers.values())).format
    if format.base not in SCHEMES:
        raise _refused(layers, f"{UNSUPPORTED} {format.base}")
    result: list[HFTensor | FileTensor] = []
    ignored = [] if "unembedding/weight" in layers else ["lm_head"]
    for each in plain:
        if each.parts[0].path not in layers:
            result.append(each)
            if each.parts[0].ins and each.layout != "same" and each.name.endswith(".weight"):
                ignored.append(each.name.removesuffix(".weight"))
            continue
        inputs = each.parts[0].sizes[0]
        if isinstance(layers[each.parts[0].path], QuantizedEmbedding):
            raise _refused(layers, f"{each.name} is a table, {UNSUPPORTED} tables")
        if each.layout == "same":
            raise _refused(layers, f"{each.name} is [inputs, outputs], {UNSUPPORTED} such matrices")
        if format.block != "all" and inputs % format.block:
            why = f"blocks of {format.block} do not divide the {inputs} inputs of {each.name}"
            raise _refused(layers, why)
        leaves = {each.name.rpartition("_")[2]: each for each in leaf_tensors([each], layers)}
        result += _of_matrix(each, leaves, format.base)
    name, weights = SCHEMES[format.base]
    is_whole = format.block == "all"
    strategy = {"strategy": "channel" if is_whole else "group"}
    size = {"group_size": None if is_whole else format.block}
    activations = None
    if integer_product.is_integer(format):
        activations = weights | {"num_bits": 8, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights | strategy | size | {"dynamic": False},
        "input_activations": activations,
        "output_activations": None,
        "format": name,
    }
    return result, {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(dict.fromkeys(ignored)),
        "kv_cache_scheme": None,
    }


def _of_matrix(plain: HFTensor, leaves: Mapping[str, HFTensor], base: str) -> Iterator[FileTensor]:
    """Yield the tensors of one quantized matrix."""
    outs, inputs = plain.shape
    int32, codes, scales = np.dtype(np.int32), leaves[CODES], leaves[SCALE]
    if base == "w4a8":  # a byte a code: programs with such products read no packed ones

        def signed(array: Array) -> np.ndarray:
            return (unpacked(array(codes), 4, inputs) - np.uint8(8)).view(np.int8)

        yield FileTensor(plain.name, (outs, inputs), np.dtype(np.int8), signed)
    elif base in ("w8a8", "fp8"):
        dtype = np.dtype(np.int8 if base == "w8a8" else ml_dtypes.float8_e4m3fn)
        yield FileTensor(plain.name, (outs, inputs), dtype, lambda array: array(codes))
    else:
        bits = 8 if base == "int8" else 4
        shape = outs, -(-inputs * bits // 32)

        def words(array: Array) -> np.ndarray:
            if base == "int8":
                return packed(array(codes).view(np.uint8) ^ 128, 8)
            pairs = array(codes)  # two codes a byte, in the order of a word
            return packed(pairs, 8)

        yield FileTensor(f"{plain.name}_packed", shape, int32, words)
        size = np.array([outs, inputs], np.int64)
        yield FileTensor(f"{plain.name}_shape", (2,), size.dtype, lambda array: size)
    yield FileTensor(
        f"{plain.name}_scale", scales.shape, np.dtype(np.float32), lambda array: array(scales)
    )
    if base == "int4_zero":
        zeros = leaves[ZERO]
        shape = -(-outs // 8), zeros.shape[1]
        yield FileTensor(
            f"{plain.name}_zero_point", shape, int32, lambda array: packed(array(zeros).T, 4).T
        )


def kept_format(source: ModelSource, tensors: Sequence[HFTensor]) -> tuple[Quantized | None, str]:
    """Return the settings of a run with the same codes; None, and why, if none has them.

    Args:
      source: the folder.
      tensors: the tensors of the model, under the folder's names.
    """
    if not isinstance(source, QuantizedFolder):
        return None, ""
    matrices = source.matrices
    kinds = {(each.base, each.block) for each in matrices.values()}
    (base, block), *others = kinds
    if others:
        return None, "its matrices have several formats"
    if base is None:
        return None, "no stored format of jaxlm has its numbers"
    paths: dict[str, list[bool]] = {}
    for each in tensors:
        for part in each.parts:
            paths.setdefault(part.path, []).append(each.name in matrices)
    quantized = sorted(path for path, of in paths.items() if any(of))
    if not all(all(paths[path]) for path in quantized):
        return None, "a matrix is quantized in some layers, and not in others"
    linear = {part.path for each in tensors for part in each.parts if part.ins}
    usual = {path for path in linear if any(is_at(at, path) for at in PROJECTIONS)}
    at = PROJECTIONS if usual == set(quantized) else tuple(quantized)
    return Quantized(base=cast(Any, base), block=cast(Any, block), at=at), ""


def code_steps(
    tensors: Sequence[HFTensor], layers: Layers, leaf: Callable[[MappedSlice], np.ndarray]
) -> tuple[Scheme | None, dict[str, CodeSteps]]:
    """Return the storage of a GGUF that keeps the codes, and the steps by the names of tensors.

    There is none if the format has another one, or a block of 32 numbers has several scales.

    Args:
      tensors: the tensors of the model if nothing were quantized.
      layers: the quantized layers.
      leaf: returns the numbers of a part of a leaf.
    """
    format = next(iter(layers.values())).format
    scheme, steps_of = KEPT.get(format.base), {}
    for each in tensors:
        first = each.parts[0].path
        if first not in layers or isinstance(layers[first], QuantizedEmbedding):
            continue
        inputs = each.parts[0].sizes[0]
        size = inputs if format.block == "all" else format.block
        if len(each.parts) > 1 or each.layout == "same" or inputs % 32 or size % 32:
            return None, {}
        leaves = {one.name.rpartition("_")[2]: one for one in leaf_tensors([each], layers)}
        # Of blocks of 32; the last block of a format may have fewer inputs.
        steps = {
            name: np.repeat(one.joined(leaf), size // 32, 1)[:, : inputs // 32]
            for name, one in leaves.items()
            if name in (SCALE, ZERO)
        }
        steps_of[each.name] = CodeSteps(steps[SCALE], steps.get(ZERO))
    return (scheme, steps_of) if scheme and steps_of else (None, {})


def _refused(layers: Layers, why: str) -> ConfigError:
    base = next(iter(layers.values())).format.base
    return ConfigError(
        "the quantized run cannot be written as compressed-tensors",
        where=f"tune.base = {base}",
        why=why,
        fix="`jaxlm export --to=hf` writes the run that was quantized",
    )
