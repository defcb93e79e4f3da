"""The last step of a recipe: token shards of the kept documents, in the subfolder `shards`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from jaxlm.core import sections
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.mix import run, sources
from jaxlm.corpus.mix.config import Mix, ShardSettings
from jaxlm.data.config import TOKENIZER_FILES

SHARDS = "shards"


def check(recipe: Recipe) -> None:
    """Raise JaxlmError if the shards' tokenizer cannot be read, before hours of cleaning."""
    if recipe.shards.tokenizer.endswith(TOKENIZER_FILES):
        run.tokenizer_of(recipe.shards.tokenizer, "shards.tokenizer")


def write(
    recipe: Recipe, out: Path, report: dict[str, Any], *, log: Log, **work: Any
) -> dict[str, Any]:
    """Make shards of a finished output folder, or verify existing ones; return mix.json.

    A part without kept documents gets no shards, which is reported. `work` are more arguments of
    `run.run`. Raises JaxlmError as that does; the fix is a separate mix if the shards cannot be
    made here.
    """
    parts = report.get("parts", {})
    for name in (name for name in parts if not parts[name]["kept"]):
        log(f"the part {name} kept no documents: it gets no shards")
    nonempty = [name for name in recipe.part_names if not parts or parts[name]["kept"]]
    mix = _mix(recipe, out, nonempty or list(recipe.part_names))  # the mix reports if all are empty
    try:
        return run.run(mix, out / SHARDS, log=log, **work)
    except (ConfigError, DataError) as error:
        flags = _apart(mix, f"{out}-{SHARDS}", error.fix)
        raise type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}; the cleaned corpus is finished and unaffected",
            fix=f"jaxlm data mix {flags}" if flags else error.fix,
        ) from error


def _apart(mix: Mix, out: str, fix: str) -> str:
    """Return flags of `jaxlm data mix` for these shards elsewhere, with those of a fix, or ""."""
    first = fix.splitlines()[0]
    if not first.startswith(("--config.", "'--config.", "--out=", "'--out=")):
        return ""
    mended = [flag for flag in shlex.split(first, comments=True) if not flag.startswith("--out=")]
    changed = {flag.partition("=")[0] for flag in mended}
    unchanged = [
        f"--config.{name}={sections.show(getattr(mix, name))}"
        for name in ("sources", *(field.name for field in dataclasses.fields(ShardSettings)))
        if getattr(mix, name) != getattr(Mix(), name) and f"--config.{name}" not in changed
    ]
    return shlex.join([*unchanged, *mended, f"--out={out}"])


def _mix(recipe: Recipe, out: Path, names: list[str]) -> Mix:
    fields = dict(vars(recipe.shards))
    for name in ("weights", "licences"):
        fields[name] = tuple(each for each in fields[name] if each.partition("=")[0] in names)
    places = {name: f"{out}{sources.PART}{name}" if recipe.parts else str(out) for name in names}
    return Mix(sources=tuple(f"{name}={place}" for name, place in places.items()), **fields)
