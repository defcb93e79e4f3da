"""One unit of work: clean its files, and after the comparison of all units write the rest.

Both halves write under a temporary name and rename at the end, so a unit exists whole or not at
all. The output depends on the recipe and the files alone.
"""

import collections
import dataclasses
import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxlm.core import disk, faults
from jaxlm.corpus import stages
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.dedup.signatures import Signatures, Signer, ranges, without
from jaxlm.corpus.document import BrokenRecord, CorpusDocument, Counts, Removed, from_line, to_line
from jaxlm.corpus.engines import Task
from jaxlm.corpus.files import FileDigest, LineFiles, checked_lines
from jaxlm.corpus.filters.models import MakeScorer
from jaxlm.corpus.job import VERDICTS, WORK, FilePart, Job
from jaxlm.corpus.readers.files import is_one_record, read
from jaxlm.corpus.readers.streams import Records
from jaxlm.data import cache
from jaxlm.data.stores import is_url

KEPT, BROKEN, PLACES, SIGNATURES, DONE = "kept", "broken", "places", "signatures", "done.json"
TIMES = ".times.json"  # of the files of a finished run
CUT, NOTHING_LEFT, BLANK = "cut", "nothing_left", "read.blank"

Seconds = defaultdict[str, float]  # CPU seconds by stage


def cleaned(job: Job, number: int) -> Path:
    """Return the folder of a unit between its two halves."""
    return job.out / WORK / f"{number:05d}"


def changed_since(job: Job, number: int, pieces: list[FilePart]) -> list[str]:
    """Return the files of a cleaned unit that were written since; remote files never count."""
    return _written_since(times_of(job, number), pieces)


def times_of(job: Job, number: int) -> dict[str, int | None]:
    """Return the modification time of each file of a cleaned unit, as it was read."""
    done = json.loads((cleaned(job, number) / DONE).read_text(encoding="utf-8"))
    times: dict[str, int | None] = done["times"]
    return times


def keep_times(job: Job) -> None:
    """Write the modification times of all files, as they were read, for later starts."""
    times = [times_of(job, number) for number in range(len(job.units))]
    content = dict(sorted(collections.ChainMap(*times).items()))
    disk.replace(job.out / TIMES, json.dumps(content).encode())


def changed_since_the_end(job: Job) -> list[str]:
    """Return the files of a finished run that were written since they were read."""
    path = job.out / TIMES
    if not path.exists():  # a run of an earlier version
        return []
    pieces = [piece for unit in job.units for piece in unit]
    return _written_since(json.loads(path.read_bytes()), pieces)


def _written_since(times: Mapping[str, int | None], pieces: list[FilePart]) -> list[str]:
    now = _times(pieces)
    return [name for name, before in times.items() if now.get(name) != before]


def finished(job: Job, number: int) -> Path:
    """Return the file that marks a unit finished and contains its counts and digests."""
    return job.out / "units" / f"{number:05d}.json"


def verdict(job: Job, number: int) -> Path:
    """Return the file that lists the duplicates of a unit."""
    return job.out / WORK / VERDICTS / f"{number:05d}.json"


@dataclasses.dataclass(frozen=True)
class CleaningTask:
    """One half of every unit of the job in a folder; pickled to the process that runs it."""

    out: Path
    name: Literal["clean", "finish"]
    scorer: MakeScorer | None = None

    def __call__(self) -> Task:
        job = dataclasses.replace(Job.read(self.out), scorer=self.scorer)
        return getattr(CleaningUnits(job), self.name)


