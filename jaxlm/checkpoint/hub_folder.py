"""A model folder of Hugging Face: config.json, tokenizer, and safetensors files. Free of JAX."""

import contextlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxlm.checkpoint.hub_tensors import Slices
from jaxlm.core import hub
from jaxlm.core.errors import DataError, InputMissing, NotWritable
from jaxlm.monitor import sinks

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
MAX_JSON_BYTES = 64 * 2**20  # bytes; the largest published index has a tenth of it
MAX_HEADER_BYTES = 100 * 2**20  # bytes, the limit of the library
SHARD_BYTES = 4 * 2**30  # largest file written, unless one tensor is larger
DTYPES = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
RAW = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}  # without a dtype in the library for NumPy
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelSource(Protocol):
    """A model with its files, by the names that a Hugging Face folder has."""

    path: Path
    config: dict[str, Any]

    def has(self, name: str) -> bool:
        """Return True if the file exists."""

    def read(self, name: str, largest: int) -> bytes:
        """Read a file. Raises InputMissing, or DataError if too large or outside the folder."""

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object. Raises InputMissing, or DataError if the file holds none."""

    def files(self, others: Sequence[str]) -> list[Path]:
        """Return the paths of all files that an import reads: those named, and the weights."""

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every tensor, by name."""

    def opened(self) -> contextlib.AbstractContextManager[Callable[[str, Slices], np.ndarray]]:
        """Open the weights; yield a function that reads a slice of a tensor."""


