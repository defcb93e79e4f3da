"""Writer of GGUF, the file format of llama.cpp, tensor by tensor. Free of JAX."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlm.checkpoint import gguf_config
from jaxlm.checkpoint.gguf_blocks import BY_NAME, CodeSteps, dequantized, quantized, with_codes
from jaxlm.checkpoint.gguf_config import ARCHITECTURES, named_after
from jaxlm.checkpoint.gguf_file import PLAIN, Storage, library
from jaxlm.checkpoint.gguf_source import FREQUENCIES
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, round_to_dtype
from jaxlm.core.errors import EARLIER_STEP, DataError

# llama.cpp's numbers of the kinds of files.
FILE_TYPES = {
    "float32": 0, "float16": 1, "bfloat16": 32, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8,
    "q5_1": 9, "q4_k": 14, "q4_k_m": 15, "q6_k": 18,
}  # fmt: skip
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
QUANTIZATION_VERSION = 2
# Storage of matrices, and the storage that llama.cpp uses for rows that its blocks do not divide.
Scheme = Literal["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q4_k_m", "q6_k"]
OTHERWISE = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


class GGUFTensor(NamedTuple):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFTensor, ...]  # the experts in their order, or one tensor
    storage: Storage

    @property
    def dtype(self) -> np.dtype | None:
        """Return the dtype of its numbers; None if they are quantized."""
        return PLAIN.get(self.storage.name)


class GGUFPlan:
    """Contents of a GGUF of a model.

    Args:
      attributes: the model's config.json.
      tensors: the tensors of a Hugging Face folder.
      dtype: dtype of the matrices: float32, bfloat16 or float16.
      scheme: storage of the matrices whose rows its blocks divide; None for `dtype`.
      steps_of: of matrices that keep their codes, by the names of the folder; if there are any,
        they alone are in the storage of `scheme`, and all others in `dtype`.
      importance: of the inputs of matrices, by the names of the folder, as of `quantized`.

    Raises ValueError, with the reason, if llama.cpp lacks the architecture or one of its tensors,
    or the scheme fits no tensor.
    """

    def __init__(
        self,
        attributes: Mapping[str, Any],
        tensors: Sequence[HFTensor],
        dtype: np.dtype,
        scheme: Scheme | None = None,
        steps_of: Mapping[str, CodeSteps] = MappingProxyType({}),
        importance: Mapping[str, np.ndarray] = MappingProxyType({}),
    ):
        self.attributes = attributes
        name = named_after(attributes["model_type"])
        if name is None:
            known = ", ".join(sorted({each.model_type for each in ARCHITECTURES.values()}))
            raise ValueError(f"it is a {attributes['model_type']}; known are mistral, {known}")
        self.name, self.architecture, self.dtype = name, ARCHITECTURES[name], dtype
        self.scheme, self.steps_of, self.importance = scheme, steps_of, importance
        self.frequencies = gguf_config.frequencies(attributes)
        self.tensors = list(self._placed(tensors))
        if scheme and all(each.dtype for each in self.tensors):
            raise ValueError(f"no matrix has rows that the blocks of {scheme} divide")

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
        places: dict[str, list[tuple[HFTensor, MappedSlice, BlockEncoder]]] = defaultdict(list)
        for each in self.tensors:
            for theirs in each.parts:
                for part in theirs.parts:
                    if each.dtype is None:
                        encoder = self._encoder(theirs, each.storage)
                        places[part.path].append((theirs, part, encoder))
                    elif self.architecture.is_scale(each.name):
                        roundings[part.path] = rounded_scale
                    else:
                        roundings[part.path] = round_to_dtype(each.dtype)
        return roundings | {path: functools.partial(_stored, each) for path, each in places.items()}

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
        file cannot be written; DataError if a tensor cannot be quantized.
        """
        gguf = library("writing a GGUF", path)
        settings = {**self.metadata(), **tokenizer}
        writer = gguf.GGUFWriter(path, settings.pop("general.architecture"))
        try:
            writer.add_name(title)
            writer.add_file_type(FILE_TYPES[self.scheme or self.dtype.name])
            if self.scheme:
                writer.add_quantization_version(QUANTIZATION_VERSION)
            for key, value in settings.items():
                _add(gguf, writer, key, value)
            if self.frequencies is not None:
                _declare(gguf, writer, FREQUENCIES, self.frequencies.shape, BY_NAME["F32"])
            for each in self.tensors:
                _declare(gguf, writer, each.name, each.shape, each.storage)
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
        """Return a Hugging Face tensor in llama.cpp's order and scale convention, flat.

        Raises DataError if it cannot be quantized.
        """
        kind = self.architecture.rotated(tensor.name)
        encoder = self._encoder(theirs, tensor.storage)
        if kind is not None:
            heads = self.attributes["num_attention_heads" if kind == "q" else "num_key_value_heads"]

            def rotated(rows: np.ndarray) -> np.ndarray:
                split = rows.reshape(heads, 2, -1, *rows.shape[1:])
                return split.swapaxes(1, 2).reshape(rows.shape)

            array = rotated(array)
            if (steps := encoder.steps) is not None:
                zeros = None if steps.zeros is None else rotated(steps.zeros)
                encoder = encoder._replace(steps=CodeSteps(rotated(steps.scales), zeros))
        if self.architecture.is_scale(tensor.name):
            array = array.astype(np.float32) + 1
        if tensor.dtype is not None:
            return np.ascontiguousarray(array.astype(tensor.dtype)).reshape(-1)
        try:
            return encoder.encoded(array.reshape(-1, tensor.shape[-1])).reshape(-1)
        except ValueError as error:
            what = f"{theirs.name} cannot be stored in {tensor.storage.name}"
            raise DataError(what, where="--scheme", why=str(error), fix=EARLIER_STEP) from error

    def _encoder(self, theirs: HFTensor, storage: Storage) -> "BlockEncoder":
        return BlockEncoder(
            storage, self.steps_of.get(theirs.name), self.importance.get(theirs.name)
        )

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
            each_expert = tuple(experts[i] for i in range(len(experts)))
            storage = self._storage(name, shape, has_codes=first.name in self.steps_of)
            yield GGUFTensor(name, shape, each_expert, storage)

    def _storage(self, name: str, shape: tuple[int, ...], *, has_codes: bool) -> Storage:
        """Return the storage of a tensor: that of the scheme, or a finer one, as in llama.cpp."""
        if self.architecture.is_exact(name, len(shape)):
            return BY_NAME["F32"]
        plain = BY_NAME[STORED[self.dtype.name]]
        if self.scheme and has_codes:
            return BY_NAME[self.scheme.upper()]
        if self.scheme is None or self.steps_of:
            return plain
        is_output = name == "output.weight" or (
            name == "token_embd.weight" and self.attributes["tie_word_embeddings"]
        )
        is_finer = is_output or (self.scheme == "q4_k_m" and self._has_more_bits(name))
        finer = "Q8_0" if self.scheme == "q8_0" else "Q6_K"
        storage = BY_NAME[finer if is_finer else self.scheme.upper().removesuffix("_M")]
        while shape[-1] % storage.numbers:
            if storage.name not in OTHERWISE:
                return plain
            storage = BY_NAME[OTHERWISE[storage.name]]
        return storage

    def _has_more_bits(self, name: str) -> bool:
        """Return True if q4_k_m stores a matrix in Q6_K (`use_more_bits` of llama-quant.cpp)."""
        match = gguf_config.LAYER.fullmatch(name)
        if match is None or match[2] not in ("attn_v", "ffn_down", "ffn_down_exps"):
            return False
        layer, depth = int(match[1]), self.attributes["num_hidden_layers"]
        first = depth // 8
        return layer < first or layer >= 7 * depth // 8 or (layer - first) % 3 == 2


