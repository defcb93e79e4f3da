"""Virtual tokens in PEFT's folder: one tensor, with a row for each token.

The row of a prompt is its embedding. That of a prefix has the keys of layer 0, its values, the keys
of layer 1 and so on, each with its heads in order; the keys are those after norm and rotation.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint.hub_folder import DTYPES, Folder
from jaxlm.checkpoint.hub_tensors import HFTensor
from jaxlm.core.errors import DataError
from jaxlm.models.config import ModelConfig
from jaxlm.models.cost.tensors import layer_tensors
from jaxlm.models.families.hub import Attributes
from jaxlm.recipes.exchange import adapter_places
from jaxlm.recipes.exchange.adapter_places import TENSORS
from jaxlm.tune.config import PrefixTuning, PromptTuning

KEY = "prompt_embeddings"
PREFIX = "base_model."  # of the keys of modules that are saved whole
ROWS = "virtual/rows"
KINDS = {"PREFIX_TUNING": "prefix", "PROMPT_TUNING": "prompt"}
# Fields of how the tensor began, or was made while PEFT trained it.
IGNORED = """
    auto_mapping base_model_name_or_path revision task_type inference_mode peft_version
    encoder_hidden_size init_weights prefix_projection prompt_tuning_init prompt_tuning_init_text
    tokenizer_kwargs tokenizer_name_or_path
""".split()


def written(
    tune: PrefixTuning | PromptTuning, decoder: ModelConfig, leaves: Mapping[str, jax.Array]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the settings of adapter_config.json, and the tensor by its key."""
    attention = decoder.layers[0].attention
    settings: dict[str, Any] = {
        "num_attention_heads": attention.heads,
        "num_layers": decoder.depth,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": tune.length,
        "peft_type": next(kind for kind, name in KINDS.items() if name == tune.name),
        "token_dim": decoder.width,
    }
    if not isinstance(tune, PrefixTuning):
        settings |= {"prompt_tuning_init": "RANDOM"}
        return settings, {KEY: np.asarray(leaves[ROWS], np.float32)}
    heads, size, _ = attention.cached  # of every layer: no family has other ones
    settings |= {
        "encoder_hidden_size": heads * size,
        "num_attention_heads": heads,
        "prefix_projection": False,
        "token_dim": heads * size,
    }
    parts = [
        np.asarray(leaves[path] if row is None else leaves[path][row], np.float32)
        for path, row in prefix_leaves(decoder)
    ]
    return settings, {KEY: np.stack(parts, 1).reshape(tune.length, -1)}


def prefix_leaves(decoder: ModelConfig) -> list[tuple[str, int | None]]:
    """Return path and row of keys and values of each layer in turn, as a prefix has them."""
    places = {
        (each.layer, name): (f"{each.path.removesuffix(f'{name}/weight')}leading/{name}s", each.row)
        for each in layer_tensors(decoder)
        for name in ("key", "value")
        if each.layer is not None and each.path.endswith(f"/attention/{name}/weight")
    }
    pairs = itertools.product(range(decoder.depth), ("key", "value"))
    return [places[layer, name] for layer, name in pairs if (layer, name) in places]


class VirtualContents:
    """The tensor of a PEFT folder with virtual tokens, and the leaves that it is for.

    Raises DataError with each field of adapter_config.json that is unknown or not supported.

    Args:
      folder: the folder.
      settings: its adapter_config.json.
      where: path of that file, for errors.
      decoder: the base.
      tensors: tensors of the base.
    """

    absent = 0  # layers without virtual tokens

    def __init__(
        self,
        folder: Folder,
        settings: Mapping[str, Any],
        where: str,
        decoder: ModelConfig,
        tensors: Iterable[HFTensor],
    ):
        fields = Attributes(settings, where, what="an adapter_config.json")
        self.name = fields.choose("peft_type", KINDS, "PREFIX_TUNING")
        self.length: int = fields.get("num_virtual_tokens")
        fields.ignore(*IGNORED, "token_dim", "num_attention_heads", "num_layers")
        fields.expect("num_transformer_submodules", 1, None)
        self._saved = fields.get("modules_to_save", [], kind=list)
        fields.check()
        self._folder, self._decoder = folder, decoder
        keys = folder.tensors().keys()
        self._whole = adapter_places.saved_whole(tensors, keys, self._saved, PREFIX)

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every tensor by key."""
        with self._folder.opened() as fetch:
            return {
                key: fetch(key, tuple(slice(0, size) for size in shape))
                for key, shape in self._expected.items()
            }

    @property
    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the keys that the file must have."""
        return {KEY: self._shape} | {key: each.shape for key, each in self._whole.items()}

    @property
    def _shape(self) -> tuple[int, int]:
        """Shape of the tensor, from the base."""
        if self.name == "prompt":
            return self.length, self._decoder.width
        cached = (layer.attention.cached for layer in self._decoder.layers)
        return self.length, sum(heads * (key + value) for heads, key, value in cached)

    def check(self, fix: str) -> None:
        """Raise DataError with each key that is unknown, missing, or of another shape or dtype.

        `fix` is that of the error.
        """
        stored, expected = self._folder.tensors(), self._expected
        problems = [f"unexpected  {key}" for key in sorted(stored.keys() - expected.keys())]
        for key, want in expected.items():
            if key not in stored:
                problems.append(f"missing     {key} {list(want)}")
                continue
            dtype, shape = stored[key]
            if shape != want:
                problems.append(f"shape       {key}: got {list(shape)}, want {list(want)}")
            if dtype not in DTYPES:
                problems.append(f"dtype       {key}: got {dtype}, want {', '.join(DTYPES)}")
        problems += adapter_places.not_saved(self._whole, self._saved)
        if problems:
            raise DataError(
                f"{len(problems)} tensors of the adapter do not fit the base",
                where=str(self._folder.path / TENSORS),
                why="a row has the width of the base, or keys and values of all its layers",
                every=problems,
                fix=fix,
            )

    def tune(self, *, is_tied: bool) -> dict[str, Any]:
        """Return the tune section of the run's config. Raises DataError for a tied embedding."""
        whole = adapter_places.whole_paths(
            self._whole,
            is_tied=is_tied,
            folder=self._folder.path,
            fix="train it with PEFT without the embedding in modules_to_save",
        )
        return {"name": self.name, "length": self.length, "also": whole}

    def leaves(self, initial: Mapping[str, jax.Array], tune: Any) -> dict[str, np.ndarray]:
        """Return the trained leaves."""
        del tune
        leaves = {path: np.array(leaf, np.float32) for path, leaf in initial.items()}
        adapter_places.write_whole(leaves, self._whole, self.arrays)
        rows = self.arrays[KEY].astype(np.float32)
        if self.name == "prompt":
            return leaves | {ROWS: rows}
        first = 0
        for path, row in prefix_leaves(self._decoder):
            leaf = leaves[path] if row is None else leaves[path][row]
            size = leaf[0].size
            leaf[...] = rows[:, first : first + size].reshape(leaf.shape)
            first += size
        return leaves
