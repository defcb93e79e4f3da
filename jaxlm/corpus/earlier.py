"""Corpora of earlier runs: new documents that they contain already are duplicates."""

import dataclasses
import glob
import json
from pathlib import Path
from typing import Any

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, InputMissing
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.dedup.signatures import Signatures
from jaxlm.corpus.files import FileDigest, changed, is_whole
from jaxlm.corpus.job import RECIPE, REPORT, require_finished
from jaxlm.corpus.unit import KEPT, SIGNATURES, output

# Settings that signatures depend on, by kind of duplicate.
_MADE_BY = {
    "near": ("words", "bands", "rows"),
    "spans": ("unit", "characters"),
    "substrings": ("words",),
}


@dataclasses.dataclass(frozen=True)
class EarlierUnit:
    """A unit of an earlier run: its file of kept documents, and their signatures."""

    documents: Path
    signatures: Path
    written: FileDigest

    def read(self) -> Signatures:
        """Read the signatures. Raises DataError if the file is not the one that run wrote."""
        if not is_whole(self.signatures, self.written):
            raise changed(self.signatures)
        return Signatures.read(self.signatures)


def find(recipe: Recipe) -> list[EarlierUnit]:
    """Return every unit of the folders that `against` names, in order.

    Raises:
      InputMissing: a pattern matches no folder, or an unfinished one.
      ConfigError: a folder lacks signatures for the recipe's dedup, or made them differently.
    """
    units: list[EarlierUnit] = []
    for pattern in recipe.against:
        folders = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
        if not folders:
            raise _missing(f"no folder matches {pattern}", "it must be the --out of a finished run")
        for folder in folders:
            units += _units(folder, recipe)
    return units


def _units(folder: Path, recipe: Recipe) -> list[EarlierUnit]:
    require_finished(folder, f"{folder} is not a finished run", "against")
    before = config.from_json(Recipe, _object(folder / RECIPE)["recipe"])
    for kind in recipe.dedup:
        if kind not in before.dedup and kind in _MADE_BY:
            left = ",".join(each for each in recipe.dedup if each != kind) or "()"
            raise _unlike(
                folder,
                kind,
                why=f"dedup was {before.dedup} in that run, without {kind}",
                fix=f"run the recipe of {folder} again with {kind} in its dedup\n"
                f"'--config.dedup={left}'    # skips {kind} duplicates",
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
                    f"{path} was {a} in that run and is {b} now" for path, (a, b) in differ.items()
                ),
                fix=" ".join(f"--config.{path}={theirs}" for path, (theirs, _) in differ.items()),
            )
    files = _object(folder / REPORT)["files"]
    units = [
        EarlierUnit(output(folder, KEPT, int(Path(name).stem)), folder / name, FileDigest(**fields))
        for name, fields in sorted(files.items())
        if name.startswith(f"{SIGNATURES}/")
    ]
    if not units:
        raise _missing(f"{folder} has no {SIGNATURES}", "an older version of jaxlm wrote it")
    return units


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise changed(path) from None
    if not isinstance(content, dict):
        raise changed(path)
    return content


def _missing(what: str, why: str) -> InputMissing:
    return InputMissing(what, where="against", why=why, fix="find . -name report.json")


def _unlike(folder: Path, kind: str, why: str, fix: str) -> ConfigError:
    return ConfigError(
        f"documents cannot be compared with those of {folder}",
        where=f"against, dedup={kind}",
        why=why,
        fix=fix,
    )