class BlockEncoder(NamedTuple):
    """Encoder of the rows of a matrix: with known codes, or by the importance of inputs."""

    storage: Storage
    steps: CodeSteps | None
    importance: np.ndarray | None

    def encoded(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of rows; raises ValueError, with the reason, if there are none."""
        if self.steps is not None:
            return with_codes(rows, self.steps, self.storage)
        return quantized(rows, self.storage, self.importance)


def _stored(places: Sequence[tuple[HFTensor, MappedSlice, BlockEncoder]], leaf: Any) -> np.ndarray:
    """Return a leaf as a reader of its quantized tensors gets it."""
    stored = np.array(leaf)
    for theirs, part, encoder in places:
        matrix, is_same = stored[part.lead].reshape(part.sizes), theirs.layout == "same"
        back = dequantized(encoder.encoded(matrix if is_same else matrix.T), encoder.storage)
        stored[part.lead] = (back if is_same else back.T).reshape(part.shape)
    return stored


def _declare(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], storage: Storage) -> None:
    kind = gguf.GGMLQuantizationType[storage.name]
    size = math.prod(shape) // storage.numbers * storage.bytes
    dtype = np.dtype(np.float32)  # not used, as the storage is named
    writer.add_tensor_info(name, shape, dtype, size, raw_dtype=kind)


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    """Add a setting with the type that llama.cpp expects."""
    kinds = gguf.GGUFValueType
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, kind[type(value)])
