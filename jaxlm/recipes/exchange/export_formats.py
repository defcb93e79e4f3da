"""Formats of an export: a Hugging Face folder, as of transformers, and a GGUF of llama.cpp."""

import dataclasses
import functools
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from jaxlm.checkpoint import gguf_config, hub_architecture, hub_digests
from jaxlm.checkpoint.gguf_blocks import CodeSteps, is_searched
from jaxlm.checkpoint.gguf_file import library
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.gguf_writer import GGUFPlan, Scheme
from jaxlm.checkpoint.hub_folder import ModelSource, write_json, write_tensors
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, layout, round_to_dtype
from jaxlm.checkpoint.quantized_folder import KEY
from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import chat_templates, tokenizer_json
from jaxlm.data.chat_tokenizer import ends as chat_ends
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.data.vocabularies import gguf_tokens
from jaxlm.data.vocabularies.gguf_tokens import PREFIX
from jaxlm.models.families.hub import IGNORED_ATTRIBUTES, uncomputed
from jaxlm.recipes.exchange import import_model, quantized_tensors, reward_head
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.training.rundir import read_json
from jaxlm.tune import surgery

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Dtype, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# Rounding that a format applies to each leaf, by path: a function of the leaf.
ExportedParams = Mapping[str, Callable[[jax.Array], jax.Array | np.ndarray]]
GENERATION_FILE = "generation_config.json"
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A loaded run to export: its model, its tensors under the names of transformers, its dtype."""

    opened: LoadedRun
    family: Any  # the model settings, with the rows of the embedding filled in
    tensors: list[HFTensor]
    dtype: np.dtype
    scheme: Scheme | None  # of a GGUF's matrices
    steps_of: Mapping[str, CodeSteps]  # of those that keep their codes, by name
    importance: Mapping[str, np.ndarray]  # of the inputs of matrices, by name
    workdir: Path
    shard_bytes: int
    say: Log

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of config.json, but those of the tokenizer."""
        hub = self.family.HUB
        known = self.family.to_hub() | {"architectures": [hub.architecture]}
        if self.opened.run.objective.has_reward_head:
            known |= reward_head.attributes(hub)
        return known | {"model_type": hub.model_type}

    @functools.cached_property
    def layers(self) -> quantized_tensors.Layers:
        """The quantized layers, by the paths of their weights."""
        return surgery.quantized_weights(self.opened.model.blueprint)

    @functools.cached_property
    def _leaves(self) -> dict[str, jax.Array]:
        return tree.leaves(self.opened.params)

    def array(self, tensor: HFTensor) -> np.ndarray:
        """Return a tensor of transformers in the run's dtype."""

        def leaf(part: MappedSlice) -> np.ndarray:
            leaf_array = self._leaves[part.path]
            return np.asarray(leaf_array[part.lead] if part.lead else leaf_array)

        return tensor.joined(leaf)


class HFExport:
    """config.json, safetensors, tokenizer, chat template, model card, and the sha256 of each file.

    Raises ConfigError if the tokenizer and the model use different padding ids.
    """

    def __init__(self, job: ExportJob):
        self._job = job
        self._attributes = _attributes(job)
        self._tensors: list[Any] = list(job.tensors)
        if job.layers:
            self._tensors, settings = quantized_tensors.file_tensors(job.tensors, job.layers)
            self._attributes |= {KEY: settings}

    def write(self, place: Path) -> int:
        """Write the folder; returns the number of tensor files. Raises OSError, NotWritable."""
        job = self._job
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write_json(place / "config.json", self._attributes)
        self._write_companions(place)
        size = job.shard_bytes
        files = write_tensors(place, self._tensors, self._array, job.dtype, shard_bytes=size)
        return len(set(files.values()))

    def _array(self, tensor: Any) -> np.ndarray:
        is_made = isinstance(tensor, quantized_tensors.FileTensor)
        return tensor.make(self._job.array) if is_made else self._job.array(tensor)

    def read(self, place: Path) -> ModelSource:
        """Open the written folder."""
        return quantized_tensors.open_exported(place)

    @property
    def held(self) -> ExportedParams:
        """Return the rounding of each leaf; some leaves are float32 in every folder."""
        tensors = quantized_tensors.leaf_tensors(self._job.tensors, self._job.layers)
        plain = {part.path for each in self._job.tensors for part in each.parts}
        return {
            part.path: round_to_dtype(each.file_dtype(self._job.dtype))
            if part.path in plain
            else lambda leaf: leaf
            for each in tensors
            for part in each.parts
        }

    def finish(self, place: Path, answer: dict[str, Any]) -> None:
        """Add the parity report, the model card and the digests."""
        write_json(place / "parity.json", answer["parity"])
        (place / "README.md").write_text(_card(answer, self._job.opened))
        hub_digests.write(place)

    def _write_companions(self, place: Path) -> None:
        """Write the tokenizer, files of an imported model, and generation_config.json."""
        tokenizer, known = self._job.opened.tokenizer, self._attributes
        ids = {name: known[name] for name in known if name in GENERATION}
        ids = {name: id_ for name, id_ in ids.items() if id_ is not None}
        folder = self._job.workdir / chat_templates.HUB
        ends = _ends(self._job.opened, self._job.workdir)
        if len(ends) > 1:
            ids["eos_token_id"] = list(ends)
        write_json(place / GENERATION_FILE, ids)
        for name in import_model.COMPANION_FILES:
            if name != "config.json" and (folder / name).is_file():
                shutil.copyfile(folder / name, place / name)
        if (folder / GENERATION_FILE).is_file() and ends != tokenizer.ends:
            came = read_json(folder, GENERATION_FILE)
            write_json(place / GENERATION_FILE, came | {"eos_token_id": list(ends)})
        if isinstance(tokenizer, ImportedTokenizer):
            return
        content = tokenizer_json.as_json(tokenizer)
        if content is None:
            names = "it uses jaxlm's names of special tokens"
            ids_start = "its ids start after jaxlm's special tokens"
            self._job.say(f"the tokenizer is not exported: {names}, and {ids_start}")
            return
        (place / "tokenizer.json").write_bytes(content)
        write_json(place / "tokenizer_config.json", tokenizer_json.settings(tokenizer))


