"""Comparison of all units with each other and with earlier runs.

This is the only step that sees all units. It reads signatures and writes a verdict for each unit,
and the clusters of duplicates, which can be inspected afterwards. A new document that equals one
that an earlier run kept is a duplicate, too.
"""

import functools
import glob
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core import config, faults
from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.dedup.merge import merge
from jaxlm.corpus.dedup.signatures import Signatures
from jaxlm.corpus.files import FileDigest, LineFiles, changed, is_whole, read_object
from jaxlm.corpus.job import CLUSTERS, RECIPE, REPORT, Job, require_finished
from jaxlm.corpus.unit import KEPT, PLACES, SIGNATURES, cleaned, output, verdict
from jaxlm.data import cache

Place = tuple[str, int]  # file and record
# Settings that signatures depend on, by kind of duplicate.
_SIGNATURE_SETTINGS = {
    "near": ("words", "bands", "rows"),
    "spans": ("unit", "characters"),
    "substrings": ("words",),
}


class EarlierUnit(NamedTuple):
    """A unit of an earlier run: its file of kept documents, and their signatures."""

    documents: Path
    signatures: Path
    written: FileDigest

    def read(self) -> Signatures:
        """Read the signatures. Raises DataError if the file is not the one that run wrote."""
        if not is_whole(self.signatures, self.written):
            raise changed(self.signatures)
        return Signatures.read(self.signatures)


def find_earlier(recipe: Recipe) -> list[EarlierUnit]:
    """Return every unit of the folders that `against` names, in order.

    Raises InputMissing if a pattern matches no folder or an unfinished one, ConfigError if the run
    of a folder made no signatures for the recipe's dedup, or made them with other settings.
    """
    units: list[EarlierUnit] = []
    for pattern in recipe.against:
        folders = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
        if not folders:
            raise _missing(f"no folder matches {pattern}", "it must be the --out of a finished run")
        for folder in folders:
            units += _earlier_units(folder, recipe)
    return units


def _earlier_units(folder: Path, recipe: Recipe) -> list[EarlierUnit]:
    require_finished(folder, f"{folder} is not a finished run", "against")
    earlier = config.from_json(Recipe, read_object(folder / RECIPE)["recipe"])
    for kind in recipe.dedup:
        if kind not in earlier.dedup and kind in _SIGNATURE_SETTINGS:
            left = ",".join(each for each in recipe.dedup if each != kind) or "()"
            why = f"dedup was {earlier.dedup} in that run, without {kind}"
            rerun = f"run the recipe of {folder} again with {kind} in its dedup"
            skips = f"'--config.dedup={left}'    # skips {kind} duplicates"
            raise _not_comparable(folder, kind, why=why, fix=f"{rerun}\n{skips}")
        pairs = {
            f"{kind}.{name}": [getattr(getattr(each, kind), name) for each in (earlier, recipe)]
            for name in _SIGNATURE_SETTINGS.get(kind, ())
        }
        if differ := [(path, a, b) for path, (a, b) in pairs.items() if a != b]:
            why = ", ".join(f"{path} was {a} in that run and is {b} now" for path, a, b in differ)
            fix = " ".join(f"--config.{path}={theirs}" for path, theirs, _ in differ)
            raise _not_comparable(folder, kind, why=why, fix=fix)
    files = read_object(folder / REPORT)["files"]
    units = [
        EarlierUnit(output(folder, KEPT, int(Path(name).stem)), folder / name, FileDigest(**fields))
        for name, fields in sorted(files.items())
        if name.startswith(f"{SIGNATURES}/")
    ]
    if not units:
        raise _missing(f"{folder} has no {SIGNATURES}", "an older version of jaxlm wrote it")
    return units


def _missing(what: str, why: str) -> InputMissing:
    return InputMissing(what, where="against", why=why, fix="find . -name report.json")


def _not_comparable(folder: Path, kind: str, why: str, fix: str) -> ConfigError:
    what = f"documents cannot be compared with those of {folder}"
    return ConfigError(what, where=f"against, dedup={kind}", why=why, fix=fix)


REPEATED_WORDS = "substrings.repeated"


