"""Writer of GGUF, the file format of llama.cpp, tensor by tensor. Free of JAX."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.checkpoint import gguf_config
from jaxlm.checkpoint.gguf_config import ARCHITECTURES, named_after
from jaxlm.checkpoint.gguf_file import library
from jaxlm.checkpoint.gguf_source import FREQUENCIES
from jaxlm.checkpoint.hub_tensors import HFTensor, round_to_dtype

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # llama.cpp's numbers
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class GGUFTensor(NamedTuple):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFTensor, ...]  # the experts in their order, or one tensor
    dtype: np.dtype


class GGUFPlan:
    """Contents of a GGUF of a model.

    Args:
      attributes: the model's config.json.
      tensors: the tensors of a Hugging Face folder.
      dtype: dtype of the matrices: float32, bfloat16 or float16.

    Raises ValueError, with the reason, if llama.cpp lacks the architecture or one of its tensors.
    """

    def __init__(self, attributes: Mapping[str, Any], tensors: Sequence[HFTensor], dtype: np.dtype):
        self.attributes = attributes
        name = named_after(attributes["model_type"])
        if name is None:
            known = ", ".join(sorted({each.model_type for each in ARCHITECTURES.values()}))
            raise ValueError(f"it is a {attributes['model_type']}; known are mistral, {known}")
        self.name, self.architecture, self.dtype = name, ARCHITECTURES[name], dtype
        self.frequencies = gguf_config.frequencies(attributes)
        self.tensors = list(self._placed(tensors))

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the model, without its tokenizer's."""
        return gguf_config.metadata(self.attributes, self.name)

    def read_back(self) -> dict[str, Any]:
        """Return the config.json that a reader of the metadata gets; a file cannot state all."""
        return gguf_config.attributes(
            self.metadata(),
            "GGUF",
            vocab=self.attributes["vocab_size"],
            is_tied=self.attributes["tie_word_embeddings"],
            frequencies=self.frequencies,
        )

    def roundings(self) -> dict[str, Callable[[Any], Any]]:
        """Return for each leaf, by path, a function that rounds an array as the file does."""

        def rounded_scale(leaf: Any) -> Any:
            return (leaf.astype(np.float32) + 1) - 1

        roundings: dict[str, Callable[[Any], Any]] = {}
        for each in self.tensors:
            is_scale = self.architecture.is_scale(each.name)
            rounding = rounded_scale if is_scale else round_to_dtype(each.dtype)
            roundings |= {part.path: rounding for theirs in each.parts for part in theirs.parts}
        return roundings

    def write(
        self,
        path: Path,
        array: Callable[[HFTensor], np.ndarray],
        tokenizer: Mapping[str, Any],
        title: str,
    ) -> None:
        """Write the file; one tensor, or the experts of a layer, is in memory at a time.

        `array` returns the numbers of a Hugging Face tensor, `tokenizer` is metadata, and `title`
        the model's name. Raises InputMissing if the package `gguf` is not installed; OSError if the
        file cannot be written.
        """
        gguf = library("writing a GGUF", path)
        settings = {**self.metadata(), **tokenizer}
        writer = gguf.GGUFWriter(path, settings.pop("general.architecture"))
        try:
            writer.add_name(title)
            writer.add_file_type(FILE_TYPES[self.dtype.name])
            for key, value in settings.items():
                _add(gguf, writer, key, value)
            if self.frequencies is not None:
                _declare(gguf, writer, FREQUENCIES, self.frequencies.shape, np.dtype(np.float32))
            for each in self.tensors:
                _declare(gguf, writer, each.name, each.shape, each.dtype)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if self.frequencies is not None:
                writer.write_tensor_data(self.frequencies)
            for each in self.tensors:
                numbers = [self._numbers(each, theirs, array(theirs)) for theirs in each.parts]
                # Written as bytes: the library does not support bfloat16.
                writer.write_tensor_data(np.concatenate(numbers).view(np.uint8))
        finally:
            writer.close()

    def _numbers(self, tensor: GGUFTensor, theirs: HFTensor, array: np.ndarray) -> np.ndarray:
        """Return a Hugging Face tensor in llama.cpp's order and scale convention, flat."""
        kind = self.architecture.rotated(tensor.name)
        if kind is not None:
            heads = self.attributes["num_attention_heads" if kind == "q" else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
        if self.architecture.is_scale(tensor.name):
            array = array.astype(np.float32) + 1
        return np.ascontiguousarray(array.astype(tensor.dtype)).reshape(-1)

    def _placed(self, tensors: Sequence[HFTensor]) -> Iterator[GGUFTensor]:
        parts: dict[str, dict[int, HFTensor]] = defaultdict(dict)
        for theirs in tensors:
            placement = self.architecture.own(theirs.name)
            if placement is None or (
                len(theirs.shape) == 1 and self.architecture.rotated(placement[0])
            ):
                raise ValueError(f"llama.cpp has no name for its tensor {theirs.name}")
            parts[placement[0]][placement[1]] = theirs
        for name, experts in parts.items():
            first, is_stacked = experts[0], len(experts) > 1 or name.endswith("_exps.weight")
            shape = (len(experts), *first.shape) if is_stacked else first.shape
            is_exact = self.architecture.is_exact(name, len(shape))
            dtype = np.dtype(np.float32) if is_exact else self.dtype
            yield GGUFTensor(name, shape, tuple(experts[i] for i in range(len(experts))), dtype)


def _declare(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    kind = gguf.GGMLQuantizationType[STORED[dtype.name]]
    size = int(np.prod(shape)) * dtype.itemsize
    writer.add_tensor_info(name, shape, dtype, size, raw_dtype=kind)


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    """Add a setting with the type that llama.cpp expects."""
    kinds = gguf.GGUFValueType
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, kind[type(value)])