def _ends(opened: LoadedRun, workdir: Path) -> tuple[int, ...]:
    """Return the ids that end a text of a run: those of turns too, if it trained on them."""
    template = chat_templates.of_folder(workdir / chat_templates.HUB)
    if template is None or not opened.run.data.has_chats:
        return opened.tokenizer.ends
    return chat_ends(opened.tokenizer, template)


def _attributes(job: ExportJob) -> dict[str, Any]:
    family, tokenizer, attributes = job.family, job.opened.tokenizer, job.attributes
    pad = attributes.get("pad_token_id", tokenizer.pad)
    if pad != tokenizer.pad and not isinstance(tokenizer, ImportedTokenizer):
        # transformers derives positions from the padding id.
        raise uncomputed(family.HUB, f"padding = {pad}, the tokenizer pads with {tokenizer.pad}")
    return attributes | {
        "torch_dtype": job.dtype.name,
        "bos_token_id": tokenizer.before[0] if tokenizer.before else None,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": pad,
    }


def _card(answer: dict[str, Any], opened: LoadedRun) -> str:
    run, parity = opened.run, answer["parity"]
    return f"""---
library_name: transformers
---
# {answer["architecture"]} by jaxlm

{answer["parameters"]:,} parameters, {answer["dtype"]}; step {answer["step"]} of a run
of {run.train.steps} steps of {run.tokens_per_step:,} tokens, sequence length {run.data.sequence},
seed {run.seed}, {run.optim.name} at {run.optim.lr:g}.

Read back after writing: on {parity["tokens"]} tokens of real text the logits differ by at most
{parity["largest_difference"]:.3g}; rounding to {parity["dtype"]} changed them
by {parity["largest_difference_by_rounding"]:.3g}.
"""


class GGUFExport:
    """A GGUF: matrices, float32 vectors, tokenizer and chat template; a parity report next to it.

    Raises ConfigError if llama.cpp does not support the model or the tokenizer.
    """

    def __init__(self, job: ExportJob):
        self._job = job
        contents = job.dtype, job.scheme, job.steps_of, job.importance
        self._plan = _gguf_plan(job.family, job.tensors, *contents)
        self._tokenizer = _gguf_tokens(job.opened, job.family.vocab, job.workdir)
        if (template := chat_templates.of_folder(job.workdir / chat_templates.HUB)) is not None:
            self._tokenizer["tokenizer.chat_template"] = template.source

    def write(self, place: Path) -> int:
        """Write the file; returns the number of files, 1. Raises OSError, DataError."""
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        title = self._job.workdir.resolve().name
        try:
            self._plan.write(place, self._job.array, self._tokenizer, title)
        except DataError:
            place.unlink()
            raise
        return 1

    def read(self, place: Path) -> Gguf:
        """Open the written file."""
        return Gguf(place)

    @property
    def held(self) -> ExportedParams:
        """Return the rounding of each leaf: vectors whole, matrices in the file's storage."""
        return self._plan.roundings()

    @property
    def storages(self) -> dict[str, int]:
        """Return the number of tensors in each storage format."""
        return dict(Counter(each.storage.name for each in self._plan.tensors))

    @property
    def by_importance(self) -> dict[str, bool]:
        """Return for each tensor in blocks, by name, if its scales are searched by importance."""
        known = self._job.importance
        return {
            each.name: is_searched(each.storage) and any(part.name in known for part in each.parts)
            for each in self._plan.tensors
            if each.dtype is None
        }

    def finish(self, place: Path, answer: dict[str, Any]) -> None:
        """Write the parity report next to the file."""
        write_json(Path(answer["out"]).with_suffix(".parity.json"), answer["parity"])


