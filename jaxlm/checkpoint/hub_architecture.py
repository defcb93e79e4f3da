"""The architecture of a Hugging Face folder, from its config.json, and the tensors to read."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from jaxlm.checkpoint.hub_folder import DTYPES, ModelSource
from jaxlm.checkpoint.hub_tensors import Fetch, HFTensor
from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.models.families.hub import Attributes, Hub, WrapperConfig
from jaxlm.models.families.union import Family

ARMS = {arm.HUB.model_type: arm for arm in get_args(Family)}
PARTS = {arm.HUB.wrapper.model_type: arm for arm in get_args(Family) if arm.HUB.wrapper}


def read_family(folder: ModelSource, say: Log) -> tuple[Any, str]:
    """Return the family with its sizes, and the dtype of the matrices (float32 if they differ).

    Raises DataError if the family is unknown or an attribute is not understood.
    """
    raw = folder.config
    family = family_of(raw, str(folder.path / "config.json"))
    if raw.get("auto_map"):
        ran = "which is never run: the model is built from jaxlm's own modules"
        say(f"the folder contains code (auto_map), {ran}")
    matrix_dtypes = {dtype for dtype, shape in folder.tensors().values() if len(shape) > 1}
    stored = matrix_dtypes & DTYPES.keys()  # GPT-2 also stores masks of bytes
    dtype = DTYPES.get("".join(stored), DTYPES["F32"]).name
    claimed = raw.get("dtype") or raw.get("torch_dtype") or dtype
    if claimed != dtype:
        text = f"config.json declares {claimed!r:.40}, but the matrices are"
        say(f"{text} {' and '.join(sorted(stored))}: an export will be in {dtype}")
    return family, dtype


def family_of(raw: dict[str, Any], where: str) -> Any:
    """Return the family that a config.json describes, validated. Raises DataError."""
    kind, known = raw.get("model_type"), ARMS | PARTS
    if not isinstance(kind, str) or kind not in known:
        what, why = f"model type {kind!r:.60} is not known", f"known are {', '.join(sorted(known))}"
        raise DataError(what, where=where, why=why, fix="import a model of one of these types")
    arm = known[kind]
    attributes = _part(raw, arm.HUB.wrapper, where) if kind in PARTS else Attributes(raw, where)
    family = arm.from_hub(attributes)
    attributes.check()
    return config.from_json(arm, config.to_json(family), where=where)


def _part(raw: dict[str, Any], whole: WrapperConfig, where: str) -> Attributes:
    """Return the attributes of the text model in a multimodal config. Raises DataError."""
    outer = Attributes(raw, where)
    part = outer.get(whole.attribute, kind=dict)
    outer.expect("tie_word_embeddings", True)
    outer.ignore(*whole.ignored_attributes)
    outer.check()
    return Attributes({**whole.defaults, **part}, where)


def in_folder_names(tensors: list[HFTensor], folder: ModelSource, hub: Hub) -> list[HFTensor]:
    """Return the tensors under the names that the folder uses."""
    name = namer(folder, hub)
    return [dataclasses.replace(each, name=name(each.name)) for each in tensors]


def namer(folder: ModelSource, hub: Hub) -> Callable[[str], str]:
    """Return a function from a standard name to the folder's name.

    The folder may use an older name, omit the optional prefix, or hold a larger model.
    """
    names = folder.tensors()
    whole = hub.wrapper_of(folder.config)
    is_short = whole is None and not any(name.startswith(hub.optional_prefix) for name in names)
    pairs = () if whole is None else whole.prefixes
    matches = (pair for pair in pairs if any(name.startswith(pair[1]) for name in names))
    prefix, their_prefix = next(matches, ("", ""))

    def name(ours: str) -> str:
        ours = ours.removeprefix(hub.optional_prefix) if is_short else ours
        if ours.startswith(prefix):
            ours = their_prefix + ours.removeprefix(prefix)
        for old, new in hub.old_suffixes:
            if ours not in names and ours.endswith(new):
                ours = ours.removesuffix(new) + old
        return ours

    return name


def compare(tensors: list[HFTensor], folder: ModelSource, hub: Hub, *, is_tied: bool) -> list[str]:
    """Compare the tensors with the folder's; return names of the folder that need not be read.

    Raises DataError, listing all tensors that are missing, left over, or of another shape or dtype.
    """
    stored, expected = folder.tensors(), {each.name: each.shape for each in tensors}
    derived = (*hub.buffer_suffixes, hub.head_name) if is_tied else hub.buffer_suffixes
    left = stored.keys() - expected.keys()
    whole = hub.wrapper_of(folder.config)
    outside = whole.other_prefixes if whole else ()
    others = (*hub.ignored_prefixes, *hub.mtp_prefixes(folder.config), *outside)
    ignored = sorted(name for name in left if name.endswith(derived) or name.startswith(others))
    missing = (name for name in expected if name not in stored)
    problems = [f"missing     {name} {list(expected[name])}" for name in missing]
    problems += [f"unexpected  {name}" for name in sorted(left - set(ignored))]
    for name, shape in expected.items():
        dtype, stored_shape = stored.get(name, ("F32", shape))
        if stored_shape != shape:
            problems.append(f"shape       {name}: got {list(stored_shape)}, want {list(shape)}")
        if dtype not in DTYPES:
            problems.append(f"dtype       {name}: got {dtype}, want {', '.join(DTYPES)}")
    if problems:
        raise DataError(
            f"{len(problems)} tensors of the folder do not match its config.json",
            where=str(folder.path),
            why="the folder must hold every tensor of the model, with its shape, and no other",
            every=problems,
            fix="fetch the folder again from its origin\nsave it again with transformers",
        )
    return ignored


def log_ignored(ignored: list[str], folder: ModelSource, hub: Hub, say: Log) -> None:
    """Log every tensor that was not read, and why; count those of unsupported layers and parts."""
    whole = hub.wrapper_of(folder.config)
    mtp = f"a multi-token prediction layer, which {hub.architecture} does not compute"
    heads = f"{mtp}; objective.name=mtp trains such heads from scratch"
    outside = f"which is outside {hub.architecture}, the text model"
    parts = dict.fromkeys(hub.mtp_prefixes(folder.config), heads)
    parts |= dict.fromkeys(whole.other_prefixes if whole else (), outside)
    for part, why in parts.items():
        if count := sum(name.startswith(part) for name in ignored):
            say(f"not read: {count} tensors of {part}*, {why}")
    for name in ignored:
        if not name.startswith(tuple(parts)):
            is_other = name.startswith(hub.ignored_prefixes)
            why = f"{hub.architecture} has no such part" if is_other else "it can be recomputed"
            say(f"not read, as {why}: {name}")


def check_tied_head(name: str, tensors: list[HFTensor], folder: ModelSource, fetch: Fetch) -> None:
    """Raise DataError if the stored head of a tied model differs from the embedding.

    4096 rows are compared at a time.
    """
    table = next(each for each in tensors if each.parts[0].path == "embedding/table")
    shape = folder.tensors()[name][1]
    for first in range(0, shape[0], 4096):
        cut = (slice(first, min(first + 4096, shape[0])), slice(0, shape[1]))
        if shape != table.shape or not np.array_equal(fetch(name, cut), fetch(table.name, cut)):
            raise DataError(
                f"{name} differs from the embedding",
                where=str(folder.path),
                why="config.json sets tie_word_embeddings, so one of the two would be lost",
                fix='"tie_word_embeddings": false in config.json keeps both',
            )
