"""Data sets of the Hugging Face Hub: `hf:ORG/NAME[@REVISION][/FILES or /SUBSET][:SPLIT]`.

The files of a split are those that the card of the data set lists. Without such a list they are
those whose name or folder contains the split, and all files if no name contains any split.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxlm.core import hub
from jaxlm.core.errors import InputMissing
from jaxlm.data.formats import FORMATS, kind_of

PARQUET = "refs/convert/parquet"  # where the hub keeps most data sets as Parquet
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
Flag = Callable[[str], str]  # from an entry to the flag that has it instead of the present one
_NAME = re.compile(
    r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert|pr)/\w+|[\w.-]+))?"
    r"(?:/(?P<files>[^:]+))?(?::(?P<split>[\w.-]+))?"
)


class DatasetName(NamedTuple):
    """The parts of a name."""

    name: str
    revision: str | None = None
    files: str | None = None  # glob of paths in the repository, or a subset of its card
    split: str | None = None

    def __str__(self) -> str:
        return "".join(
            (
                f"{hub.PREFIX}{self.name}",
                f"@{self.revision}" if self.revision else "",
                f"/{self.files}" if self.files else "",
                f":{self.split}" if self.split else "",
            )
        )


def parsed(text: str, where: str) -> DatasetName:
    """Return the parts of a name. Raises CommandError if it is malformed.

    Example:
      >>> parsed("hf:org/texts@v1:test", "data.train")
      DatasetName(name='org/texts', revision='v1', files=None, split='test')
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise hub.malformed_name("dataset", f"{where} = {text}")
    return DatasetName(**match.groupdict())


def files_of(
    name: DatasetName, files: list[str], card: Mapping[str, Any], where: str, flag: Flag
) -> list[str]:
    """Return the files of a split, or those that a glob matches, sorted.

    Args:
      name: the data set; without a split, that of training.
      files: every file of the repository.
      card: the metadata of its README.md.
      where: setting that names it, for errors.
      flag: makes the flag that names another data set instead.

    Raises InputMissing if there are none, or if subsets exist and the name has no subset.
    """
    readable = [file for file in files if kind_of(file) in (*FORMATS, ".txt")]
    subsets = _subsets(card)
    glob = name.files
    if glob is not None and glob not in subsets:
        matches = sorted(file for file in files if _matches(file, glob))
        if not matches:
            raise _no_files(name, f"no file matches {glob}", files, subsets, where, flag)
        return matches
    if not readable:
        raise _no_files(
            name, "it has no file of text that jaxlm reads", files, subsets, where, flag
        )
    if glob is None and len(subsets) > 1:
        default = [n for n, config in subsets.items() if config.get("default") or n == "default"]
        if not default:
            raise _no_subset(name, subsets, where, flag)
        glob = default[0]
    by_split = _by_split(subsets[glob] if glob else next(iter(subsets.values()), {}), readable)
    split = name.split or "train"
    if split not in by_split:
        known = ", ".join(by_split)
        what = f"{name.name} has no split {split}"
        fixes = (flag(str(name._replace(split=each))) for each in by_split)
        raise InputMissing(what, where=where, why=f"its splits: {known}", fix="\n".join(fixes))
    return sorted(by_split[split])


def _subsets(card: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the subsets of a card that list their files, by name."""
    listed = card.get("configs")
    if not isinstance(listed, list):
        return {}
    return {
        str(each["config_name"]): each
        for each in listed
        if isinstance(each, Mapping) and "config_name" in each and "data_files" in each
    }


def _by_split(subset: Mapping[str, Any], readable: list[str]) -> dict[str, list[str]]:
    """Return the files of each split."""
    patterns: dict[str, list[str]] = {}
    listed = subset.get("data_files")
    for each in listed if isinstance(listed, list) else [listed] if listed else []:
        is_row = isinstance(each, Mapping)
        paths = each.get("path") if is_row else each
        paths = [paths] if isinstance(paths, str) else paths or []
        split = str(each.get("split", "train")) if is_row else "train"
        patterns.setdefault(split, []).extend(map(str, paths))
    if patterns:
        return {
            split: [file for file in readable if any(_matches(file, glob) for glob in globs)]
            for split, globs in patterns.items()
        }
    splits: dict[str, list[str]] = {}
    for file in readable:
        words = set(re.split(r"[^a-z0-9]+", file.lower()))
        for split, names in SPLITS.items():
            if words.intersection(names):
                splits.setdefault(split, []).append(file)
                break
    return splits or {"train": readable}


def _matches(file: str, glob: str) -> bool:
    """Return whether a path matches a glob; `**` matches folders, also none."""
    return fnmatch.fnmatchcase(file, glob) or fnmatch.fnmatchcase(file, glob.replace("**/", ""))


def _no_files(
    name: DatasetName,
    why: str,
    files: list[str],
    subsets: Mapping[str, object],
    where: str,
    flag: Flag,
) -> InputMissing:
    has = [*subsets, *sorted(files)]
    shown = f"it has {', '.join(has[:6]) or 'nothing'}{', ...' if len(has) > 6 else ''}"
    other = DatasetName(name.name, PARQUET, None, name.split)
    return InputMissing(
        f"{name} names no data",
        where=where,
        why=f"{why}; {shown}",
        fix=f"{flag(str(other))}    # its copy as Parquet, if the hub has one",
    )


def _no_subset(
    name: DatasetName, subsets: Mapping[str, object], where: str, flag: Flag
) -> InputMissing:
    return InputMissing(
        f"{name.name} has {len(subsets)} subsets and no default",
        where=where,
        why=f"they are {', '.join(list(subsets)[:10])}{', ...' if len(subsets) > 10 else ''}",
        fix="\n".join(flag(str(name._replace(files=each))) for each in list(subsets)[:3]),
    )
