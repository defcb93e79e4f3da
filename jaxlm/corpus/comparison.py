"""All units compared, with each other and with earlier runs: the one step that sees them together.

It reads signatures, and writes a verdict for each unit.
"""

import functools
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxlm.core import faults
from jaxlm.corpus import earlier
from jaxlm.corpus.dedup.merge import Verdict, merge
from jaxlm.corpus.dedup.signatures import Signatures
from jaxlm.corpus.files import LineFiles, changed
from jaxlm.corpus.job import CLUSTERS, Job
from jaxlm.corpus.unit import KEPT, PLACES, SIGNATURES, cleaned, verdict
from jaxlm.data import cache

REPEATED = "substrings.repeated"


def compare(job: Job) -> None:
    """Writes which documents of each unit are duplicates, and clusters.jsonl, unless that is done."""
    count = len(job.units)
    target = verdict(job, 0).parent
    with cache.built(target) as folder:
        if folder is None:
            return
        before = earlier.find(job.recipe)
        signatures = [
            *(unit.read() for unit in before),
            *(Signatures.read(cleaned(job, number) / SIGNATURES) for number in range(count)),
        ]
        # Documents are numbered through all units, those of earlier runs first.
        begins = [0, *itertools.accumulate(len(each.digests) for each in signatures)]
        settled = begins[len(before)]
        files = [unit.documents for unit in before]
        files += [cleaned(job, number) / KEPT for number in range(count)]
        texts = functools.partial(_texts, files, begins)
        found = merge(signatures, job.recipe, settled, texts)
        del signatures
        ours = [place for number in range(count) for place in _places(job, number)]

        def place(document: int) -> tuple[str, int]:
            if document >= settled:
                return ours[document - settled]
            unit = bisect_right(begins, document) - 1
            return str(before[unit].documents), document - begins[unit] + 1

        _write_clusters(folder, found, place)
        verdicts: list[dict[str, dict[str, object]]] = [
            {"removed": {}, "cut": {}, "ranges": {}} for _ in job.units
        ]

        def note(document: int, what: str, value: object) -> None:
            unit = bisect_right(begins, document) - 1
            verdicts[unit - len(before)][what][str(document - begins[unit])] = value

        for cluster in found.clusters:
            file, record = place(cluster.kept)
            for document, agreement in zip(cluster.removed, cluster.agreement, strict=True):
                detail = f"{file}, record {record}; agreement {agreement:g}"
                note(document, "removed", [cluster.kind, detail])
        for document, spans in found.cut.items():
            note(document, "cut", sorted(spans))
        for document, ranges in found.ranges.items():
            note(document, "ranges", ranges)
        for document, share in found.repeated.items():
            note(document, "removed", [REPEATED, f"{share:.1%} of its words stand elsewhere"])
        for number, fates in enumerate(verdicts):
            (folder / f"{number:05d}.json").write_text(json.dumps(fates), encoding="utf-8")
        faults.point("prepare.merge")


def _texts(files: list[Path], begins: list[int], documents: Sequence[int]) -> Iterator[str]:
    """The texts of documents, by their numbers in order; each file that holds one is read once.

    Raises:
      DataError: where a file that an earlier run wrote has other lines now.
    """
    for unit, group in itertools.groupby(documents, lambda each: bisect_right(begins, each) - 1):
        with open(files[unit], "rb") as file:
            lines = enumerate(file, begins[unit])
            for document in group:
                line = next((line for number, line in lines if number == document), b"")
                try:
                    yield json.loads(line)["text"]
                except (ValueError, TypeError, KeyError):
                    raise changed(files[unit]) from None


def _places(job: Job, number: int) -> Iterator[tuple[str, int]]:
    path = cleaned(job, number) / PLACES
    if path.exists():  # else the unit kept nothing
        with open(path, encoding="utf-8") as file:
            yield from (tuple(json.loads(line)) for line in file)  # type: ignore[misc]


def _write_clusters(folder: Path, found: Verdict, place: Callable[[int], tuple[str, int]]) -> None:
    with LineFiles(folder) as out:
        for cluster in found.clusters:
            line = {
                "kind": cluster.kind,
                "kept": _named(place(cluster.kept)),
                "removed": [
                    {**_named(place(document)), "agreement": agreement}
                    for document, agreement in zip(cluster.removed, cluster.agreement, strict=True)
                ],
            }
            out.write(
                CLUSTERS, json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
            )


def _named(place: tuple[str, int]) -> dict[str, object]:
    return {"file": place[0], "record": place[1]}
