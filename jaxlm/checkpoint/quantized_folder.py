"""Folders of quantized weights: compressed-tensors, GPTQ and AWQ. Free of JAX.

Each quantized matrix is read as codes, scales and zero points, or as the numbers they stand for.
Nothing is guessed: a layout that is not known is refused.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.checkpoint.hub_folder import DTYPES, Folder, damaged
from jaxlm.checkpoint.hub_tensors import Fetch, Slices
from jaxlm.core.errors import DataError

KEY = "quantization_config"
SCALES = tuple(DTYPES)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each of the eight numbers of a word
CODES, SCALE, ZERO = "codes", "scales", "zeros"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized")
FOUR_BITS = ("int4", "int4_zero", "w4a8")  # our formats with two codes a byte
LARGEST = 1e30  # of a scale: no sum of its products overflows float32
Header = dict[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A matrix as (codes - zeros) scales; row `groups[i]` of scales and zeros is that of input i.

    `codes` are [I, O] in uint8, int8 or float8, `scales` float32 [G, O], and `zeros` uint8 [G, O],
    or one number for all.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | int
    groups: np.ndarray

    def values(self) -> np.ndarray:
        """Return the numbers in float32, [O, I] as a torch Linear has them."""
        zeros = self.zeros
        zero = zeros if isinstance(zeros, int) else zeros.astype(np.float32)[self.groups]
        return ((self.codes.astype(np.float32) - np.float32(zero)) * self.scales[self.groups]).T


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A quantized matrix of a folder: its shape, and the format of ours that has the same bits.

    `base` is None if no format has them; `block` are the inputs that share a scale, or all.
    """

    name: str
    shape: tuple[int, int]  # outputs, inputs
    base: str | None
    block: int | str
    tensors: tuple[str, ...]  # of the folder
    read: Callable[[Fetch], Parts]

    def leaf(self, name: str, fetch: Fetch) -> np.ndarray:
        """Return codes, scales or zeros as `ops.weight_codes` has them, with outputs first."""
        parts = self.read(fetch)
        if name == SCALE:
            return parts.scales.T
        if name == ZERO:
            assert isinstance(parts.zeros, np.ndarray)
            return parts.zeros.T
        if self.base not in FOUR_BITS:
            return parts.codes.T
        return packed(parts.codes.T, 4, np.uint8)


def packed(codes: np.ndarray, bits: int, dtype: type = np.int32) -> np.ndarray:
    """Return unsigned codes [R, C] packed along the columns, the first in the lowest bits."""
    per_word = np.dtype(dtype).itemsize * 8 // bits
    padding = [(0, 0), (0, -codes.shape[1] % per_word)]
    filled: np.ndarray = np.pad(codes.astype(np.uint8), padding)
    if bits == 4:
        filled = filled[:, ::2] | (filled[:, 1::2] << 4)
    return np.ascontiguousarray(filled).view(np.dtype(dtype).newbyteorder("<"))


def unpacked(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Return `columns` unsigned codes of each row of words."""
    flat = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        flat = np.stack([flat & 15, flat >> 4], -1).reshape(len(words), -1)
    return flat[:, :columns]


class QuantizedFolder:
    """A folder whose quantized matrices are seen as float32; it is a `ModelSource`.

    A function of `opened` also reads NAME.weight_codes, NAME.weight_scales and NAME.weight_zeros.
    Raises DataError if the method, the format, or the tensors of a matrix are not as specified.
    """

    def __init__(self, folder: Folder):
        self.path = folder.path
        self.config = {name: value for name, value in folder.config.items() if name != KEY}
        self._folder = folder
        stored = folder.tensors()
        settings = QuantSettings(folder.config[KEY], folder.path)
        method = settings.choice("quant_method", METHODS)
        with folder.opened() as fetch:
            self.matrices = {
                f"{each.name}.weight": each for each in METHODS[method](settings, stored, fetch)
            }
        if not self.matrices:
            why = f"quant_method is {method!r}, and no tensor has its codes"
            raise damaged("the folder has no quantized matrix", folder.path, why)
        self.method = method
        groups = folder.config[KEY].get("config_groups") or {}
        self.rounds_inputs = any(each.get("input_activations") for each in groups.values())
        parts = {name for each in self.matrices.values() for name in each.tensors}
        self._tensors = {name: each for name, each in stored.items() if name not in parts}
        for name, each in self.matrices.items():
            if name in self._tensors:
                where = f"{folder.path}: {name}"
                raise damaged("a matrix is stored twice", where, "as numbers and as codes")
            self._tensors[name] = "F32", each.shape

    def has(self, name: str) -> bool:
        """Return True if the file exists."""
        return self._folder.has(name)

    def read(self, name: str, largest: int) -> bytes:
        """Read a file. Raises InputMissing, or DataError."""
        return self._folder.read(name, largest)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object; config.json is without its quantization."""
        return self.config if name == "config.json" else self._folder.read_json(name)

    def files(self, others: Sequence[str]) -> list[Path]:
        """Return the paths of all files that an import reads."""
        return self._folder.files(others)

    def tensors(self) -> Header:
        """Return dtype and shape of every tensor; a quantized matrix is float32."""
        return dict(self._tensors)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Fetch]:
        """Open the weights; yield a function that reads a slice of a tensor."""
        with self._folder.opened() as fetch:
            last: tuple[str, np.ndarray] = ("", np.empty(0))

            def read(name: str, within: Slices) -> np.ndarray:
                nonlocal last
                stem, _, leaf = name.rpartition("_")
                if name not in self.matrices and stem not in self.matrices:
                    return fetch(name, within)
                if last[0] != name:  # one matrix is in memory at a time
                    matrix = self.matrices[name if name in self.matrices else stem]
                    is_whole = name in self.matrices
                    last = (
                        name,
                        matrix.read(fetch).values() if is_whole else matrix.leaf(leaf, fetch),
                    )
                return last[1][within]

            yield read


