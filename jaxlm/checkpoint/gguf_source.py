"""A GGUF read like a Hugging Face folder: same names, shapes and order of numbers. Free of JAX."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.checkpoint import gguf_config
from jaxlm.checkpoint.gguf_config import Architecture
from jaxlm.checkpoint.gguf_file import PLAIN, GGUFFile, TensorEntry
from jaxlm.checkpoint.hub_folder import damaged
from jaxlm.checkpoint.hub_tensors import Slices
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data.vocabularies import gguf_tokens

MAX_EXPERTS = 10_000  # of a layer; each becomes tensors of its own
# A table of rotary divisors; transformers keeps the settings that it is derived from.
FREQUENCIES = "rope_freqs.weight"


class TensorLocation(NamedTuple):
    """Location of a Hugging Face tensor: a tensor of the file, or one expert's part of it."""

    name: str
    entry: TensorEntry
    expert: int | None


class Gguf:
    """The model in one GGUF file.

    Raises InputMissing if there is no such file; DataError if the file is damaged, its architecture
    unknown, or a setting not understood.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        metadata, tensors = self._file.metadata, self._file.tensors
        self._architecture: Architecture = gguf_config.architecture(metadata, str(path))
        table = tensors.get("token_embd.weight")
        if table is None:
            why = f"none of its {len(tensors)} tensors is the embedding"
            what = "a GGUF has no token_embd.weight"
            raise DataError(what, where=str(path), why=why, fix="find . -name '*.gguf'")
        turned = tensors.get(FREQUENCIES)
        self.config = gguf_config.attributes(
            metadata,
            str(path),
            vocab=table.shape[0],
            is_tied="output.weight" not in tensors,
            frequencies=None if turned is None else self._file.rows(turned, slice(None))[0],
        )
        self._theirs = dict(self._named())
        tokenizer, settings = gguf_tokens.as_json(metadata, str(path))
        self._beside = {
            "config.json": _json(self.config),
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": _json(settings),
        }
        if ends := gguf_tokens.ends(metadata):
            self._beside["generation_config.json"] = _json({"eos_token_id": ends})

    def has(self, name: str) -> bool:
        """Return True if an equivalent folder would have the file."""
        return name in self._beside

    def read(self, name: str, largest: int) -> bytes:
        """Return the file of an equivalent folder. Raises InputMissing, DataError if too large."""
        if name not in self._beside:
            raise InputMissing(
                f"there is no {name} in a GGUF",
                where=str(self.path),
                why=f"a GGUF provides {', '.join(self._beside)}",
                fix="import the folder that the GGUF was converted from",
            )
        if (size := len(self._beside[name])) > largest:
            why = f"it has {size:,} bytes, and {largest:,} are allowed"
            raise damaged(f"{name} is too large", self.path, why, "file")
        return self._beside[name]

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in such a file."""
        return json.loads(self.read(name, 2**31))

    def files(self, others: Sequence[str]) -> list[Path]:
        """Return the file, which holds everything."""
        return [self.path]

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every tensor by HF name; quantized tensors are read as F32."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (
                each.entry.storage.name if each.entry.storage.name in PLAIN else "F32",
                each.entry.shape[each.expert is not None :],
            )
            for name, each in self._theirs.items()
        }
        return tensors | {
            self._architecture.theirs(name): (f"GGML's {kind}", shape)
            for name, (kind, shape) in self._file.unread.items()
        }

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str, Slices], np.ndarray]]:
        """Yield a function that reads a slice; only blocks that overlap it are dequantized."""
        yield self._fetch

    def _fetch(self, name: str, within: Slices) -> np.ndarray:
        gguf_name, entry, expert = self._theirs[name]
        if len(entry.shape) == 1:
            (values,) = self._file.rows(entry, slice(None))
            part = values[within[0]]
            return part - np.ones_like(part) if self._architecture.is_scale(gguf_name) else part
        rows, columns = within
        count = entry.shape[-2]
        places = np.arange(count)
        if (kind := self._architecture.rotated(gguf_name)) is not None:
            heads = self.config["num_attention_heads" if kind == "q" else "num_key_value_heads"]
            # Row (h, i, half) of the file is row (h, half, i) of transformers.
            places = places.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return self._file.rows(entry, places[rows] + count * (expert or 0), columns)

    def _named(self) -> Iterator[tuple[str, TensorLocation]]:
        for name, entry in self._file.tensors.items():
            theirs = self._architecture.theirs(name)
            if "{e}" in theirs and len(entry.shape) == 3 and entry.shape[0] <= MAX_EXPERTS:
                for expert in range(entry.shape[0]):
                    yield theirs.replace("{e}", str(expert)), TensorLocation(name, entry, expert)
            elif name != FREQUENCIES:
                yield theirs, TensorLocation(name, entry, None)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()