class CleaningUnits:
    """Runs units of a job; the stages are made once."""

    def __init__(self, job: Job):
        self._job = job
        self._units = job.units
        self._stages = functools.cache(functools.partial(stages.build, job.recipe, job.scorer))

    def clean(self, number: int) -> dict[str, float]:
        """Pass each document of a unit through the stages; return CPU seconds by stage."""
        seconds = Seconds(float)
        with cache.built(cleaned(self._job, number)) as folder:
            if folder is None:
                return {}
            times = _times(self._units[number])
            unit = _UnitOutput(folder, self._job.recipe)
            with unit.files:
                for record in self._read(number, unit.counts, seconds):
                    self._process(record, unit, seconds)
                unit.write_signatures()
                unit.write_record(number, {"times": times})
            faults.point("prepare.clean", number)
        return dict(seconds)

    def _read(self, number: int, counts: Counts, seconds: Seconds) -> Records:
        job = self._job
        for piece in self._units[number]:
            if is_one_record(piece.name) and not job.is_in(piece.name, 1):
                continue  # in a sample, skip the file without opening it
            span = job.span(piece)
            records = read(piece.path, piece.name, job.recipe, counts.notes, span, job.is_in)
            while True:
                begun = time.process_time()
                record = next(records, None)
                seconds["read"] += time.process_time() - begun
                if record is None:
                    break
                if job.is_in(record.file, record.record):
                    yield record

    def _process(
        self, record: CorpusDocument | BrokenRecord, unit: "_UnitOutput", seconds: Seconds
    ) -> None:
        """Pass a record through all stages and write it to the file of its outcome."""
        if isinstance(record, BrokenRecord):
            unit.counts.add("read")
            unit.counts.add(f"broken.{record.kind}")
            unit.files.write(BROKEN, to_line(record))
            return
        unit.counts.add("read", record.text)
        if not record.text.strip():
            unit.remove(record, BLANK)
            return
        document = record
        for name, stage in self._stages():
            begun = time.process_time()
            after = stage(document, unit.counts.notes)
            seconds[name] += time.process_time() - begun
            if isinstance(after, Removed):
                measured = document.with_text(document.text, **after.measured)
                unit.remove(document, f"{name}.{after.rule}", after.detail, measured)
                return
            if not after.text.strip():
                unit.remove(document, f"{name}.{NOTHING_LEFT}")
                return
            document = after
        begun = time.process_time()
        unit.signer.add(document)
        seconds["signatures"] += time.process_time() - begun
        unit.keep(document)
        place = json.dumps([document.file, document.record])
        unit.files.write(PLACES, place.encode() + b"\n")

    def finish(self, number: int) -> dict[str, float]:
        """Write the final files of a unit: kept documents without duplicates, and removed ones."""
        begun = time.process_time()
        target = cleaned(self._job, number).with_name(f"{number:05d}-out")
        with cache.built(target) as folder:
            if folder is not None:
                self._write(number, folder)
        self._move_to_output(target, number)
        return {"write": time.process_time() - begun}

    def _write(self, number: int, folder: Path) -> None:
        """Apply the verdicts to the documents that the stages kept; write all files of a unit."""
        source = cleaned(self._job, number)
        done = json.loads((source / DONE).read_text(encoding="utf-8"))
        before = {name: FileDigest(**fields) for name, fields in done["files"].items()}
        verdicts = json.loads(verdict(self._job, number).read_text(encoding="utf-8"))
        unit = _UnitOutput(folder, self._job.recipe, Counts.from_json(done["counts"]))
        with unit.files:
            for name in sorted(before.keys() - {KEPT, PLACES}):
                for line in checked_lines(source / name, before[name]):
                    unit.files.write(name, line)
            if KEPT in before:
                signatures = Signatures.read(source / SIGNATURES)
                for ordinal, line in enumerate(checked_lines(source / KEPT, before[KEPT])):
                    removed, spans, substrings = (
                        verdicts[name].get(str(ordinal)) for name in ("removed", "cut", "ranges")
                    )
                    if removed is not None:
                        document = from_line(line)
                        unit.uncount_kept(document)
                        unit.remove(document, *removed)
                    elif spans is not None or substrings is not None:
                        self._shorten(from_line(line), spans or [], substrings or [], unit)
                    else:
                        unit.signer.add_signed(signatures, ordinal)
                        unit.files.write(KEPT, line)
            inputs = [[piece.name, piece.size] for piece in self._units[number]]
            unit.write_record(number, {"inputs": inputs}, signatures=unit.write_signatures())

    def _shorten(
        self, document: CorpusDocument, spans: list[int], substrings: list[Any], unit: "_UnitOutput"
    ) -> None:
        """Write a document without its repeated passages, and the passages themselves."""
        passages = ranges(document.text, self._job.recipe.spans, set(spans))
        cut = [("spans", *passage) for passage in passages]
        cut += [("substrings", begin, end) for begin, end in substrings]
        for kind, begin, end in cut:
            unit.counts.notes[f"{kind}: cut out"] += 1
            piece = dataclasses.replace(document, text=document.text[begin:end], meta={})
            unit.files.write(CUT, to_line(piece, kind=kind, begin=begin))
        text = without(document.text, (span for _, *span in cut)).strip("\n")
        unit.uncount_kept(document)
        if not text.strip():
            unit.remove(document, f"{cut[-1][0]}.{NOTHING_LEFT}")
            return
        shorter = document.with_text(text)
        unit.signer.add(shorter)
        unit.keep(shorter)

    def _move_to_output(self, folder: Path, number: int) -> None:
        """Move the files of a folder to their final places, the record last; can be repeated."""
        out = self._job.out
        for path in sorted(folder.iterdir()):
            if path.name != DONE:
                target = output(out, path.name, number)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
                faults.point("prepare.finish", number)
        finished(self._job, number).parent.mkdir(exist_ok=True)
        os.replace(folder / DONE, finished(self._job, number))
        folder.rmdir()


