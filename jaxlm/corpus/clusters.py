"""The clusters of duplicates that a run found, with the texts that are in them: what a person looks at to trust it."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.corpus.files import changed
from jaxlm.corpus.job import CLUSTERS, RECIPE, REPORT

Place = tuple[str, int]  # file and record


def clusters(out: Path, kind: str) -> list[dict[str, Any]]:
    """Every cluster of a kind, or of any where that is "all": the largest first, of equals the first.

    Raises:
      InputMissing: where the folder holds no finished run.
      DataError: where the file of clusters was changed.
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
        found = [cluster for cluster in _rows(path) if kind in ("all", cluster["kind"])]
        return sorted(found, key=lambda cluster: -len(cluster["removed"]))
    except (OSError, KeyError, TypeError):
        raise changed(path) from None


def with_texts(out: Path, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same clusters with the text of each document. One that an earlier run kept is read from its folder.

    Raises:
      DataError: where a document is not where the cluster says.
    """
    wanted = {_place(each) for cluster in found for each in (cluster["kept"], *cluster["removed"])}
    texts = dict(_texts(out, wanted))
    for file in sorted({file for file, record in wanted - texts.keys()}):
        records = {record for name, record in wanted - texts.keys() if name == file}
        texts |= {(file, record): text for record, text in _lines(Path(file), records)}
    if missing := sorted(wanted - texts.keys()):
        raise DataError(
            "a document of a cluster is not there",
            where=f"{missing[0][0]}, record {missing[0][1]}",
            why=f"neither {out} nor the folder of {RECIPE}'s against holds it",
            fix="run the same jaxlm data run with another --out",
        )
    return [
        {
            **cluster,
            "kept": {**cluster["kept"], "text": texts[_place(cluster["kept"])]},
            "removed": [{**each, "text": texts[_place(each)]} for each in cluster["removed"]],
        }
        for cluster in found
    ]


def _place(document: dict[str, Any]) -> Place:
    return document["file"], document["record"]


def _texts(out: Path, wanted: set[Place]) -> Iterator[tuple[Place, str]]:
    """What the output holds of the places. What was removed later, as by another kind of duplicate, counts too."""
    for path in sorted([*out.glob("kept/*.jsonl"), *out.glob("removed/*/*.jsonl")]):
        for row in _rows(path):
            if (place := _place(row)) in wanted:
                yield place, row["text"]


def _lines(path: Path, records: set[int]) -> Iterator[tuple[int, str]]:
    """Documents of a file that an earlier run kept, by the numbers of their lines."""
    if path.is_file():
        yield from ((n, row["text"]) for n, row in enumerate(_rows(path), 1) if n in records)


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    with open(path, "rb") as file:
        try:
            yield from map(json.loads, file)
        except ValueError:
            raise changed(path) from None
