"""A model in llama.cpp's format, GGUF, written tensor by tensor. Free of JAX."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.checkpoint import gguf_config
from jaxlm.checkpoint.gguf_names import ARCHITECTURES, named_after
from jaxlm.checkpoint.gguf_source import FREQUENCIES
from jaxlm.checkpoint.hub_tensors import HFTensor, round_to_dtype
from jaxlm.core.errors import not_installed

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # as llama.cpp counts them
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Written(NamedTuple):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFTensor, ...]  # those of the experts, in their order, or the one
    dtype: np.dtype


class Plan:
    """What a file of a model will hold, and how exactly.

    Args:
      attributes: of the model's config.json.
      tensors: of a folder of Hugging Face.
      dtype: of the matrices: float32, bfloat16 or float16.

    Raises:
      ValueError: where llama.cpp has no such architecture, or it no such tensor; with the reason.
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
        """What the file says of the model; of its tokenizer nothing."""
        return gguf_config.metadata(self.attributes, self.name)

    def read_back(self) -> dict[str, Any]:
        """The attributes of config.json that a reader of the metadata finds: fewer where a file cannot say them."""
        return gguf_config.attributes(
            self.metadata(),
            "GGUF",
            vocab=self.attributes["vocab_size"],
            is_tied=self.attributes["tie_word_embeddings"],
            frequencies=self.frequencies,
        )

    def held(self) -> dict[str, Callable[[Any], Any]]:
        """For each leaf of ours, by path, what of its numbers the file holds: a function of an array, of NumPy or of JAX."""

        def counted(leaf: Any) -> Any:
            return (leaf.astype(np.float32) + 1) - 1

        return {
            part.path: counted
            if self.architecture.is_scale(each.name)
            else round_to_dtype(each.dtype)
            for each in self.tensors
            for theirs in each.parts
            for part in theirs.parts
        }

    def write(
        self,
        path: Path,
        array: Callable[[HFTensor], np.ndarray],
        tokenizer: Mapping[str, Any],
        title: str,
    ) -> None:
        """Writes the file; one tensor, or a layer's experts, is in memory at a time.

        Args:
          path: of the file.
          array: the numbers of a tensor of Hugging Face's.
          tokenizer: metadata of the tokenizer.
          title: the model's name.

        Raises:
          InputMissing: where the package that writes is not installed.
          OSError: where the file cannot be written.
        """
        gguf = library(path)
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
                # As bytes: the library knows no bfloat16.
                writer.write_tensor_data(np.concatenate(numbers).view(np.uint8))
        finally:
            writer.close()

    def _numbers(self, tensor: Written, theirs: HFTensor, found: np.ndarray) -> np.ndarray:
        """A tensor of Hugging Face's in the order and by the count of llama.cpp, flat."""
        kind = self.architecture.rotated(tensor.name)
        if kind is not None:
            heads = self.attributes["num_attention_heads" if kind == "q" else "num_key_value_heads"]
            found = found.reshape(heads, 2, -1, *found.shape[1:]).swapaxes(1, 2)
        if self.architecture.is_scale(tensor.name):
            found = found.astype(np.float32) + 1
        return np.ascontiguousarray(found.astype(tensor.dtype)).reshape(-1)

    def _placed(self, tensors: Sequence[HFTensor]) -> Iterator[Written]:
        parts: dict[str, dict[int, HFTensor]] = defaultdict(dict)
        for theirs in tensors:
            found = self.architecture.own(theirs.name)
            if found is None or (len(theirs.shape) == 1 and self.architecture.rotated(found[0])):
                raise ValueError(f"it has {theirs.name}, which a file has no name for")
            parts[found[0]][found[1]] = theirs
        for name, own in parts.items():
            first, is_stacked = own[0], len(own) > 1 or name.endswith("_exps.weight")
            shape = (len(own), *first.shape) if is_stacked else first.shape
            is_exact = self.architecture.is_exact(name, len(shape))
            dtype = np.dtype(np.float32) if is_exact else self.dtype
            yield Written(name, shape, tuple(own[i] for i in range(len(own))), dtype)


def library(where: Path) -> Any:
    """The package `gguf`. Raises InputMissing where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise not_installed("writing a GGUF", "gguf", "gguf", where=str(where)) from error
    return gguf


def _declare(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    kind = gguf.GGMLQuantizationType[STORED[dtype.name]]
    size = int(np.prod(shape)) * dtype.itemsize
    writer.add_tensor_info(name, shape, dtype, size, raw_dtype=kind)


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    """A setting in the type that llama.cpp reads it in."""
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    writer.add_key_value(key, value, kind[type(value)])
