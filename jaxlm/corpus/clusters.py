"""Clusters of duplicates that a run found, with their texts, for inspection."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.corpus.files import changed
from jaxlm.corpus.job import CLUSTERS, RECIPE, REPORT

Place = tuple[str, int]  # file and record


def clusters(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the clusters of a kind ("all" for any), the largest first, ties in file order.

    Raises:
      InputMissing: the folder contains no finished run.
      DataError: the file of clusters was changed.
    """
    if not (out / REPORT).is_file():
        raise InputMissing(
            f"{out} is no finished run",
            where="jaxlm data clusters",
            why=f"it has no {REPORT}",
            fix=f"find . -name {REPORT}",
        )
    path = out / CLUSTERS
    try:
        selected = [cluster for cluster in _rows(path) if kind in ("all", cluster["kind"])]
        return sorted(selected, key=lambda cluster: -len(cluster["removed"]))
    except (OSError, KeyError, TypeError):
        raise changed(path) from None


def with_texts(out: Path, selected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the text of each document. Documents of earlier runs are read from their folder.

    Raises:
      DataError: a document is missing.
    """
    places = {
        _place(each) for cluster in selected for each in (cluster["kept"], *cluster["removed"])
    }
    texts = dict(_texts(out, places))
    for file in sorted({file for file, record in places - texts.keys()}):
        records = {record for name, record in places - texts.keys() if name == file}
        texts |= {(file, record): text for record, text in _lines(Path(file), records)}
    if missing := sorted(places - texts.keys()):
        raise DataError(
            "a document of a cluster is missing",
            where=f"{missing[0][0]}, record {missing[0][1]}",
            why=f"it is not in {out} and not in a folder of against in {RECIPE}",
            fix="run the same jaxlm data run with another --out",
        )
    return [
        {
            **cluster,
            "kept": {**cluster["kept"], "text": texts[_place(cluster["kept"])]},
            "removed": [{**each, "text": texts[_place(each)]} for each in cluster["removed"]],
        }
        for cluster in selected
    ]


def _place(document: dict[str, Any]) -> Place:
    return document["file"], document["record"]


def _texts(out: Path, places: set[Place]) -> Iterator[tuple[Place, str]]:
    """Yield the texts of the places, including documents that were removed later."""
    for path in sorted([*out.glob("kept/*.jsonl"), *out.glob("removed/*/*.jsonl")]):
        for row in _rows(path):
            if (place := _place(row)) in places:
                yield place, row["text"]


def _lines(path: Path, records: set[int]) -> Iterator[tuple[int, str]]:
    """Yield documents of a file that an earlier run kept, by line number."""
    if path.is_file():
        yield from ((n, row["text"]) for n, row in enumerate(_rows(path), 1) if n in records)


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    with open(path, "rb") as file:
        try:
            yield from map(json.loads, file)
        except ValueError:
            raise changed(path) from None
