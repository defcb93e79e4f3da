"""One unit of work: clean its files, and after the comparison of all units write the rest.

Both halves write under a temporary name and rename at the end, so a unit exists whole or not at
all. The output depends on the recipe and the files alone.
"""

import dataclasses
import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.core import faults
from jaxlm.corpus import stages
from jaxlm.corpus.dedup.signatures import Signatures, Signer, ranges, without
from jaxlm.corpus.document import (
    BrokenRecord,
    CorpusDocument,
    Counts,
    Removed,
    Stage,
    from_line,
    to_line,
)
from jaxlm.corpus.engines import Task
from jaxlm.corpus.files import FileDigest, LineFiles, checked_lines
from jaxlm.corpus.filters.models import MakeScorer
from jaxlm.corpus.job import VERDICTS, WORK, FilePart, Job
from jaxlm.corpus.readers.files import is_one_record, read
from jaxlm.corpus.remote import is_remote
from jaxlm.data import cache

KEPT, BROKEN, PLACES, SIGNATURES, DONE = "kept", "broken", "places", "signatures", "done.json"
CUT, NOTHING_LEFT, BLANK = "cut", "nothing_left", "read.blank"

Seconds = defaultdict[str, float]  # CPU seconds by stage


def cleaned(job: Job, number: int) -> Path:
    """Return the folder of a unit between its two halves."""
    return job.out / WORK / f"{number:05d}"


