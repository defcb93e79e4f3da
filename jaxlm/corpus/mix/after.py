"""The last step of a recipe: token shards of what it kept, in the folder `shards` of its output."""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.core import values
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.engines import EngineName
from jaxlm.corpus.mix import run, sources
from jaxlm.corpus.mix.config import Mix, Shards
from jaxlm.corpus.run import Progress
from jaxlm.data.config import TOKENIZER_FILES

SHARDS = "shards"


def check(recipe: Recipe) -> None:
    """Says what keeps shards from being written, before hours of cleaning.

    Raises:
      JaxlmError: where the tokenizer is a file that cannot be read.
    """
    if recipe.shards.tokenizer.endswith(TOKENIZER_FILES):
        run.tokenizer_of(recipe.shards.tokenizer, "shards.tokenizer")


def write(
    recipe: Recipe,
    out: Path,
    report: dict[str, Any],
    *,
    workers: int,
    engine: EngineName,
    say: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Makes shards of a finished output folder, or finds that they are there. Gives what mix.json holds.

    A part of which nothing stays has none, and is said.

    Raises:
      JaxlmError: as `run.run`. Where the shards that are asked for cannot be had of this corpus, the fix is a mix apart from it.
    """
    parts = report.get("parts", {})
    for name in (name for name in parts if not parts[name]["kept"]):
        say(f"nothing of the part {name} stays: it has no shards")
    mix = _mix(
        recipe, out, [name for name in recipe.part_names if not parts or parts[name]["kept"]]
    )
    try:
        return run.run(
            mix, out / SHARDS, workers=workers, engine=engine, say=say, progress=progress
        )
    except (ConfigError, DataError) as error:
        flags = _apart(mix, f"{out}-{SHARDS}", error.fix)
        raise type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}; the cleaned corpus is done, and stays",
            fix=f"jaxlm data mix {flags}" if flags else error.fix,
        ) from error


def _apart(mix: Mix, out: str, fix: str) -> str:
    """Return the flags that make the same shards in a folder of their own, mended by those of a fix.

    There are none if the fix is not made of flags of `jaxlm data mix`.
    """
    first = fix.splitlines()[0]
    if not first.startswith(("--config.", "'--config.", "--out=", "'--out=")):
        return ""
    names = ["sources", *(field.name for field in dataclasses.fields(Shards))]
    flags = [
        f"--config.{name}={values.show(getattr(mix, name))}"
        for name in names
        if getattr(mix, name) != getattr(Mix(), name)
    ]
    mended = [flag for flag in shlex.split(first, comments=True) if not flag.startswith("--out=")]
    changed = {flag.partition("=")[0] for flag in mended}
    kept = [flag for flag in flags if flag.partition("=")[0] not in changed]
    return shlex.join([*kept, *mended, f"--out={out}"])


def _mix(recipe: Recipe, out: Path, names: list[str]) -> Mix:
    """The mix of these parts of a recipe's own output, or of the whole of it."""
    names = names or list(recipe.part_names)  # where nothing stays, the mix says so
    fields = {
        field.name: getattr(recipe.shards, field.name) for field in dataclasses.fields(Shards)
    }
    for name in ("weights", "licences"):
        fields[name] = tuple(each for each in fields[name] if each.partition("=")[0] in names)
    places = {name: f"{out}{sources.PART}{name}" if recipe.parts else str(out) for name in names}
    return Mix(sources=tuple(f"{name}={place}" for name, place in places.items()), **fields)