def check_gguf(opened: LoadedRun, family: Any, dtype: np.dtype, scheme: Scheme | None) -> None:
    """Check that a GGUF can hold a run; its weights are not read.

    Raises InputMissing without the gguf package, and ConfigError if llama.cpp does not support the
    model or the tokenizer.

    Args:
      opened: the run.
      family: the model settings, with the rows of the embedding filled in.
      dtype, scheme: as of `GGUFPlan`.
    """
    library("writing a GGUF", opened.workdir)
    _gguf_plan(family, layout(family.build(), family.HUB), dtype, scheme, {}, {})
    _gguf_tokens(opened, family.vocab, opened.workdir)


def _gguf_plan(
    family: Any,
    tensors: list[HFTensor],
    dtype: np.dtype,
    scheme: Scheme | None,
    steps_of: Mapping[str, CodeSteps],
    importance: Mapping[str, np.ndarray],
) -> GGUFPlan:
    """Return the contents of the file, see `GGUFPlan`. Raises ConfigError if it cannot hold them.

    Args:
      family: the model settings, with the rows of the embedding filled in.
      tensors, dtype, scheme, steps_of, importance: as of `GGUFPlan`.
    """
    attributes = family.to_hub() | {"model_type": family.HUB.model_type}
    try:
        plan = GGUFPlan(attributes, tensors, dtype, scheme, steps_of, importance)
    except ValueError as error:
        raise _unsupported(str(error)) from error
    _refuse_lost(attributes, plan)
    return plan


def _gguf_tokens(opened: LoadedRun, rows: int, workdir: Path) -> dict[str, Any]:
    """Return the settings of a run's tokenizer with ids below `rows`."""
    content = tokenizer_json.as_json(opened.tokenizer)
    if content is None:
        what = "the tokenizer cannot be written to a GGUF"
        why = "its ids start after jaxlm's special tokens; no tokenizer.json gives those ids"
        fix = "--to=hf    # a folder, without a tokenizer"
        raise ConfigError(what, where=str(workdir), why=why, fix=fix)
    named = _special_ids(opened.tokenizer, _ends(opened, workdir))
    return gguf_tokens.metadata(content, rows, str(workdir)) | named


def _refuse_lost(attributes: dict[str, Any], plan: GGUFPlan) -> None:
    """Raise ConfigError if the file cannot represent all attributes of the model."""
    try:
        back = hub_architecture.family_of(plan.read_back(), "GGUF").to_hub()
    except DataError as error:
        raise _unsupported(error.why) from error
    if plan.frequencies is not None:  # the file stores rope_scaling as these frequencies alone
        frequencies = gguf_config.frequencies(back)
        if frequencies is not None and np.allclose(frequencies, plan.frequencies, rtol=1e-5):
            back["rope_scaling"] = attributes["rope_scaling"]
    lost = [
        f"{name} = {attributes[name]!r} is read back as {back.get(name)!r}"
        for name in sorted(attributes.keys() - IGNORED_ATTRIBUTES)
        if attributes[name] != back.get(name)
    ]
    if lost:
        raise _unsupported("; ".join(lost))


def _special_ids(tokenizer: Tokenizer, ends: tuple[int, ...]) -> dict[str, Any]:
    """Return the ids that begin and end documents and answers, which are `ends`."""
    later = [id_ for id_ in ends if id_ != tokenizer.eos]
    ids = {
        "bos": tokenizer.before[0] if tokenizer.before else None,
        "eos": tokenizer.eos,
        "eot": later[0] if later else None,
        "eom": later[1] if later[1:] else None,
        "unknown": tokenizer.unk,
        "padding": tokenizer.pad,
    }
    known = {f"{PREFIX}{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None}
    flags = {"add_bos_token": bool(tokenizer.before), "add_eos_token": False}
    return known | {f"{PREFIX}{name}": flag for name, flag in flags.items()}


def _unsupported(why: str) -> ConfigError:
    fix = "--to=hf    # a transformers folder, which llama.cpp's converter may support"
    return ConfigError("a GGUF cannot hold this model", where="model", why=why, fix=fix)