class _UnitOutput:
    """Files, counts and signatures of one half of a unit."""

    def __init__(self, folder: Path, recipe: Recipe, counts: Counts | None = None):
        self._folder = folder
        self.files = LineFiles(folder)
        self.counts = counts or Counts()
        self.signer = Signer(recipe)

    def keep(self, document: CorpusDocument) -> None:
        """Count and write a kept document, which is signed."""
        self.counts.add(KEPT, document.text)
        self.counts.measure(KEPT, document)
        self.files.write(KEPT, to_line(document))

    def remove(
        self,
        document: CorpusDocument,
        reason: str,
        detail: str = "",
        measured: CorpusDocument | None = None,
    ) -> None:
        """Count and write a removed document; `measured` has what the stage measured too."""
        self.counts.add(f"removed.{reason}", document.text)
        self.counts.measure("removed", measured or document)
        self.files.write(f"removed.{reason}", to_line(document, reason=reason, detail=detail))

    def uncount_kept(self, document: CorpusDocument) -> None:
        self.counts.add(KEPT, document.text, -1)
        self.counts.measure(KEPT, document, -1)

    def write_signatures(self) -> FileDigest:
        path = self._folder / SIGNATURES
        self.signer.finish().write(path)
        return FileDigest.of(path, self.counts.documents[KEPT])

    def write_record(self, number: int, fields: dict[str, Any], **digests: FileDigest) -> None:
        """Write the record that makes the unit complete, with its counts and digests."""
        self.counts.check(f"unit {number}")
        every = self.files.written() | digests
        files = {name: dataclasses.asdict(each) for name, each in every.items()}
        record = {**fields, "counts": self.counts.to_json(), "files": files}
        (self._folder / DONE).write_text(json.dumps(record, indent=1), encoding="utf-8")


def output(out: Path, name: str, number: int) -> Path:
    """Return the final path of a file of a unit; one of `removed.STAGE.RULE` is in two folders.

    Example:
      >>> output(Path("out"), "removed.length.short", 7).as_posix()
      'out/removed/length.short/00007.jsonl'
    """
    ending = "bin" if name == SIGNATURES else "jsonl"
    return out.joinpath(*name.split(".", 1), f"{number:05d}.{ending}")


def _times(pieces: list[FilePart]) -> dict[str, int | None]:
    """Return the modification time of each local file in nanoseconds."""
    return {
        each.name: None if is_url(each.name) else each.path.stat().st_mtime_ns for each in pieces
    }
