"""A model's folder as Hugging Face lays it out: config.json, tokenizer, and safetensors in one file or several. Free of JAX."""

import contextlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxlm.checkpoint.hub_tensors import HFTensor, Slices
from jaxlm.core.errors import DataError, InputMissing, NotWritable
from jaxlm.monitor import sinks

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
LARGEST_JSON = 64 * 2**20  # bytes; the largest index in use has a tenth of it
LARGEST_HEADER = 100 * 2**20  # bytes, the limit of the library
SHARD_BYTES = 4 * 2**30  # of a file that is written, at most, but for a tensor that is larger
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Source(Protocol):
    """A model with what came beside it, by the names that a folder of Hugging Face has."""

    path: Path
    config: dict[str, Any]

    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    def read(self, name: str, largest: int) -> bytes:
        """A file as it is. Raises InputMissing, and DataError where it is too large or lies elsewhere."""

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises InputMissing where it is not there, DataError where it is none."""

    def files(self, beside: Sequence[str]) -> list[Path]:
        """Where all that an import reads lies: those of these names that there are, and what holds the tensors."""

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of every tensor, by name."""

    def opened(self) -> contextlib.AbstractContextManager[Callable[[str, Slices], np.ndarray]]:
        """What reads a part of a tensor."""


class Folder:
    """A folder that is read: what tensors there are is known before any is read.

    Nothing in it is executed: no pickle is opened and no code imported. A file that it names must lie in it (or, in a
    cache of the Hub, in that model's part of the cache).

    Raises:
      InputMissing: where there is no folder, no config.json or no safetensors.
      DataError: where a file is damaged, too large, or lies elsewhere.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise InputMissing(
                f"there is no folder {path}",
                where="--from",
                why="a model is a folder with config.json and *.safetensors, or a file that ends in .gguf",
                fix="find . -name '*.safetensors'",
            )
        is_cached = path.resolve().parent.name == "snapshots"
        self._root = path.resolve().parent.parent if is_cached else path.resolve()
        self.config = self.read_json("config.json")
        self._files = self._tensors()

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises InputMissing where it is not there, DataError where it is none."""
        return parsed_object(self.read(name, LARGEST_JSON), str(self.path / name))

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).is_file()

    def read(self, name: str, largest: int) -> bytes:
        """A file as it is. Raises InputMissing, and DataError where it is too large or lies elsewhere."""
        path = self._inside(name)
        if not path.is_file():
            raise InputMissing(
                f"there is no {name} in the folder",
                where=str(self.path),
                why="save_pretrained writes config.json and *.safetensors",
                fix="find . -name '*.safetensors'",
            )
        if (size := path.stat().st_size) > largest:
            raise DataError(
                f"{name} is too large",
                where=str(path),
                why=f"it has {size:,} bytes, and {largest:,} are allowed",
                fix="fetch the folder again where it came from",
            )
        return path.read_bytes()

    def files(self, beside: Sequence[str]) -> list[Path]:
        """Where all that an import reads lies: those of these names that there are, and what holds the tensors."""
        ranks = sorted(path.name for path in self.path.glob("*.tiktoken"))
        weights = sorted({file for file, *_ in self._files.values()})
        there = [name for name in (*beside, INDEX) if self.has(name)]
        return [self._inside(name) for name in (*there, *ranks, *weights)]

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of every tensor, by name."""
        return {name: (dtype, shape) for name, (_, dtype, shape) in self._files.items()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str, Slices], np.ndarray]]:
        """What reads a part of a tensor; files are opened once each, and closed at the end."""
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            handles: dict[str, Any] = {}

            def fetch(name: str, within: Slices) -> np.ndarray:
                file, *_ = self._files[name]
                if file not in handles:
                    handles[file] = stack.enter_context(
                        safe_open(str(self._inside(file)), framework="numpy")
                    )
                return handles[file].get_slice(name)[within]

            yield fetch

    def _inside(self, name: str) -> Path:
        path = self.path / name
        try:
            is_inside = path.resolve().is_relative_to(self._root)
        except (OSError, ValueError):  # no name that a file can have
            is_inside = False
        if not is_inside:
            raise DataError(
                "a model's folder names a file that lies elsewhere",
                where=str(self.path),
                why=f"it names {name!r:.200}",
                fix="copy the file into the folder if it belongs there",
            )
        return path

    def _tensors(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """File, dtype and shape of every tensor, by name."""
        if self.has(INDEX):
            return self._indexed()
        found = sorted(path.name for path in self.path.glob("*.safetensors"))
        if WHOLE not in found and len(found) != 1:
            pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLES)
            raise InputMissing(
                f"there is no {WHOLE} in the folder",
                where=str(self.path),
                why=f"{', '.join(pickles[:3])} may hold code that would be run, and is not opened"
                if pickles
                else f"{len(found)} files of safetensors, and no {INDEX} that says which to read",
                fix="save it again as safetensors, with transformers: model.save_pretrained(folder)",
            )
        name = WHOLE if WHOLE in found else found[0]
        return {key: (name, *rest) for key, rest in self._header(name).items()}

    def _indexed(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        named = self.read_json(INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise DataError(
                f"{INDEX} has no weight_map of names to files",
                where=str(self.path / INDEX),
                why=f"weight_map is {str(named)[:80]!r}",
                fix="fetch the folder again where it came from",
            )
        headers = {file: self._header(file) for file in sorted(set(named.values()))}
        problems = []
        found: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        for file, header in headers.items():
            for key, rest in header.items():
                if key in found:
                    problems.append(f"{key} is in {found[key][0]} and in {file}")
                elif named.get(key) != file:
                    problems.append(f"{key} is in {file}, and the index says {named.get(key)}")
                found[key] = (file, *rest)
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
        return found

    def _header(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor of a file, checked by the library: sizes, overlaps, gaps, types."""
        from safetensors import SafetensorError, safe_open

        path = self._inside(name)
        try:
            self._refuse_large_header(path)
            with safe_open(str(path), framework="numpy") as file:
                parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                return {
                    key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()
                }
        except FileNotFoundError as error:
            raise InputMissing(
                f"there is no {name} in the folder",
                where=str(self.path),
                why=f"{INDEX} names it",
                fix="download the folder again",
            ) from error
        except (SafetensorError, ValueError, OSError) as error:
            raise DataError(
                f"{name} is not a whole file of safetensors",
                where=str(path),
                why=f"{type(error).__name__}: {error}"[:300],
                fix="download the file again",
            ) from error

    def _refuse_large_header(self, path: Path) -> None:
        with path.open("rb") as file:
            first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if size > min(LARGEST_HEADER, path.stat().st_size):
            raise ValueError(f"its header would have {size:,} bytes")