def open_quantized(folder: Folder) -> Folder | QuantizedFolder:
    """Return the folder, with its matrices dequantized if its config.json has settings of codes."""
    settings = folder.config.get(KEY)
    if settings is None or (isinstance(settings, dict) and settings.get("quant_method") == "fp8"):
        return folder  # float8 in blocks is a matter of the model's family
    return QuantizedFolder(folder)


class QuantSettings:
    """The settings of a quantization, each checked when it is read."""

    def __init__(self, raw: Any, path: Path):
        self._raw, self.path = raw, path
        if not isinstance(raw, dict):
            raise self.refused(KEY, raw, "it must be an object")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a setting of a type. Raises DataError."""
        value = self._raw.get(name)
        value = default if value is None else value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refused(name, value, f"it must be of type {kind.__name__}")
        return value

    def choice(self, name: str, known: Any, default: Any = None) -> Any:
        """Return a setting that must be one of those known. Raises DataError."""
        value = self._raw.get(name, default)
        if isinstance(value, (list, dict, bool, float)) or value not in known:
            raise self.refused(name, value, f"known are {', '.join(map(str, known))}")
        return value

    def part(self, name: str) -> "QuantSettings":
        """Return the settings in an object."""
        return QuantSettings(self.get(name, dict, {}), self.path)

    def is_empty(self, *names: str) -> None:
        """Raise DataError if one of the settings has a value."""
        for name in names:
            if self._raw.get(name):
                raise self.refused(name, self._raw[name], "it changes the weights in other ways")

    def refused(self, name: str, value: Any, why: str) -> DataError:
        """Return the error for a setting that is not supported."""
        return DataError(
            f"{name} = {value!r:.60} is not supported",
            where=f"{self.path / 'config.json'}: {KEY}",
            why=why,
            fix="import the model that the folder was quantized from",
        )


@dataclasses.dataclass(frozen=True)
class Layer:
    """The tensors of one quantized module, by the ends of their names."""

    name: str
    path: Path
    stored: Header

    def shape(self, end: str, dtypes: Sequence[str], rank: int = 2) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises DataError if it is missing, or of another kind."""
        dtype, shape = self.stored.get(f"{self.name}.{end}", ("", ()))
        if not dtype:
            raise self.wrong(end, "the tensor is missing")
        if dtype not in dtypes:
            raise self.wrong(end, f"it is {dtype}, and must be {' or '.join(dtypes)}")
        if len(shape) != rank or 0 in shape:
            raise self.wrong(end, f"its shape is {list(shape)}, and must have {rank} dimensions")
        return shape

    def expect(self, end: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
        """Raise DataError if a tensor does not have the shape."""
        stored = self.shape(end, dtypes, len(shape))
        if stored != shape:
            raise self.wrong(end, f"its shape is {list(stored)}, and must be {list(shape)}")

    def read(self, end: str, fetch: Fetch) -> np.ndarray:
        """Return a tensor."""
        name = f"{self.name}.{end}"
        return fetch(name, tuple(slice(0, size) for size in self.stored[name][1]))

    def scales(self, end: str, fetch: Fetch) -> np.ndarray:
        """Return a tensor of scales in float32. Raises DataError if numbers of one overflow."""
        scales = self.read(end, fetch).astype(np.float32)
        if wrong := int((~(np.abs(scales) < LARGEST)).sum()):
            raise self.wrong(end, f"{wrong} of its scales are not finite, or {LARGEST:g} and more")
        return scales

    def has(self, end: str) -> bool:
        """Return True if the module has the tensor."""
        return f"{self.name}.{end}" in self.stored

    def names(self, *ends: str) -> tuple[str, ...]:
        """Return the names of those tensors that the module has."""
        return tuple(f"{self.name}.{end}" for end in ends if self.has(end))

    def wrong(self, end: str, why: str) -> DataError:
        """Return the error for a tensor that is not as specified."""
        return damaged("a quantized matrix is damaged", f"{self.path}: {self.name}.{end}", why)


def _layers(settings: QuantSettings, stored: Header, *ends: str) -> Iterator[Layer]:
    """Yield the modules that have a tensor with one of these ends."""
    names = (name.rpartition(".") for name in stored)
    for name in dict.fromkeys(stem for stem, _, end in names if end in ends):
        yield Layer(name, settings.path, stored)


def _groups(inputs: int, size: int) -> np.ndarray:
    return np.arange(inputs) // size


def _group_size(settings: QuantSettings, value: int) -> int:
    if value != -1 and not 0 < value <= 2**24:
        raise settings.refused("group_size", value, "it must be positive, or -1 for all inputs")
    return value


def _compressed(settings: QuantSettings, stored: Header, fetch: Fetch) -> Iterator[Matrix]:
    """Yield the matrices of the format of compressed-tensors."""
    settings.choice("quantization_status", ("compressed",))
    settings.is_empty("transform_config", "kv_cache_scheme")
    sparsity = settings.part("sparsity_config")
    sparsity.choice("format", ("dense",), "dense")
    groups = settings.get("config_groups", dict, {})
    first = next(iter(groups.values()), None)
    ways = ("weights", "input_activations", "format")
    if not isinstance(first, dict) or not all(
        isinstance(each, dict) and all(each.get(way) == first.get(way) for way in ways)
        for each in groups.values()
    ):
        why = "it must have groups, and all of them the same format"
        raise settings.refused("config_groups", sorted(groups), why)
    group = QuantSettings(first, settings.path)
    weights = group.part("weights")
    top = settings.choice("format", FORMATS)
    format = group.choice("format", FORMATS, top) if first.get("format") else top
    bits = weights.choice("num_bits", (8,) if format == "float-quantized" else (4, 8))
    weights.choice("type", ("float" if format == "float-quantized" else "int",), "int")
    strategy = weights.choice("strategy", ("channel", "group", "tensor"))
    size = _group_size(weights, weights.get("group_size", int, -1) if strategy == "group" else -1)
    is_symmetric = weights.get("symmetric", bool, True)
    inputs_ = first.get("input_activations")
    is_dynamic = isinstance(inputs_, dict) and (
        inputs_.get("dynamic") is True
        and inputs_.get("strategy") == "token"
        and (inputs_.get("num_bits"), inputs_.get("type", "int")) == (8, "int")
        and inputs_.get("symmetric", True) is True
    )
    codes_dtype = {"pack-quantized": "I32", "int-quantized": "I8", "float-quantized": "F8_E4M3"}
    for layer in _layers(settings, stored, "weight_scale", "weight_packed"):
        main = "weight_packed" if format == "pack-quantized" else "weight"
        if main not in (end for end in ("weight_packed", "weight") if layer.has(end)):
            raise layer.wrong(main, f"{format} stores codes in it, and the tensor is missing")
        outs, columns = layer.shape(main, (codes_dtype[format],))
        if format == "pack-quantized":
            layer.expect("weight_shape", ("I64", "I32"), (2,))
            shape = tuple(map(int, layer.read("weight_shape", fetch)))
            if shape[0] != outs or -(-shape[1] * bits // 32) != columns or shape[1] < 1:
                why = f"it is {list(shape)}, and {main} has the shape {[outs, columns]}"
                raise layer.wrong("weight_shape", why)
            inputs = shape[1]
        else:
            inputs = columns
        block = inputs if size == -1 else size
        count = -(-inputs // block)
        if strategy == "tensor":
            rank = len(layer.stored.get(f"{layer.name}.weight_scale", ("", (1,)))[1])
            layer.expect("weight_scale", SCALES, (1,) * rank)
        else:
            layer.expect("weight_scale", SCALES, (outs, count))
        if not is_symmetric:
            packed_zero = (-(-outs * bits // 32), count)
            if format == "pack-quantized":
                layer.expect("weight_zero_point", ("I32",), packed_zero)
            else:
                layer.expect("weight_zero_point", ("I8",), (outs, count))
        order = _order(layer, "weight_g_idx", inputs, count, fetch)
        is_grouped = order is None or np.array_equal(order, _groups(inputs, block))
        base = _compressed_base(format, bits, is_symmetric, is_dynamic, size == -1)
        is_ours = is_grouped and strategy != "tensor" and inputs % block == 0
        ends = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        yield Matrix(
            layer.name,
            (outs, inputs),
            base if is_ours else None,
            "all" if size == -1 else size,
            layer.names(*ends, "weight_g_idx", "input_scale", "input_zero_point"),
            _CompressedReader(layer, format, bits, block, is_symmetric, (outs, inputs), order),
        )


def _compressed_base(
    format: str, bits: int, is_symmetric: bool, is_dynamic: bool, is_whole: bool
) -> str | None:
    """Return the format of ours with the same numbers; `is_whole` is without groups."""
    if format == "float-quantized":
        return "fp8" if is_symmetric else None
    if bits == 4:
        if is_dynamic:
            return "w4a8" if is_symmetric and is_whole else None
        return "int4" if is_symmetric else "int4_zero"
    if not is_symmetric:
        return None
    return "w8a8" if is_dynamic else "int8"


@dataclasses.dataclass(frozen=True)
class _CompressedReader:
    """Reads a matrix of compressed-tensors."""

    layer: Layer
    format: str
    bits: int
    block: int
    is_symmetric: bool
    shape: tuple[int, int]
    order: np.ndarray | None

    def __call__(self, fetch: Fetch) -> Parts:
        layer, (outs, inputs) = self.layer, self.shape
        scales = layer.scales("weight_scale", fetch)
        scales = np.broadcast_to(
            scales.reshape(scales.shape if scales.ndim == 2 else (1, 1)),
            (outs, scales.shape[-1] if scales.ndim == 2 else 1),
        )
        groups = _groups(inputs, self.block) if self.order is None else self.order
        middle = 1 << (self.bits - 1)
        if self.format != "pack-quantized":
            codes = layer.read("weight", fetch).T
            if codes.dtype != np.int8 and not np.isfinite(codes.astype(np.float32)).all():
                raise layer.wrong("weight", "it has numbers that are not finite")
            zeros: np.ndarray | int = 0
            if not self.is_symmetric:
                zeros = layer.read("weight_zero_point", fetch).T
            if self.bits == 4:  # from -8 to 7, a byte each; ours begin at 0
                low, high = int(codes.min()), int(codes.max())
                if low < -middle or high >= middle:
                    why = f"it has codes from {low} to {high}, and those of 4 bits are from -8 to 7"
                    raise layer.wrong("weight", why)
                codes = (codes + np.int8(middle)).view(np.uint8)
                zeros = zeros + middle if isinstance(zeros, int) else _above(zeros, middle)
            return Parts(codes, scales.T, zeros, groups)
        codes = unpacked(layer.read("weight_packed", fetch), self.bits, inputs).T
        zeros = middle
        if not self.is_symmetric:
            words = layer.read("weight_zero_point", fetch).T
            zeros = unpacked(words, self.bits, outs)
        if self.bits == 8 and self.is_symmetric:  # our codes of a byte have a sign
            codes, zeros = (codes ^ 128).view(np.int8), 0
        return Parts(codes, scales.T, zeros, groups)


def _above(zeros: np.ndarray, middle: int) -> np.ndarray:
    return (zeros.astype(np.int16) + middle).astype(np.uint8)


def _order(layer: Layer, end: str, inputs: int, count: int, fetch: Fetch) -> np.ndarray | None:
    """Return the group of each input, or None without such a tensor. Raises DataError."""
    if not layer.has(end):
        return None
    layer.expect(end, ("I32", "I64"), (inputs,))
    order = layer.read(end, fetch)
    if order.min() < 0 or order.max() >= count:
        why = f"it names groups {order.min()} to {order.max()}, and there are {count}"
        raise layer.wrong(end, why)
    return order


def _gptq(settings: QuantSettings, stored: Header, fetch: Fetch) -> Iterator[Matrix]:
    """Yield the matrices of GPTQ's format: eight codes of 4 bits in a word, along the inputs."""
    bits = settings.choice("bits", (4, 8))
    size = _group_size(settings, settings.get("group_size", int))
    version = settings.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.is_empty("dynamic")
    per_word = 32 // bits
    for layer in _layers(settings, stored, "qweight", "qzeros", "g_idx"):
        rows, outs = layer.shape("qweight", ("I32",))
        inputs = rows * per_word
        block = inputs if size == -1 else size
        count = -(-inputs // block)
        if outs % per_word:
            raise layer.wrong("qweight", f"{outs} outputs do not fill words of {per_word}")
        layer.expect("scales", SCALES, (count, outs))
        layer.expect("qzeros", ("I32",), (count, outs // per_word))
        order = _order(layer, "g_idx", inputs, count, fetch)
        if order is None:
            raise layer.wrong("g_idx", "the tensor is missing, and it names each input's group")
        is_ours = bits == 4 and inputs % block == 0
        is_ours = is_ours and np.array_equal(order, _groups(inputs, block))
        reader = _GPTQReader(layer, bits, version == "gptq", (outs, inputs), order)
        is_ours = is_ours and bool((reader.zeros(fetch) < 16).all())
        yield Matrix(
            layer.name,
            (outs, inputs),
            "int4_zero" if is_ours else None,
            "all" if size == -1 else size,
            layer.names("qweight", "qzeros", "scales", "g_idx"),
            reader,
        )


@dataclasses.dataclass(frozen=True)
class _GPTQReader:
    """Reads a matrix of GPTQ; the first version stores each zero point less 1."""

    layer: Layer
    bits: int
    is_first: bool
    shape: tuple[int, int]
    order: np.ndarray

    def __call__(self, fetch: Fetch) -> Parts:
        codes = unpacked(self.layer.read("qweight", fetch).T, self.bits, self.shape[1]).T
        return Parts(codes, self.layer.scales("scales", fetch), self.zeros(fetch), self.order)

    def zeros(self, fetch: Fetch) -> np.ndarray:
        """Return the zero points, [G, O]."""
        zeros = unpacked(self.layer.read("qzeros", fetch), self.bits, self.shape[0])
        dtype = np.dtype(np.uint8 if self.bits == 4 else np.uint16)
        return zeros.astype(dtype) + np.array(self.is_first, dtype)


def _awq(settings: QuantSettings, stored: Header, fetch: Fetch) -> Iterator[Matrix]:
    """Yield the matrices of AWQ's format: eight codes of 4 bits in a word, along the outputs."""
    settings.choice("bits", (4,))
    size = _group_size(settings, settings.get("group_size", int))
    settings.choice("version", ("gemm", "GEMM"), "gemm")
    if not settings.get("zero_point", bool, True):
        raise settings.refused("zero_point", False, "the version gemm stores zero points")
    for layer in _layers(settings, stored, "qweight", "qzeros"):
        inputs, words = layer.shape("qweight", ("I32",))
        block = inputs if size == -1 else size
        count = -(-inputs // block)
        layer.expect("scales", SCALES, (count, words * 8))
        layer.expect("qzeros", ("I32",), (count, words))
        yield Matrix(
            layer.name,
            (words * 8, inputs),
            "int4_zero" if inputs % block == 0 else None,
            "all" if size == -1 else size,
            layer.names("qweight", "qzeros", "scales"),
            _AWQReader(layer, (words * 8, inputs), block),
        )


@dataclasses.dataclass(frozen=True)
class _AWQReader:
    """Reads a matrix of AWQ."""

    layer: Layer
    shape: tuple[int, int]
    block: int

    def __call__(self, fetch: Fetch) -> Parts:
        outs, inputs = self.shape
        places = np.argsort(AWQ_ORDER)
        codes, zeros = (
            unpacked(self.layer.read(end, fetch), 4, outs).reshape(-1, outs // 8, 8)[:, :, places]
            for end in ("qweight", "qzeros")
        )
        scales = self.layer.scales("scales", fetch)
        groups = _groups(inputs, self.block)
        return Parts(codes.reshape(-1, outs), scales, zeros.reshape(-1, outs), groups)


METHODS: dict[str, Callable[[QuantSettings, Header, Fetch], Iterator[Matrix]]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
