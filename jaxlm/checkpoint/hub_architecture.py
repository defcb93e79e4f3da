"""Which model a folder of Hugging Face holds, by its config.json, and which of its tensors are read."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from jaxlm.checkpoint.hub_folder import DTYPES, Source
from jaxlm.checkpoint.hub_tensors import Fetch, HFTensor
from jaxlm.core import config
from jaxlm.core.errors import DataError
from jaxlm.models.families.hub import Attributes, Hub, WrapperConfig
from jaxlm.models.families.union import Family

ARMS = {arm.HUB.model_type: arm for arm in get_args(Family)}
PARTS = {arm.HUB.whole.model_type: arm for arm in get_args(Family) if arm.HUB.whole}


def described(folder: Source, say: Callable[[str], None]) -> tuple[Any, str]:
    """The family with its sizes, and the dtype of its matrices: float32 where they have several, which holds all of them.

    Raises:
      DataError: where there is no such family here, or an attribute is not understood.
    """
    raw = folder.config
    family = family_of(raw, str(folder.path / "config.json"))
    if raw.get("auto_map"):
        say(
            "the folder names code of its own (auto_map), which is never run: the model is built from our own parts"
        )
    found = {dtype for dtype, shape in folder.tensors().values() if len(shape) > 1}
    stored = found & DTYPES.keys()  # GPT-2's has masks of bytes beside
    dtype = DTYPES.get("".join(stored), DTYPES["F32"]).name
    claimed = raw.get("dtype") or raw.get("torch_dtype") or dtype
    if claimed != dtype:
        held = " and ".join(sorted(stored))
        say(
            f"config.json says {claimed!r:.40}, and the matrices are {held}: an export will be in {dtype}"
        )
    return family, dtype


def family_of(raw: dict[str, Any], where: str) -> Any:
    """What a config.json describes, checked as a config of ours. Raises DataError."""
    kind, known = raw.get("model_type"), ARMS | PARTS
    if not isinstance(kind, str) or kind not in known:
        raise DataError(
            f"models of the type {kind!r:.60} are not known",
            where=where,
            why=f"known are {', '.join(sorted(known))}",
            fix="import a model of one of these types",
        )
    arm = known[kind]
    given = _part(raw, arm.HUB.whole, where) if kind in PARTS else Attributes(raw, where)
    family = arm.from_hub(given)
    given.check()
    return config.from_json(arm, config.to_json(family), where=where)


def _part(raw: dict[str, Any], whole: WrapperConfig, where: str) -> Attributes:
    """The attributes of the part that we have of a larger model. Raises DataError where one of its own is not known."""
    outer = Attributes(raw, where)
    part = outer.get(whole.attribute, kind=dict)
    outer.expect("tie_word_embeddings", True)
    outer.ignore(*whole.own)
    outer.check()
    return Attributes({**whole.absent, **part}, where)


def named(tensors: list[HFTensor], folder: Source, hub: Hub) -> list[HFTensor]:
    """The tensors by the names that the folder uses."""
    name = namer(folder, hub)
    return [dataclasses.replace(each, name=name(each.name)) for each in tensors]


def namer(folder: Source, hub: Hub) -> Callable[[str], str]:
    """What the folder calls a tensor: by an older name, without what is optional in front, or as a part of a larger model."""
    there = folder.tensors()
    whole = hub.whole_of(folder.config)
    is_short = whole is None and not any(name.startswith(hub.optional) for name in there)
    pairs = () if whole is None else whole.names
    found = (pair for pair in pairs if any(name.startswith(pair[1]) for name in there))
    begins, begin_there = next(found, ("", ""))

    def name(ours: str) -> str:
        ours = ours.removeprefix(hub.optional) if is_short else ours
        if ours.startswith(begins):
            ours = begin_there + ours.removeprefix(begins)
        for old, new in hub.older:
            if ours not in there and ours.endswith(new):
                ours = ours.removesuffix(new) + old
        return ours

    return name


def compare(
    tensors: list[HFTensor],
    folder: Source,
    hub: Hub,
    *,
    is_tied: bool,
) -> list[str]:
    """The tensors of the folder that need not be read.

    Raises:
      DataError: where one is missing, left over, or of another shape or dtype; all of them are told.
    """
    there, wanted = folder.tensors(), {each.name: each.shape for each in tensors}
    again = (*hub.buffers, hub.head) if is_tied else hub.buffers
    left = there.keys() - wanted.keys()
    whole = hub.whole_of(folder.config)
    others = (*hub.others, *hub.layers_ahead(folder.config), *(whole.beside if whole else ()))
    ignored = sorted(name for name in left if name.endswith(again) or name.startswith(others))
    problems = [f"missing     {name} {list(wanted[name])}" for name in wanted if name not in there]
    problems += [f"unexpected  {name}" for name in sorted(left - set(ignored))]
    for name, shape in wanted.items():
        dtype, found = there.get(name, ("F32", shape))
        if found != shape:
            problems.append(f"shape       {name}: got {list(found)}, want {list(shape)}")
        if dtype not in DTYPES:
            problems.append(f"dtype       {name}: got {dtype}, want {', '.join(DTYPES)}")
    if problems:
        raise DataError(
            f"{len(problems)} tensors of the folder do not fit the model of its config.json",
            where=str(folder.path),
            why="every one must be there, of the shape that it has there, and no other",
            every=problems,
            fix="fetch the folder again where it came from\nsave it again with transformers",
        )
    return ignored


def tell_ignored(ignored: list[str], folder: Source, hub: Hub, say: Callable[[str], None]) -> None:
    """Every tensor that was not read, and why; those of a layer or of a part that we do not have by their number."""
    whole = hub.whole_of(folder.config)
    parts = dict.fromkeys(
        hub.layers_ahead(folder.config),
        f"a layer that predicts a token beyond the next, which {hub.architecture} does not compute; "
        "objective.name=mtp trains such heads from their start",
    ) | dict.fromkeys(
        whole.beside if whole else (),
        f"which is not of {hub.architecture}: the part of the model that reads and writes text",
    )
    for part, why in parts.items():
        if count := sum(name.startswith(part) for name in ignored):
            say(f"not read: {count} tensors of {part}*, {why}")
    for name in ignored:
        if not name.startswith(tuple(parts)):
            is_other = name.startswith(hub.others)
            why = f"{hub.architecture} has no such part" if is_other else "it can be computed again"
            say(f"not read, as {why}: {name}")


def refuse_other_head(name: str, tensors: list[HFTensor], folder: Source, fetch: Fetch) -> None:
    """A head that is stored although the model is tied must be the embedding itself, of which a part is compared at a time."""
    table = next(each for each in tensors if each.parts[0].path == "embedding/table")
    shape = folder.tensors()[name][1]
    for first in range(0, shape[0], 4096):
        cut = (slice(first, min(first + 4096, shape[0])), slice(0, shape[1]))
        if shape != table.shape or not np.array_equal(fetch(name, cut), fetch(table.name, cut)):
            raise DataError(
                f"{name} is another matrix than the embedding",
                where=str(folder.path),
                why="config.json says tie_word_embeddings, and one of the two would be lost",
                fix='"tie_word_embeddings": false in config.json keeps both',
            )