def parsed_object(content: bytes, where: str) -> dict[str, Any]:
    """What a JSON file holds. Raises DataError where it is no object."""
    try:
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{Path(where).name} is not a JSON object",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="fetch the folder again where it came from",
        ) from error
    return found


def write_tensors(
    folder: Path,
    tensors: Sequence[HFTensor],
    array: Callable[[HFTensor], np.ndarray],
    dtype: np.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Writes every tensor in `dtype`, or float32 where it is exact, in one file or, where they are more than `shard_bytes`, in several and an index.

    One file's tensors are in memory at a time. Returns the file of each tensor.

    Raises:
      NotWritable: where a file cannot be written.
    """
    from safetensors.numpy import save_file

    def size(tensor: HFTensor) -> int:
        return int(np.prod(tensor.shape)) * tensor.kept(dtype).itemsize

    groups = list(_groups(tensors, size, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WHOLE
        found = {
            each.name: np.ascontiguousarray(_cast(array(each), each.kept(dtype))) for each in group
        }
        try:
            save_file(found, str(folder / name), metadata={"format": "pt"})
        except Exception as error:  # the library raises its own for a full disk
            raise NotWritable(
                f"{name} cannot be written",
                where=str(folder / name),
                why=f"{type(error).__name__}: {error}"[:300],
                fix="--out=another/folder",
            ) from error
        weight_map |= dict.fromkeys(found, name)
    if len(groups) > 1:
        total = sum(map(size, tensors))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    return weight_map


def write_json(path: Path, value: Any) -> None:
    """A JSON file as transformers writes it. Raises NotWritable."""
    sinks.replace(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _groups(
    tensors: Iterable[HFTensor], bytes_of: Callable[[HFTensor], int], shard_bytes: int
) -> Iterator[list[HFTensor]]:
    group: list[HFTensor] = []
    total = 0
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
    """Return the array in another dtype; what lies beyond its range becomes infinite, which the export's comparison finds."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)
