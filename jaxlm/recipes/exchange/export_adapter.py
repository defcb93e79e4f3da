"""Export a run's adapter as a folder of PEFT: adapter_config.json and adapter_model.safetensors."""

import collections
import dataclasses
import fnmatch
import functools
import math
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint.hub_folder import write_json
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, layout
from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError, NotWritable, cannot_write
from jaxlm.core.hub import PREFIX as HUB_PREFIX
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.models.families.hub import uncomputed
from jaxlm.recipes.exchange import adapter_places, export_formats, virtual_tensors
from jaxlm.recipes.exchange.adapter_places import (
    IA3,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    AdapterPlace,
)
from jaxlm.recipes.exchange.export_model import check_has_format, check_new
from jaxlm.recipes.use import load
from jaxlm.training.rundir import imported_facts
from jaxlm.tune.config import FIRST, Dora, Ia3, Lora, PrefixTuning, PromptTuning

MERGED = "--to=hf    # with the adapter merged"
TASKS = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}


def export_adapter(
    workdir: Path,
    out: Path,
    *,
    dtype: export_formats.Dtype | None = None,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Write the adapter of a run as a folder that PEFT loads onto the exported base.

    If transformers has one map in place of several of ours (GPT-2's c_attn), PEFT's adapter has one
    A. Several A are stacked: the rank is their sum, B has a block for each, and alpha grows so that
    the scale stays. PiSSA's first A and B are stacked below the trained ones, with B negative, so
    that the adapter is one of the original base. Parts without an adapter get zeros in B, the norms
    of the base as magnitudes, and ones.

    Raises:
      CommandError: if the run has no adapter.
      ConfigError: if PEFT has no such adapter.

    Args:
      workdir: the run with the adapter.
      out: the new folder.
      dtype: of the tensors; None for float32.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    check_new(out)
    opened = load.load_run(workdir, is_merged=False, say=say, **selection)
    run, decoder = opened.run, opened.model.blueprint.config
    if not opened.model.base:
        raise CommandError(
            "the run has no adapter",
            where=f"--workdir={workdir}",
            why="its checkpoints have all weights (tune.name = full)",
            fix="--to=hf",
        )
    if not isinstance(run.tune, Lora | Ia3 | PrefixTuning | PromptTuning):
        raise ConfigError(
            "PEFT has no such adapter",
            where=f"tune.name = {run.tune.name}",
            why="its formats are those of lora, dora, ia3, prefix and prompt",
            fix=f"jaxlm generate --workdir={shlex.quote(str(workdir))} --prompt=Hello",
        )
    check_has_format(run)
    family = dataclasses.replace(run.model, vocab=decoder.vocab)
    if decoder.width_ratio != 1:
        why = f"mup.base_width divides its logits by {decoder.width_ratio:g}"
        raise uncomputed(family.HUB, why)
    family.to_hub()  # refuses a base that transformers does not compute
    tensors, leaves = layout(decoder, family.HUB), tree.leaves(opened.params)
    new = set(leaves) - set(tree.leaves(opened.model.stored.shapes))
    whole = set(leaves) - opened.model.base - new
    stacked: list[str] = []
    trained = [each for each in tensors if any(part.path in whole for part in each.parts)]
    # PEFT replaces a module whole: its other tensors, as the bias of a norm, are those of the base.
    modules_to_save = {_module(each) for each in trained}
    saved = [each for each in tensors if _module(each) in modules_to_save]
    if isinstance(run.tune, PrefixTuning | PromptTuning):
        generate = f"jaxlm generate --workdir={shlex.quote(str(workdir))} --prompt=Hello"
        _refuse_lost(tensors, set(), whole, is_tied=decoder.tied, fix=generate)
        settings, arrays = virtual_tensors.written(run.tune, decoder, leaves)
        prefix = virtual_tensors.PREFIX
    else:
        _refuse_lost(tensors, new, whole, is_tied=decoder.tied, fix=MERGED)
        modules = sorted(set(map(_module, tensors)))
        places = list(adapter_places.places(tensors).values())
        writer = _Writer(run.tune, leaves, new, places, modules)
        settings, arrays = writer.written()
        stacked, prefix = writer.stacked, PREFIX
        _refuse_adapted(saved, writer.adapted)
    for each in saved:
        arrays[f"{prefix}{each.name}"] = each.joined(
            lambda part: adapter_places.at(leaves[part.path], part)
        )
    settings["modules_to_save"] = sorted(modules_to_save) or None
    settings |= {
        "base_model_name_or_path": None,
        "inference_mode": True,
        "task_type": TASKS.get(run.architecture),
    } | _base(load.find_base(workdir, run, None, say))
    kind = export_formats.DTYPES[dtype or "float32"]
    template = chat_templates.of_folder(workdir / chat_templates.HUB)
    _write(out, settings, {name: array.astype(kind) for name, array in arrays.items()}, template)
    return {
        "out": str(out),
        "adapter": run.tune.name,
        "step": opened.step,
        "dtype": kind.name,
        "parameters": sum(array.size for array in arrays.values()),
        "tensors": len(arrays),
        "stacked": stacked,
    }


def _module(tensor: HFTensor) -> str:
    """Return the name of the module that has the tensor."""
    return tensor.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Settings and tensors of the adapted layers."""

    tune: Any
    leaves: Mapping[str, jax.Array]
    new: set[str]  # paths of the adapter's leaves
    places: list[AdapterPlace]
    modules: list[str]  # names of all modules with tensors

    @property
    def rank(self) -> int:
        """Rank of the adapter of the base: PiSSA's has the first A and B too."""
        return self.tune.rank * self.tune.terms

    @functools.cached_property
    def adapted(self) -> list[AdapterPlace]:
        """Linear maps with an adapter in a part."""
        first = "ia3" if isinstance(self.tune, Ia3) else "lora_a"
        return [
            place
            for place in self.places
            if any(adapter_places.leaf(part, first) in self.new for part in place.weight.parts)
        ]

    @functools.cached_property
    def stacked(self) -> list[str]:
        """Linear maps whose rank is a multiple of the run's."""
        if isinstance(self.tune, Ia3):
            return []
        return [place.name for place in self.adapted if len(self._inputs(place)) > 1]

    def written(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the settings of adapter_config.json, and the tensors by key."""
        adapted = [place.name for place in self.adapted]
        settings: dict[str, Any] = {
            "fan_in_fan_out": any(place.weight.layout == "same" for place in self.adapted),
            "target_modules": adapter_places.suffixes(adapted, self.modules),
        }
        if isinstance(self.tune, Ia3):
            vectors = {place: self._factors(place) for place in self.adapted}
            inputs = [place.name for place, array in vectors.items() if array.shape[0] == 1]
            settings |= {
                "feedforward_modules": adapter_places.suffixes(inputs, self.modules),
                "init_ia3_weights": True,
                "peft_type": "IA3",
            }
            return settings, {place.key(IA3): array for place, array in vectors.items()}
        arrays: dict[str, np.ndarray] = {}
        for place in self.adapted:
            arrays |= self._matrices(place)
        return settings | self._lora_settings(), arrays

    def _lora_settings(self) -> dict[str, Any]:
        counts = {place.name: len(self._inputs(place)) for place in self.adapted}
        (usual, _), *_ = collections.Counter(counts.values()).most_common(1)
        others: dict[str, int] = {}
        for count in sorted(set(counts.values()) - {usual}):
            same = [name for name in counts if counts[name] == count]
            others |= dict.fromkeys(adapter_places.suffixes(same, self.modules), count)

        def alpha(count: int) -> Any:
            growth = count * self.tune.terms
            growth = growth if self.tune.scale == "rank" else math.sqrt(growth)
            return adapter_places.as_written(self.tune.alpha * growth)

        return {
            "alpha_pattern": {name: alpha(count) for name, count in others.items()},
            "bias": "none",
            "init_lora_weights": True,
            "lora_alpha": alpha(usual),
            "lora_dropout": self.tune.dropout,
            "peft_type": "LORA",
            "r": self.rank * usual,
            "rank_pattern": {name: self.rank * count for name, count in others.items()},
            "use_dora": isinstance(self.tune, Dora),
            "use_rslora": self.tune.scale == "root",
        }

    def _leaf(self, part: MappedSlice, name: str) -> np.ndarray | None:
        path = adapter_places.leaf(part, name)
        return adapter_places.at(self.leaves[path], part) if path in self.new else None

    def _pair(self, part: MappedSlice) -> tuple[np.ndarray, np.ndarray] | None:
        """Return A and B as [inputs, rank] and [rank, outputs...]; PiSSA's first B is negative."""
        a, b = (self._leaf(part, name) for name in ("lora_a", "lora_b"))
        if a is None or b is None:
            return None
        if self.tune.terms > 1:
            first, after = (self._leaf(part, name) for name in FIRST)
            assert first is not None
            assert after is not None
            a, b = np.concatenate((a, first), -1), np.concatenate((b, -after), 0)
        return a.reshape(-1, self.rank), b

    def _inputs(self, place: AdapterPlace) -> list[np.ndarray]:
        """Return the A of a place, as [inputs, rank]: one if all are equal."""
        pairs = (self._pair(part) for part in place.weight.parts)
        each = [pair[0] for pair in pairs if pair is not None]
        return each[:1] if all(np.array_equal(a, each[0]) for a in each) else each

    def _matrices(self, place: AdapterPlace) -> dict[str, np.ndarray]:
        stack, rank = self._inputs(place), self.rank
        width, blocks = rank * len(stack), iter(range(len(stack)))

        def outputs(part: MappedSlice) -> np.ndarray:
            block = np.zeros(part.shape, np.float32)
            if (pair := self._pair(part)) is not None:
                first = rank * next(blocks) if len(stack) > 1 else 0
                block[first : first + rank] = pair[1]
            return block

        arrays = {
            place.key(LORA_A): np.concatenate(stack, 1).T,
            place.key(LORA_B): place.outputs(LORA_B, width).joined(outputs),
        }
        if isinstance(self.tune, Dora):
            arrays[place.key(MAGNITUDE)] = place.outputs(MAGNITUDE).joined(self._magnitude)
        return arrays

    def _magnitude(self, part: MappedSlice) -> np.ndarray:
        magnitude = self._leaf(part, "magnitude")
        if magnitude is not None:
            return magnitude
        weight = adapter_places.at(self.leaves[part.path], part)
        inputs = tuple(range(weight.ndim - len(part.shape)))
        return np.sqrt(np.square(weight).sum(inputs))

    def _factors(self, place: AdapterPlace) -> np.ndarray:
        """Return l as PEFT shapes it: [1, inputs] or [outputs, 1]."""
        vectors = [self._leaf(part, "ia3") for part in place.weight.parts]
        is_input = [
            each is not None and self._scales_inputs(part)
            for each, part in zip(vectors, place.weight.parts, strict=True)
        ]
        first = next(each for each in vectors if each is not None)
        if all(is_input) and all(
            np.array_equal(first, each) for each in vectors if each is not None
        ):
            return first.reshape(1, -1)
        if any(is_input):
            raise ConfigError(
                "PEFT has one factor for each input of a fused projection",
                where=f"tune.inputs: {place.name}",
                why="its parts have factors of their own: "
                + ", ".join(part.path for part in place.weight.parts),
                fix="--to=hf    # with the adapter merged",
            )
        remaining = iter(vectors)

        def factor(part: MappedSlice) -> np.ndarray:
            each = next(remaining)
            return np.ones(part.shape, np.float32) if each is None else each

        return place.outputs(IA3).joined(factor).reshape(-1, 1)

    def _scales_inputs(self, part: MappedSlice) -> bool:
        return any(fnmatch.fnmatchcase(part.path, pattern) for pattern in self.tune.inputs)


def _refuse_lost(
    tensors: list[HFTensor], new: set[str], whole: set[str], *, is_tied: bool, fix: str
) -> None:
    """Raise ConfigError if a trained leaf has no place in PEFT's folder."""
    named = {part.path.rpartition("/")[0] for each in tensors for part in each.parts}
    paths = {part.path for each in tensors for part in each.parts}
    lost = [path for path in sorted(new) if path.rpartition("/")[0] not in named]
    lost += sorted(whole - paths)
    if lost:
        raise _unsupported("tune.at", f"it has no name for {', '.join(lost[:3])}", fix)
    if is_tied and "embedding/table" in whole:
        raise _unsupported(
            "tune.also", "the embedding is tied to the head, and PEFT saves one", fix
        )


def _refuse_adapted(saved: list[HFTensor], adapted: list[AdapterPlace]) -> None:
    """Raise ConfigError if a module is adapted and trained whole."""
    names = {place.name for place in adapted}
    for each in saved:
        if _module(each) in names:
            raise _unsupported("tune.also", f"{each.name} is of an adapted module")


def _unsupported(where: str, why: str, fix: str = MERGED) -> ConfigError:
    return ConfigError(
        "PEFT cannot hold this adapter",
        where=where,
        why=why,
        fix=fix,
    )


def _base(source: load.InitSource) -> dict[str, Any]:
    """Return the name of the base: that on the Hugging Face Hub, or the run directory."""
    origin = imported_facts(source.workdir).get("source", "")
    if not origin.startswith(HUB_PREFIX):
        return {"base_model_name_or_path": str(source.workdir.absolute())}
    name, _, revision = origin.removeprefix(HUB_PREFIX).partition("@")
    return {"base_model_name_or_path": name, "revision": revision or None}


def _write(
    out: Path,
    settings: dict[str, Any],
    arrays: dict[str, np.ndarray],
    template: ChatTemplate | None,
) -> None:
    """Write the folder, with a chat template, as NAME.partial and rename it. Raises NotWritable."""
    from safetensors.numpy import save_file

    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_json(partial / adapter_places.CONFIG, settings)
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(arrays, str(partial / adapter_places.TENSORS), metadata={"format": "pt"})
        for name, content in (chat_templates.keep(template, partial) if template else {}).items():
            (partial / name).write_bytes(content)
        os.replace(partial, out)
    except OSError as error:
        raise cannot_write("the export", partial, error, fix="--out=another/place") from error
    except NotWritable:
        raise
    except Exception as error:  # the library has an error type of its own for a full disk
        raise NotWritable(
            f"{adapter_places.TENSORS} cannot be written",
            where=str(partial),
            why=f"{type(error).__name__}: {error}"[:300],
            fix="--out=another/place",
        ) from error