def compare(job: Job) -> None:
    """Write the verdict of each unit and clusters.jsonl, unless that is done."""
    count = len(job.units)
    target = verdict(job, 0).parent
    with cache.built(target) as folder:
        if folder is None:
            return
        earlier = find_earlier(job.recipe)
        signatures = [unit.read() for unit in earlier]
        signatures += [Signatures.read(cleaned(job, n) / SIGNATURES) for n in range(count)]
        # Documents are numbered across all units, those of earlier runs first.
        offsets = [0, *itertools.accumulate(len(each.digests) for each in signatures)]
        first_new = offsets[len(earlier)]
        files = [unit.documents for unit in earlier]
        files += [cleaned(job, number) / KEPT for number in range(count)]
        texts = functools.partial(_texts, files, offsets)
        result = merge(signatures, job.recipe, first_new, texts)
        del signatures
        places: list[Place] = []
        for path in (cleaned(job, number) / PLACES for number in range(count)):
            if path.exists():  # a unit that kept nothing has none
                places += (tuple(json.loads(line)) for line in path.read_bytes().splitlines())

        def place(document: int) -> Place:
            if document >= first_new:
                return places[document - first_new]
            unit = bisect_right(offsets, document) - 1
            return str(earlier[unit].documents), document - offsets[unit] + 1

        kinds = ("removed", "cut", "ranges")
        verdicts = [{kind: dict[str, object]() for kind in kinds} for _ in job.units]

        def note(document: int, what: str, value: object) -> None:
            unit = bisect_right(offsets, document) - 1
            verdicts[unit - len(earlier)][what][str(document - offsets[unit])] = value

        with LineFiles(folder) as out:
            for kind, representative, every, agreements in result.clusters:
                file, record = place(representative)
                removed = []
                for document, agreement in zip(every, agreements, strict=True):
                    detail = f"{file}, record {record}; agreement {agreement:g}"
                    note(document, "removed", [kind, detail])
                    fields = (*place(document), agreement)
                    removed.append(dict(zip(("file", "record", "agreement"), fields, strict=True)))
                line = {"kind": kind, "kept": {"file": file, "record": record}, "removed": removed}
                text = json.dumps(line, ensure_ascii=False)
                out.write(CLUSTERS, text.encode(errors="replace") + b"\n")
        for document, spans in result.cut.items():
            note(document, "cut", sorted(spans))
        for document, ranges in result.ranges.items():
            note(document, "ranges", ranges)
        for document, share in result.repeated.items():
            note(document, "removed", [REPEATED_WORDS, f"{share:.1%} of its words occur elsewhere"])
        for number, unit_verdict in enumerate(verdicts):
            (folder / f"{number:05d}.json").write_text(json.dumps(unit_verdict), encoding="utf-8")
        faults.point("prepare.merge")


def _texts(files: list[Path], offsets: list[int], documents: Sequence[int]) -> Iterator[str]:
    """Yield the texts of documents by ascending number. Raises DataError if a file has changed."""
    for unit, group in itertools.groupby(documents, lambda each: bisect_right(offsets, each) - 1):
        with open(files[unit], "rb") as file:
            lines = enumerate(file, offsets[unit])
            for document in group:
                line = next((line for number, line in lines if number == document), b"")
                try:
                    yield json.loads(line)["text"]
                except (ValueError, TypeError, KeyError):
                    raise changed(files[unit]) from None


def clusters(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the clusters of a kind ("all" for any), the largest first, ties in file order.

    Raises InputMissing if the folder has no finished run, DataError if the clusters were changed.
    """
    require_finished(out, f"{out} is not a finished run", "jaxlm data clusters")
    path = out / CLUSTERS
    try:
        selected = [cluster for cluster in _rows(path) if kind in ("all", cluster["kind"])]
        return sorted(selected, key=lambda cluster: -len(cluster["removed"]))
    except (OSError, KeyError, TypeError):
        raise changed(path) from None


def with_texts(out: Path, selected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the text of each document, also of earlier runs. Raises DataError if one is missing."""
    documents = [each for cluster in selected for each in (cluster["kept"], *cluster["removed"])]
    places = set(map(_place, documents))
    texts: dict[Place, str] = {}
    # Documents may have been removed after the comparison.
    for path in sorted([*out.glob("kept/*.jsonl"), *out.glob("removed/*/*.jsonl")]):
        texts |= {_place(row): row["text"] for row in _rows(path) if _place(row) in places}
    # A document of an earlier run has the place of its line in the file of kept documents.
    for file in sorted({file for file, _ in places - texts.keys() if Path(file).is_file()}):
        rows = enumerate(_rows(Path(file)), 1)
        texts |= {(file, n): row["text"] for n, row in rows if (file, n) in places}
    if missing := sorted(places - texts.keys()):
        raise DataError(
            "a document of a cluster is missing",
            where=f"{missing[0][0]}, record {missing[0][1]}",
            why=f"it is not in {out} and not in a folder of against in {RECIPE}",
            fix="run the same jaxlm data run with another --out",
        )

    def with_text(document: dict[str, Any]) -> dict[str, Any]:
        return {**document, "text": texts[_place(document)]}

    return [
        cluster
        | {"kept": with_text(cluster["kept"]), "removed": list(map(with_text, cluster["removed"]))}
        for cluster in selected
    ]


def _place(document: dict[str, Any]) -> Place:
    return document["file"], document["record"]


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    with open(path, "rb") as file:
        try:
            yield from map(json.loads, file)
        except ValueError:
            raise changed(path) from None