def changed_since(job: Job, number: int, pieces: list[FilePart]) -> list[str]:
    """Return the files of a cleaned unit that were written since; remote files never count."""
    done = json.loads((cleaned(job, number) / DONE).read_text(encoding="utf-8"))
    now = _times(pieces)
    return [name for name, before in done["times"].items() if now[name] != before]


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

    @functools.cached_property
    def _stages(self) -> list[tuple[str, Stage]]:
        return stages.build(self._job.recipe, self._job.scorer)

    def clean(self, number: int) -> dict[str, float]:
        """Read the files of a unit and pass each document through the stages.

        Return CPU seconds by stage.
        """
        seconds = Seconds(float)
        with cache.built(cleaned(self._job, number)) as folder:
            if folder is None:
                return {}
            counts, signer = Counts(), Signer(self._job.recipe)
            times = _times(self._units[number])
            with LineFiles(folder) as out:
                for record in self._read(number, counts, seconds):
                    self._process(record, counts, signer, out, seconds)
                written = out.written()
            signer.finish().write(folder / SIGNATURES)
            counts.check(f"unit {number}")
            done = {
                "times": times,
                "counts": counts.to_json(),
                "files": {name: dataclasses.asdict(each) for name, each in written.items()},
            }
            (folder / DONE).write_text(json.dumps(done), encoding="utf-8")
            faults.point("prepare.clean", number)
        return dict(seconds)

    def _read(
        self, number: int, counts: Counts, seconds: Seconds
    ) -> Iterator[CorpusDocument | BrokenRecord]:
        for piece in self._units[number]:
            if is_one_record(piece.name) and not self._job.is_in(piece.name, 1):
                continue  # in a sample, skip the file without opening it
            job = self._job
            span = job.span(piece)
            records = read(piece.path, piece.name, job.recipe, counts.notes, span, job.is_in)
            while True:
                begun = time.process_time()
                record = next(records, None)
                seconds["read"] += time.process_time() - begun
                if record is None:
                    break
                if self._job.is_in(record.file, record.record):
                    yield record

    def _process(
        self,
        record: CorpusDocument | BrokenRecord,
        counts: Counts,
        signer: Signer,
        out: LineFiles,
        seconds: Seconds,
    ) -> None:
        """Pass a record through all stages and write it to the file of its outcome."""
        if isinstance(record, BrokenRecord):
            counts.add("read")
            counts.add(f"broken.{record.kind}")
            out.write(BROKEN, to_line(record))
            return
        counts.add("read", record.text)
        document = record
        if not record.text.strip():
            _remove(document, BLANK, "", counts, out)
            return
        for name, stage in self._stages:
            begun = time.process_time()
            after = stage(document, counts.notes)
            seconds[name] += time.process_time() - begun
            if isinstance(after, Removed):
                _remove(document, f"{name}.{after.rule}", after.detail, counts, out)
                return
            if not after.text.strip():
                _remove(document, f"{name}.{NOTHING_LEFT}", "", counts, out)
                return
            document = after
        begun = time.process_time()
        signer.add(document)
        seconds["signatures"] += time.process_time() - begun
        counts.add(KEPT, document.text)
        out.write(KEPT, to_line(document))
        out.write(PLACES, json.dumps([document.file, document.record]).encode() + b"\n")

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
        """Write the final files of a unit and its counts."""
        source = cleaned(self._job, number)
        done = json.loads((source / DONE).read_text(encoding="utf-8"))
        before = {name: FileDigest(**fields) for name, fields in done["files"].items()}
        counts = Counts.from_json(done["counts"])
        verdicts = json.loads(verdict(self._job, number).read_text(encoding="utf-8"))
        with LineFiles(folder) as out:
            for name in sorted(before.keys() - {KEPT, PLACES}):
                for line in checked_lines(source / name, before[name]):
                    out.write(name, line)
            signer = Signer(self._job.recipe)
            if KEPT in before:
                documents = checked_lines(source / KEPT, before[KEPT])
                signatures = Signatures.read(source / SIGNATURES)
                self._apply_verdicts(documents, signatures, verdicts, counts, signer, out)
            written = out.written()
        signer.finish().write(folder / SIGNATURES)
        written[SIGNATURES] = FileDigest.of(folder / SIGNATURES, counts.documents[KEPT])
        counts.check(f"unit {number}")
        result = {
            "inputs": [[piece.name, piece.size] for piece in self._units[number]],
            "counts": counts.to_json(),
            "files": {name: dataclasses.asdict(each) for name, each in written.items()},
        }
        (folder / DONE).write_text(json.dumps(result, indent=1), encoding="utf-8")

    def _apply_verdicts(
        self,
        lines: Iterator[bytes],
        signatures: Signatures,
        verdicts: dict[str, Any],
        counts: Counts,
        signer: Signer,
        out: LineFiles,
    ) -> None:
        """Apply the verdicts to the documents that the stages kept; write them and signatures."""
        for ordinal, line in enumerate(lines):
            if (fate := verdicts["removed"].get(str(ordinal))) is not None:
                document = from_line(line)
                _uncount_kept(document, counts)
                _remove(document, fate[0], fate[1], counts, out)
            elif str(ordinal) in verdicts["cut"] or str(ordinal) in verdicts["ranges"]:
                cut = {kind: verdicts[kind].get(str(ordinal), []) for kind in ("cut", "ranges")}
                self._shorten(from_line(line), cut["cut"], cut["ranges"], counts, signer, out)
            else:
                signer.add_signed(signatures, ordinal)
                out.write(KEPT, line)

    def _shorten(
        self,
        document: CorpusDocument,
        spans: list[int],
        substrings: list[list[int]],
        counts: Counts,
        signer: Signer,
        out: LineFiles,
    ) -> None:
        """Write a document without its repeated passages, and the passages themselves."""
        cut = [
            ("spans", *span) for span in ranges(document.text, self._job.recipe.spans, set(spans))
        ]
        cut += [("substrings", begin, end) for begin, end in substrings]
        for kind, begin, end in cut:
            counts.notes[f"{kind}: cut out"] += 1
            piece = dataclasses.replace(document, text=document.text[begin:end], meta={})
            out.write(CUT, to_line(piece, kind=kind, begin=begin))
        text = without(document.text, (span for _, *span in cut)).strip("\n")
        _uncount_kept(document, counts)
        if not text.strip():
            _remove(document, f"{cut[-1][0]}.{NOTHING_LEFT}", "", counts, out)
            return
        counts.add(KEPT, text)
        shorter = document.with_text(text)
        signer.add(shorter)
        out.write(KEPT, to_line(shorter))

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


def output(out: Path, name: str, number: int) -> Path:
    """Return the final path of a file of a unit.

    `removed.STAGE.RULE` becomes removed/STAGE.RULE/NNNNN.jsonl.
    """
    ending = "bin" if name == SIGNATURES else "jsonl"
    return out.joinpath(*name.split(".", 1), f"{number:05d}.{ending}")


def _times(pieces: list[FilePart]) -> dict[str, int | None]:
    """Return the modification time of each local file in nanoseconds."""
    return {
        each.name: None if is_remote(each.name) else each.path.stat().st_mtime_ns for each in pieces
    }


def _remove(
    document: CorpusDocument, reason: str, detail: str, counts: Counts, out: LineFiles
) -> None:
    counts.add(f"removed.{reason}", document.text)
    out.write(f"removed.{reason}", to_line(document, reason=reason, detail=detail))


def _uncount_kept(document: CorpusDocument, counts: Counts) -> None:
    """Undo the count of a kept document."""
    counts.documents[KEPT] -= 1
    counts.characters[KEPT] -= len(document.text)
