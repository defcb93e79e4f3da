"""Download of a model from the Hugging Face Hub: the files that an import reads, and no others."""

import re
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.checkpoint.hub_folder import INDEX, PICKLES, WHOLE, parsed_object
from jaxlm.core import hub
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import InputMissing
from jaxlm.core.hub import PREFIX
from jaxlm.monitor import formatting

_NAME = re.compile(r"hf:(?P<model>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


class FetchedModel(NamedTuple):
    """A model's folder, and the name with its commit."""

    path: Path
    origin: str


def fetch_model(
    name: str,
    others: Collection[str],
    *,
    check: Callable[[dict[str, Any], str], object],
    say: Log = lambda _: None,
    show: OnProgress = lambda what, done, total: None,
) -> FetchedModel:
    """Fetch the safetensors files of `hf:org/name[@revision]`, their index, and other files.

    Only files at the top level of the model are considered; pickles and code are never fetched.
    Progress is printed by `say`.

    Args:
      others: names of files to fetch as well, if the model has them.
      check: called as (config, where) with config.json before anything large is fetched; raises
        an error if it cannot be imported.
      show: called as (file, bytes done, bytes in total).

    Raises CommandError if the name is malformed; InputMissing if the hub is unreachable, denies
    access or lacks the model, or the model has no safetensors.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise hub.malformed_name("model", f"--from={name}")
    model = hub.HubRepository(match["model"], match["revision"], "model", f"--from={name}", show)
    info = model.info()
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    extras = sorted(file for file in sizes if file in others or _is_top(file, ".tiktoken"))
    weights = _weights(name, sizes)
    if "config.json" in sizes:
        config = model.download("config.json", info.sha)
        check(parsed_object(config.read_bytes(), str(config)), str(config))
    if weights == [INDEX]:
        index = parsed_object(model.download(INDEX, info.sha).read_bytes(), INDEX)
        shards = index.get("weight_map")
        shards = set(shards.values()) if isinstance(shards, dict) else set()
        top = (file for file in sizes if _is_top(file, ".safetensors"))
        weights += sorted(file for file in top if file in shards)
    files = [*extras, *weights]
    origin = f"{PREFIX}{model.name}@{info.sha}"
    say(f"{origin}: {len(files)} files, {formatting.size(sum(sizes[file] for file in files))}")
    for number, file in enumerate(files, 1):
        say(f"fetching {file}, {formatting.size(sizes[file])} ({number} of {len(files)})")
        path = model.download(file, info.sha)
    return FetchedModel(path.parent, origin)


def _is_top(file: str, suffix: str) -> bool:
    """Return True if a file is at the top of the model and ends in `suffix`."""
    return file.endswith(suffix) and "/" not in file


def _weights(name: str, sizes: dict[str, int]) -> list[str]:
    """Return the index, or the one safetensors file, as `hub_folder.Folder` expects them."""
    tensors = [file for file in sizes if _is_top(file, ".safetensors")]
    for file in (INDEX, WHOLE, *(tensors if len(tensors) == 1 else ())):
        if file in sizes:
            return [file]
    pickles = [file for file in sizes if file.endswith(PICKLES)]
    files = [file for file in sizes if file.endswith(".gguf")]
    fix = "the name of a model that is published as safetensors"
    if files:
        model, _, revision = name.removeprefix(PREFIX).partition("@")
        download_command = hub.download_command(model, revision, "model", files[0])
        fix = f"{download_command} --local-dir=.    # first\n--from={shlex.quote(files[0])}"
    raise InputMissing(
        "the model has no safetensors",
        where=f"--from={name}",
        why=f"{', '.join(pickles[:3])} may run code when opened, and are not fetched"
        if pickles
        else f"it has {', '.join(sorted(files or sizes)[:5]) or 'no files'}",
        fix=fix,
    )