class Folder:
    """A local model folder; the tensors are listed before any is read.

    Nothing in it is executed: no pickle is opened and no code imported. A file that it names must
    be inside the folder (in a Hugging Face cache: inside that model's part of the cache). Raises
    InputMissing if there is no folder, no config.json or no safetensors; DataError if a file is
    damaged, too large, or outside the folder.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            why = "a model is a folder with config.json and *.safetensors, or a .gguf file"
            what, fix = f"there is no folder {path}", "find . -name '*.safetensors'"
            if name := hub.guessed_name(str(path)):
                why = f"{why}; a model of the Hugging Face Hub begins with {hub.PREFIX}"
                fix = f"--from={name}\n{fix}    # or a local one"
            raise InputMissing(what, where="--from", why=why, fix=fix)
        is_cached = path.resolve().parent.name == "snapshots"
        self._root = path.resolve().parent.parent if is_cached else path.resolve()
        self.config = self.read_json("config.json")
        self._files = self._tensors()

    def read_json(self, name: str) -> dict[str, Any]:
        return parsed_object(self.read(name, MAX_JSON_BYTES), str(self.path / name))

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str, largest: int) -> bytes:
        path = self._inside(name)
        if not path.is_file():
            why = "save_pretrained writes config.json and *.safetensors"
            where = str(self.path)
            what = f"there is no {name} in the folder"
            raise InputMissing(what, where=where, why=why, fix="find . -name '*.safetensors'")
        if (size := path.stat().st_size) > largest:
            why = f"it has {size:,} bytes, and {largest:,} are allowed"
            raise damaged(f"{name} is too large", path, why)
        return path.read_bytes()

    def files(self, others: Sequence[str]) -> list[Path]:
        ranks = sorted(path.name for path in self.path.glob("*.tiktoken"))
        weights = sorted({file for file, *_ in self._files.values()})
        existing = [name for name in (*others, INDEX) if self.has(name)]
        return [self._inside(name) for name in (*existing, *ranks, *weights)]

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (dtype, shape) for name, (_, dtype, shape) in self._files.items()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str, Slices], np.ndarray]]:
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            handles: dict[str, Any] = {}

            def fetch(name: str, within: Slices) -> np.ndarray:
                file, dtype, shape = self._files[name]
                if dtype in RAW:
                    return _raw(self._inside(file), name, RAW[dtype], shape)[within]
                if file not in handles:
                    opened = safe_open(str(self._inside(file)), framework="numpy")
                    handles[file] = stack.enter_context(opened)
                return handles[file].get_slice(name)[within]

            yield fetch

    def _inside(self, name: str) -> Path:
        path = self.path / name
        try:
            is_inside = path.resolve().is_relative_to(self._root)
        except (OSError, ValueError):  # not a valid file name
            is_inside = False
        if not is_inside:
            raise DataError(
                "a model's folder names a file outside the folder",
                where=str(self.path),
                why=f"it names {name!r:.200}",
                fix="copy the file into the folder if it belongs there",
            )
        return path

    def _tensors(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Return file, dtype and shape of every tensor, by name."""
        if self.has(INDEX):
            return self._indexed()
        names = sorted(path.name for path in self.path.glob("*.safetensors"))
        if WHOLE not in names and len(names) != 1:
            pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLES)
            raise InputMissing(
                f"there is no {WHOLE} in the folder",
                where=str(self.path),
                why=f"{', '.join(pickles[:3])} may hold code that would be run, and is not opened"
                if pickles
                else f"{len(names)} safetensors files, and no {INDEX} that lists them",
                fix="save it as safetensors with transformers: model.save_pretrained(folder)",
            )
        name = WHOLE if WHOLE in names else names[0]
        return {key: (name, *rest) for key, rest in self._header(name).items()}

    def _indexed(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        named = self.read_json(INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            why = f"weight_map is {str(named)[:80]!r}"
            raise damaged(f"{INDEX} has no weight_map of names to files", self.path / INDEX, why)
        headers = {file: self._header(file) for file in sorted(set(named.values()))}
        problems, locations = [], {}  # type: list[str], dict[str, tuple[str, str, tuple[int, ...]]]
        for file, header in headers.items():
            for key, rest in header.items():
                if key in locations:
                    problems.append(f"{key} is in {locations[key][0]} and in {file}")
                elif named.get(key) != file:
                    problems.append(f"{key} is in {file}, but the index names {named.get(key)}")
                locations[key] = (file, *rest)
        problems += [
            f"{key} is not in {file}" for key, file in named.items() if key not in headers[file]
        ]
        if problems:
            raise DataError(
                f"{INDEX} does not match its files in {len(problems)} tensors",
                where=str(self.path / INDEX),
                why="each tensor must be in the file that it is listed for, and in no other",
                every=problems,
                fix="download the folder again",
            )
        return locations

    def _header(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each tensor; the library checks sizes, overlaps, gaps."""
        from safetensors import SafetensorError, safe_open

        path = self._inside(name)
        try:
            self._refuse_large_header(path)
            with safe_open(str(path), framework="numpy") as file:
                parts = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118
                return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts}
        except FileNotFoundError as error:
            what = f"there is no {name} in the folder"
            raise InputMissing(
                what, where=str(self.path), why=f"{INDEX} names it", fix="download the folder again"
            ) from error
        except (SafetensorError, ValueError, OSError) as error:
            what, why = (
                f"{name} is not a complete safetensors file",
                f"{type(error).__name__}: {error}",
            )
            raise damaged(what, path, why[:300], "file") from error

    def _refuse_large_header(self, path: Path) -> None:
        with path.open("rb") as file:
            first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if size > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise ValueError(f"its header claims {size:,} bytes")


def _raw(path: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of a file whose header the library has checked."""
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        first, _ = json.loads(file.read(size))[name]["data_offsets"]
    return np.memmap(path, dtype, "r", offset=8 + size + first, shape=shape)


def parsed_object(content: bytes, where: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises DataError if the file holds none."""
    try:
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise damaged(f"{Path(where).name} is not a JSON object", where, why) from error
    return value


def damaged(what: str, where: Path | str, why: str, part: str = "folder") -> DataError:
    """Return the error for a file of a model that must be fetched again."""
    return DataError(what, where=str(where), why=why, fix=f"fetch the {part} again from its origin")


def write_tensors(
    folder: Path,
    tensors: Sequence[Any],
    array: Callable[[Any], np.ndarray],
    dtype: np.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write every tensor in `dtype`, or in float32 if it must be exact, and return each one's file.

    One file is written, or several and an index above `shard_bytes`. One file's tensors are in
    memory at a time.

    Args:
      folder, tensors: folder to write to, and the tensors of the model: each has a name, a shape
        and a `file_dtype`, as `HFTensor` has.
      array: returns the numbers of a tensor.
      dtype: dtype of the tensors that need not be exact.
      shard_bytes: largest file, unless one tensor is larger.

    Raises NotWritable if a file cannot be written.
    """
    from safetensors.numpy import save_file

    def size(tensor: Any) -> int:
        return int(np.prod(tensor.shape)) * tensor.file_dtype(dtype).itemsize

    groups = list(_groups(tensors, size, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WHOLE
        arrays = {each.name: _cast(array(each), each.file_dtype(dtype)) for each in group}
        try:
            save_file(arrays, str(folder / name), metadata={"format": "pt"})
        except Exception as error:  # the library has an error type of its own for a full disk
            why, fix = f"{type(error).__name__}: {error}"[:300], "--out=another/folder"
            raise NotWritable(
                f"{name} cannot be written", where=str(folder / name), why=why, fix=fix
            ) from error
        weight_map |= dict.fromkeys(arrays, name)
    if len(groups) > 1:
        metadata = {"total_size": sum(map(size, tensors))}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return weight_map


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as transformers formats it. Raises NotWritable."""
    sinks.replace(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _groups(
    tensors: Iterable[Any], bytes_of: Callable[[Any], int], shard_bytes: int
) -> Iterator[list[Any]]:
    group, total = [], 0  # type: list[Any], int
    for each in tensors:
        size = bytes_of(each)
        if group and total + size > shard_bytes:
            yield group
            group, total = [], 0
        group.append(each)
        total += size
    if group:
        yield group


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast an array; overflow becomes infinity, which the comparison after an export detects."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array.astype(dtype))
