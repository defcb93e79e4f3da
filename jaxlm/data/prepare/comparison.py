"""All units compared: the one step that sees them together. It reads signatures, and writes a verdict for each unit."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core import faults
from jaxlm.data import cache
from jaxlm.data.prepare.dedup.merge import Verdict, merge
from jaxlm.data.prepare.dedup.signatures import Signatures
from jaxlm.data.prepare.files import LineFiles
from jaxlm.data.prepare.job import CLUSTERS, Job
from jaxlm.data.prepare.unit import PLACES, SIGNATURES, cleaned, verdict


def compare(job: Job) -> None:
    """Writes which documents of each unit are duplicates, and clusters.jsonl, unless that is done."""
    count = len(job.units)
    target = verdict(job, 0).parent
    with cache.built(target) as folder:
        if folder is None:
            return
        signatures = [Signatures.read(cleaned(job, number) / SIGNATURES) for number in range(count)]
        begins = [0]
        for each in signatures:
            begins.append(begins[-1] + len(each.digests))
        found = merge(signatures, job.recipe)
        del signatures
        places = [place for number in range(count) for place in _places(job, number)]
        _write_clusters(folder, found, places)
        verdicts: list[dict[str, dict[str, object]]] = [
            {"removed": {}, "cut": {}} for _ in job.units
        ]

        def note(document: int, what: str, value: object) -> None:
            unit = bisect_right(begins, document) - 1
            verdicts[unit][what][str(document - begins[unit])] = value

        for cluster in found.clusters:
            file, record = places[cluster.kept]
            for document, agreement in zip(cluster.removed, cluster.agreement, strict=True):
                detail = f"{file}, record {record}; agreement {agreement:g}"
                note(document, "removed", [cluster.kind, detail])
        for document, spans in found.cut.items():
            note(document, "cut", sorted(spans))
        for number, fates in enumerate(verdicts):
            (folder / f"{number:05d}.json").write_text(json.dumps(fates), encoding="utf-8")
        faults.point("prepare.merge")


def _places(job: Job, number: int) -> Iterator[tuple[str, int]]:
    path = cleaned(job, number) / PLACES
    if path.exists():  # else the unit kept nothing
        with open(path, encoding="utf-8") as file:
            yield from (tuple(json.loads(line)) for line in file)  # type: ignore[misc]


def _write_clusters(folder: Path, found: Verdict, places: list[tuple[str, int]]) -> None:
    with LineFiles(folder) as out:
        for cluster in found.clusters:
            line = {
                "kind": cluster.kind,
                "kept": _place(places[cluster.kept]),
                "removed": [
                    {**_place(places[document]), "agreement": agreement}
                    for document, agreement in zip(cluster.removed, cluster.agreement, strict=True)
                ],
            }
            out.write(
                CLUSTERS, json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
            )


def _place(place: tuple[str, int]) -> dict[str, object]:
    return {"file": place[0], "record": place[1]}
