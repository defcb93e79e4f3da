"""Corpora that earlier runs made: what is in them already is a duplicate, whatever a new crawl says of it."""

import dataclasses
import glob
import json
from pathlib import Path
from typing import Any

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, InputMissing
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.dedup.signatures import Signatures
from jaxlm.corpus.files import Written, changed, is_whole
from jaxlm.corpus.job import RECIPE, REPORT
from jaxlm.corpus.unit import KEPT, SIGNATURES, output

# Settings that signatures follow from, by the name of what they are compared for.
_MADE_BY = {
    "near": ("words", "bands", "rows"),
    "spans": ("unit", "characters"),
    "substrings": ("words",),
}


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A unit of an earlier run: the file of what it kept, and the signatures of these documents."""

    documents: Path
    signatures: Path
    written: Written

    def read(self) -> Signatures:
        """The signatures.

        Raises:
          DataError: where they are not what that run wrote.
        """
        if not is_whole(self.signatures, self.written):
            raise changed(self.signatures)
        return Signatures.read(self.signatures)


def find(recipe: Recipe) -> list[Earlier]:
    """Every unit of the folders that `against` names, in order.

    Raises:
      InputMissing: where a pattern matches no folder, or one that has not been finished.
      ConfigError: where a folder lacks signatures that the recipe's dedup compares, or made them in another way.
    """
    found: list[Earlier] = []
    for pattern in recipe.against:
        folders = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
        if not folders:
            raise _missing(f"no folder matches {pattern}", "it is the --out of a finished run")
        for folder in folders:
            found += _units(folder, recipe)
    return found


def _units(folder: Path, recipe: Recipe) -> list[Earlier]:
    if not (folder / REPORT).is_file():
        raise _missing(f"{folder} is no finished run", f"it has no {REPORT}")
    before = config.from_json(Recipe, _object(folder / RECIPE)["recipe"])
    for kind in recipe.dedup:
        if kind not in before.dedup and kind in _MADE_BY:
            left = ",".join(each for each in recipe.dedup if each != kind) or "()"
            raise _unlike(
                folder,
                kind,
                why=f"its own dedup was {before.dedup}, without {kind}",
                fix=f"run the recipe of {folder} again with {kind} in its dedup\n"
                f"'--config.dedup={left}'    # does not look for {kind} duplicates",
            )
        pairs = {
            f"{kind}.{name}": [getattr(getattr(each, kind), name) for each in (before, recipe)]
            for name in _MADE_BY.get(kind, ())
        }
        if differ := {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}:
            raise _unlike(
                folder,
                kind,
                why=", ".join(
                    f"{path} was {a} there and is {b} here" for path, (a, b) in differ.items()
                ),
                fix=" ".join(f"--config.{path}={there}" for path, (there, _) in differ.items()),
            )
    files = _object(folder / REPORT)["files"]
    found = [
        Earlier(output(folder, KEPT, int(Path(name).stem)), folder / name, Written(**fields))
        for name, fields in sorted(files.items())
        if name.startswith(f"{SIGNATURES}/")
    ]
    if not found:
        raise _missing(f"{folder} has no {SIGNATURES}", "a version of jaxlm without them wrote it")
    return found


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise changed(path) from None
    if not isinstance(found, dict):
        raise changed(path)
    return found


def _missing(what: str, why: str) -> InputMissing:
    return InputMissing(what, where="against", why=why, fix="find . -name report.json")


def _unlike(folder: Path, kind: str, why: str, fix: str) -> ConfigError:
    return ConfigError(
        f"documents cannot be compared with those of {folder}",
        where=f"against, dedup={kind}",
        why=why,
        fix=fix,
    )
